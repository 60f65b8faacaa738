"""bmm(a [B, M, 1], b [B, 1, N]), mm(a [M, 1], b [1, N])   ->   a * b

A contraction over one element is no contraction, except of attention over one key, which stays one. Seen in: rotary angles (inverse
frequencies times positions) of most decoders.
"""

import torch
from dsi.patterns.effects import is_view
from dsi.patterns.rule import Rule
from torch import fx

aten = torch.ops.aten
_SOFTMAX = {aten._softmax.default, aten.softmax.int}
_COPIES = {aten.clone.default, aten._to_copy.default}


def _weights(value):
    """Whether a value of the graph is a softmax, seen or copied in whatever way."""
    while isinstance(value, fx.Node) and (is_view(value.target) or value.target in _COPIES):
        value = value.args[0]
    return isinstance(value, fx.Node) and value.target in _SOFTMAX


class OuterProduct(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, a, b):
        return op.either("spelling", bmm=lambda: op.bmm(a, b), mm=lambda: op.mm(a, b), matmul=lambda: op.matmul(a, b))

    def check(self, m):
        m.require(m.rank("a") == m.rank("b") >= 2, f"the operands have ranks {m.rank('a')} and {m.rank('b')}")
        m.require(m.same(m.shape("a")[-1], 1), f"the contracted size is {m.shape('a')[-1]}, not 1")
        m.require(not _weights(m.a), "its first operand is a softmax: it is attention over one key")
        m.require(m.output().dtype.is_floating_point, f"the product is {m.output().dtype}")

    def rewrite(self, dsi, m):
        return dsi.aten.mul(m.a, m.b)

    def sample(self, s):
        inner = s.pick((1, 1, 3))
        batch = [] if s.chosen("spelling") == "mm" else [s.size("B")]
        return {"a": s.tensor_of([*batch, s.size("M"), inner]), "b": s.tensor_of([*batch, inner, s.size("N")])}
