"""bmm(a [B, M, 1], b [B, 1, N]), mm(a [M, 1], b [1, N])   ->   a * b

A contraction over one element is no contraction. Seen in: rotary angles (inverse frequencies times positions) of most decoders.
"""

from dsi.patterns.rule import Rule


class OuterProduct(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, a, b):
        return op.either("spelling", bmm=lambda: op.bmm(a, b), mm=lambda: op.mm(a, b), matmul=lambda: op.matmul(a, b))

    def check(self, m):
        m.require(m.rank("a") == m.rank("b") >= 2, f"the operands have ranks {m.rank('a')} and {m.rank('b')}")
        m.require(m.same(m.shape("a")[-1], 1), f"the contracted size is {m.shape('a')[-1]}, not 1")
        m.require(m.output().dtype.is_floating_point, f"the product is {m.output().dtype}")

    def rewrite(self, dsi, m):
        return dsi.aten.mul(m.a, m.b)

    def sample(self, s):
        inner = s.pick((1, 1, 3))
        batch = [] if s.chosen("spelling") == "mm" else [s.size("B")]
        return {"a": s.tensor_of([*batch, s.size("M"), inner]), "b": s.tensor_of([*batch, inner, s.size("N")])}
