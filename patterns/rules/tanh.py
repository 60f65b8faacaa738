"""tanh(x)   ->   dsi.activation(x, "tanh")

Seen in: BERT's pooler, Gemma 2's capped logits.
"""

from dsi.patterns.rule import Rule


class Tanh(Rule):
    dims = {"x": "..."}
    same_rounding = True

    def pattern(self, op, x):
        return op.tanh(x)

    def check(self, m):
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, "tanh")
