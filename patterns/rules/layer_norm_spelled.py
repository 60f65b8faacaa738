"""(x - mean(x)) / sqrt(var(x) + eps) [* weight] [+ bias]   ->   dsi.layer_norm

The variance is the biased one, by `var` or as the mean of squares. Seen in: models that write their own LayerNorm (early GPT code, MPT's
low-precision norm).
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.cast_chain import widens


class LayerNormSpelled(Rule):
    dims = {"x": "... D", "weight": "D", "bias": "D"}
    literals = {"eps": (1e-5, 1e-3)}

    def pattern(self, op, x, weight, bias, eps, narrow):
        wide = op.maybe_cast(x, torch.float32, tag="wide")
        centred = wide - op.mean(wide, [-1], True)
        variance = op.either(
            "variance",
            mean=lambda: op.mean(op.square(centred), [-1], True),
            var=lambda: op.var(wide, [-1], correction=0, keepdim=True),
        )
        plain = op.either(
            "root",
            rsqrt=lambda: centred * op.reciprocal_root(variance + eps),
            divided=lambda: centred / op.sqrt(variance + eps),
        )
        early = op.maybe_cast(plain, narrow, tag="early")
        scaled = early * weight
        return op.either("affine", both=lambda: scaled + bias, weight=lambda: scaled, none=lambda: early)

    def check(self, m):
        m.require(m.is_float("eps"), f"eps is {m.eps}, not a float")
        wide = m.cast("wide")
        m.require(wide is None or widens(m.dtype("x"), wide), f"it is computed in {wide}, which rounds values of {m.dtype('x')}")
        m.require(m.cast("early") in (None, m.dtype("x")), f"the normalised value is cast to {m.cast('early')}")
        m.require(m.output().dtype == m.dtype("x"), f"the result is {m.output().dtype}, x is {m.dtype('x')}")
        for name in ("weight", "bias"):
            m.require(not m.present(name) or m.dtype(name) == m.dtype("x"), f"x is {m.dtype('x')} and the {name} is not")

    def rewrite(self, dsi, m):
        return dsi.layer_norm(m.x, m.weight, m.bias, eps=m.eps)

    def sample(self, s):
        # Over one channel the result is 0, and what is left of cancellation.
        d = 1 + s.size("D")
        return {**s.defaults(), "x": s.tensor_of([3, d]), "weight": s.tensor_of([d]), "bias": s.tensor_of([d]), "narrow": s.dtype}
