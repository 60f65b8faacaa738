"""softmax(x, dim) computed from half precision to float   ->   softmax(cast(x, float32), dim)

So that attention has one spelling on every device. Seen in: `softmax(scores, dim=-1, dtype=torch.float32)` traced on CUDA.
"""

import torch
from dsi.patterns.rule import Rule


class SoftmaxCast(Rule):
    dims = {"x": "... C"}
    literals = {"dim": (-1, 1)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, dim):
        return op.softmax_to_float(x, dim)

    def check(self, m):
        m.require(m.dtype("x") in (torch.float16, torch.bfloat16), f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return dsi.aten.softmax(dsi.aten.cast(m.x, torch.float32), m.dim)
