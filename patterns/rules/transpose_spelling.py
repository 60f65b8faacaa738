"""t(x), transpose(x, i, j)   ->   permute(x, order)

So that rules and index maps see one spelling. Seen in: everywhere.
"""

from dsi.patterns.rule import Rule


class TransposeSpelling(Rule):
    literals = {"first": (0, 1), "second": (1, -1)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, first, second):
        return op.either("spelling", t=lambda: op.t(x), transpose=lambda: op.transpose(x, first, second))

    def rewrite(self, dsi, m):
        order = list(range(m.rank("x")))
        i, j = (0, -1) if m.tag("spelling") == "t" else (m.first, m.second)
        if order:
            order[i], order[j] = order[j], order[i]
        return dsi.aten.permute(m.x, order)

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor("M N")}
