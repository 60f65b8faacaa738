"""vector_norm(x, 2, d)²   ->   sum(x * x, d)

In fp32 and fp64: in half precision the length is rounded before it is squared. Seen in: norms by `x.norm(dim=-1)` or
`torch.linalg.vector_norm`.
"""

import torch
from dsi.patterns.rule import Rule

vector_norm = torch.ops.aten.linalg_vector_norm.default


class SquaredLength(Rule):
    literals = {"axis": (-1, 1), "kept": (True, False)}
    stage = "normalise"

    def pattern(self, op, x, axis, kept):
        return op.square(op.call(vector_norm, x, 2, [axis], kept))

    def check(self, m):
        m.require(m.dtype("x") in (torch.float32, torch.float64), f"a length of {m.dtype('x')} is rounded before it is squared")
        m.require(m.is_int("axis") and isinstance(m.kept, bool), "the dimension is computed in the graph")

    def rewrite(self, dsi, m):
        return dsi.aten.sum(dsi.aten.mul(m.x, m.x), [m.axis], m.kept)

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor("A B C")}
