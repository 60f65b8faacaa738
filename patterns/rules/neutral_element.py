"""x * 1, x / 1, and for integers x + 0, x - 0   ->   x

For floats x + 0 turns -0 into 0, so it is left. Seen in: `cos * attention_scaling`, `arange + past_seen_tokens` of a first prefill.
"""

from dsi.patterns.rule import Rule


class NeutralElement(Rule):
    dims = {"x": "..."}
    literals = {"number": (0, 1, 1.0)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, number):
        return op.either(
            "operation",
            mul=lambda: op.mul(x, number),
            div=lambda: op.div(x, number),
            add=lambda: op.add(x, number),
            sub=lambda: op.sub(x, number),
        )

    def check(self, m):
        m.require(m.is_number("number"), f"{m.number} is no literal number")
        if m.tag("operation") in ("mul", "div"):
            m.require(m.number == 1, f"the factor is {m.number}, not 1")
        else:
            m.require(m.number == 0, f"the summand is {m.number}, not 0")
            m.require(not m.dtype("x").is_floating_point and not m.dtype("x").is_complex, "x + 0 of a float turns -0 into 0")
        m.require(m.dtype("x") == m.output().dtype, f"the result is {m.output().dtype}, x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return m.x

    def sample(self, s):
        return {**s.defaults(), "x": s.pick((s.tensor("M N"), s.integers("M N", 100)))}
