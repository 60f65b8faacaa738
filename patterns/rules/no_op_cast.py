"""cast(x, dtype of x)   ->   x

Seen in: models that spell `.to(dtype, copy=True)`; what remains of cast chains.
"""

import torch
from dsi.patterns.rule import Rule


class NoOpCast(Rule):
    dims = {"x": "..."}
    literals = {"to": (torch.float32, torch.float16, torch.bfloat16)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, to):
        return op.cast(x, to)

    def check(self, m):
        m.require(m.dtype("x") == m.output().dtype, f"it casts {m.dtype('x')} to {m.output().dtype}")

    def rewrite(self, dsi, m):
        return m.x
