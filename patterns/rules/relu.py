"""relu(x), relu(x)²   ->   dsi.activation

Seen in: OPT; Nemotron and other models with a squared ReLU.
"""

from dsi.patterns.rule import Rule


class Relu(Rule):
    dims = {"x": "..."}
    same_rounding = True

    def pattern(self, op, x):
        return op.either(
            "kind",
            relu_squared=lambda: op.square(op.relu(x)),
            relu=lambda: op.relu(x),
        )

    def check(self, m):
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, m.tag("kind"))
