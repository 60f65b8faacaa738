"""softmax(x - term)   ->   softmax(x + (-term))

So that what is added to scores has one spelling. Seen in: XLNet, Funnel: `scores - 1e30 * mask`.
"""

import torch
from dsi.patterns.rule import Rule


class SubtractedTerm(Rule):
    dims = {"x": "... C", "term": "~... C"}
    literals = {"dim": (-1,)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, term, wide, dim):
        return op.softmax(op.maybe_cast(x - term, wide, tag="wide"), dim)

    def check(self, m):
        m.require(m.dtype("x").is_floating_point and m.dtype("term") == m.dtype("x"), f"{m.dtype('term')} is taken from {m.dtype('x')}")
        m.require(m.is_int("dim"), "the dimension is computed in the graph")

    def rewrite(self, dsi, m):
        scores = dsi.aten.add(m.x, dsi.aten.neg(m.term))
        return dsi.aten.softmax(dsi.aten.cast(scores, m.wide) if m.cast("wide") is not None else scores, m.dim)

    def sample(self, s):
        return {**s.defaults(), "wide": torch.float32}
