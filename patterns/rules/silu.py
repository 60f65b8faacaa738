"""silu(x), x * sigmoid(x)   ->   dsi.activation(x, "silu")

Seen in: Llama, Mistral, Qwen.
"""

from dsi.patterns.rule import Rule


class Silu(Rule):
    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.either(
            "spelling",
            operator=lambda: op.silu(x),
            product=lambda: x * op.sigmoid(x),
        )

    def check(self, m):
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, "silu")
