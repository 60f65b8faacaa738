"""baddbmm(x, a, b, beta=0, alpha=s)   ->   bmm(a, b) * s

A term that counts 0 times is memory alone. Seen in: diffusers' attention, Megatron, older GPT-NeoX.
"""

import torch
from dsi.patterns.rule import Rule


class ProductWithoutTerm(Rule):
    literals = {"beta": (0, 0.0, 1.0), "alpha": (0.25, 1, 2)}
    stage = "normalise"

    def pattern(self, op, x, a, b, beta, alpha):
        return op.baddbmm(x, a, b, beta=beta, alpha=alpha)

    def check(self, m):
        m.require(m.is_number("beta") and m.beta == 0, f"the term counts {m.beta} times")
        m.require(m.is_number("alpha"), "the product's factor is computed in the graph")
        m.require(m.dtype("a").is_floating_point and m.output().dtype == m.dtype("a"), "the product is of integers")

    def rewrite(self, dsi, m):
        product = dsi.aten.bmm(m.a, m.b)
        return product if m.alpha == 1 else dsi.aten.mul(product, float(m.alpha))

    def sample(self, s):
        n, t, k, length = (s.size(name) for name in "NTKL")
        x = torch.full((n, t, length), s.pick((float("inf"), 0.0)), dtype=s.dtype)
        return {**s.defaults(), "x": x, "a": s.tensor_of([n, t, k]), "b": s.tensor_of([n, k, length])}
