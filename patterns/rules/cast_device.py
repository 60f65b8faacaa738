"""_to_copy(x, dtype=d, layout and device as those of x)   ->   cast(x, d)

Seen in: `inv_freq.to(device=x.device, dtype=torch.float)` of rotary embeddings, `type_as` of norms, `softmax(dtype=...)`.
"""

import torch
from dsi.patterns.rule import Rule


class CastDevice(Rule):
    dims = {"x": "..."}
    literals = {"to": (torch.float32, torch.bfloat16), "device": (torch.device("cpu"),), "layout": (torch.strided,)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, to, device, layout):
        cast = torch.ops.aten._to_copy.default
        return op.either(
            "given",
            device=lambda: op.call(cast, x, dtype=to, device=device),
            layout=lambda: op.call(cast, x, dtype=to, layout=layout),
            both=lambda: op.call(cast, x, dtype=to, device=device, layout=layout),
        )

    def check(self, m):
        m.require(m.value("x").device == m.output().device, f"it moves {m.value('x').device} to {m.output().device}")
        m.require(m.value("x").layout == m.output().layout, f"it changes the layout {m.value('x').layout}")

    def rewrite(self, dsi, m):
        return dsi.aten.cast(m.x, m.to)
