"""e / sum(e), where e = exp(x - max(x))   ->   softmax(x)

Over any dimension; the maximum may not be subtracted. exp2 is a softmax of x times the logarithm of 2.
Seen in: attention written out after its formula; scales that hold log2(e) for exp2.
"""

import math

import torch
from dsi.patterns.rule import Rule

exp2 = torch.ops.aten.exp2.default


class SoftmaxSpelled(Rule):
    literals = {"dim": (-1, 1)}
    stage = "normalise"

    def pattern(self, op, x, dim):
        shifted = op.either(
            "shift",
            max=lambda: x - op.item(op.max(x, dim, True), 0),
            amax=lambda: x - op.amax(x, [dim], True),
            none=lambda: x,
        )
        powers = op.either("base", e=lambda: op.exp(shifted), two=lambda: op.call(exp2, shifted))
        return powers / op.sum(powers, [dim], True)

    def check(self, m):
        m.require(m.dtype("x") in (torch.float32, torch.float64), f"powers of {m.dtype('x')} are rounded before they are divided")
        m.require(m.is_int("dim") and m.rank("x") > 0, "the dimension is computed in the graph")

    def rewrite(self, dsi, m):
        return dsi.aten.softmax(m.x if m.tag("base") == "e" else dsi.aten.mul(m.x, math.log(2)), m.dim)

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor("A B C")}
