"""view(view(x, a), b)   ->   view(x, b)

Seen in: flattening before a linear right after the heads were merged.
"""

from dsi.patterns.rule import Rule


class ViewChain(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, inner_sizes, sizes):
        inner = op.view(x, inner_sizes)
        return op.view(inner, sizes), inner

    def rewrite(self, dsi, m):
        return dsi.aten.view(m.x, m.sizes), dsi.keep

    def sample(self, s):
        a, b, c = s.size("A"), s.size("B"), s.size("C")
        return {**s.defaults(), "x": s.tensor("A B C"), "inner_sizes": s.pick(([a * b, c], [-1])), "sizes": s.pick(([c, b, a], [b, -1]))}
