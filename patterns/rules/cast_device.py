"""_to_copy(x, dtype=d, device=the device of x)   ->   cast(x, d)

Seen in: rotary embeddings, which spell `inv_freq.to(device=x.device, dtype=torch.float)`.
"""

import torch
from dsi.patterns.rule import Rule


class CastDevice(Rule):
    dims = {"x": "..."}
    literals = {"to": (torch.float32, torch.bfloat16), "device": (torch.device("cpu"),)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, to, device):
        return op.call(torch.ops.aten._to_copy.default, x, dtype=to, device=device)

    def check(self, m):
        m.require(m.value("x").device == m.output().device, f"it moves {m.value('x').device} to {m.output().device}")

    def rewrite(self, dsi, m):
        return dsi.aten.cast(m.x, m.to)
