"""softmax(x - max(x, d), d)   ->   softmax(x, d)

The same weights: a softmax is less the greatest already. Less anything else, scores may all be one, or not a number: what is subtracted
for rows that are padding drowns them. Seen in: models that subtract the maximum themselves (MiMo, early GPT code).
"""

import torch
from dsi.patterns.rule import Rule


class ShiftedSoftmax(Rule):
    literals = {"dim": (-1, 1)}
    stage = "normalise"

    def pattern(self, op, x, dim, wide):
        greatest = op.either("shift", max=lambda: op.item(op.max(x, dim, True), 0), amax=lambda: op.amax(x, [dim], True))
        return op.softmax(op.maybe_cast(x - greatest, wide, tag="wide"), dim)

    def check(self, m):
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")
        m.require(m.is_int("dim") and m.rank("x") > 0, "the dimension is computed in the graph")

    def rewrite(self, dsi, m):
        return dsi.aten.softmax(dsi.aten.cast(m.x, m.wide) if m.cast("wide") is not None else m.x, m.dim)

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor_of([s.size("A"), 1 + s.size("B"), s.size("C")]), "wide": torch.float32}
