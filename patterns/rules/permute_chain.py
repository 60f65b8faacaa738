"""permute(permute(x, a), b)   ->   permute(x, a[b])

Seen in: keys that are transposed to heads and then once more for the product.
"""

from dsi.patterns.rule import Rule


class PermuteChain(Rule):
    literals = {"first": ([0, 2, 1], [2, 0, 1], [-1, 0, 1]), "second": ([1, 0, 2], [1, 2, 0], [0, 1, -1])}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, first, second):
        inner = op.permute(x, first)
        return op.permute(inner, second), inner

    def rewrite(self, dsi, m):
        return dsi.aten.permute(m.x, [m.first[i] for i in m.second]), dsi.keep

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor("A B C")}
