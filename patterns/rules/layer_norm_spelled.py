"""(x - mean(x)) / sqrt(var(x) + eps) [* weight] [+ bias]   ->   dsi.layer_norm

The variance is the biased one, by `var` or as the mean of squares. A weight of more than one dimension (one a head) stays a product.
Seen in: models that write their own LayerNorm (early GPT code, MPT's low-precision norm, Cohere).
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.cast_chain import widens


class LayerNormSpelled(Rule):
    dims = {"x": "... D", "weight": "~... D", "bias": "D"}
    literals = {"eps": (1e-5, 1e-3)}

    def pattern(self, op, x, weight, bias, eps, narrow):
        wide = op.maybe_cast(x, torch.float32, tag="wide")
        mean = op.mean(wide, [-1], True)
        centred = wide - mean
        variance = op.either(
            "variance",
            mean=lambda: op.mean(op.square(centred), [-1], True),
            var=lambda: op.var(wide, [-1], correction=0, keepdim=True),
        )
        above = op.either("centred", once=lambda: centred, twice=lambda: wide - mean)
        plain = op.either(
            "root",
            rsqrt=lambda: above * op.reciprocal_root(variance + eps),
            divided=lambda: above / op.sqrt(variance + eps),
        )
        early = op.maybe_cast(plain, narrow, tag="early")
        scaled = (early * op.maybe_cast(weight, torch.float32, tag="wide weight")).named("scaled")
        biased = op.either("affine", both=lambda: scaled + bias, weight=lambda: scaled, none=lambda: early)
        return op.maybe_cast(biased, narrow, tag="late")

    def check(self, m):
        m.require(m.is_float("eps"), f"eps is {m.eps}, not a float")
        wide = m.cast("wide")
        m.require(wide is None or widens(m.dtype("x"), wide), f"it is computed in {wide}, which rounds values of {m.dtype('x')}")
        m.require(m.cast("early") in (None, m.dtype("x")), f"the normalised value is cast to {m.cast('early')}")
        m.require(m.output().dtype == m.dtype("x"), f"the result is {m.output().dtype}, x is {m.dtype('x')}")
        for name in ("weight", "bias"):
            m.require(not m.present(name) or m.dtype(name) == m.dtype("x"), f"x is {m.dtype('x')} and the {name} is not")
        weight = m.cast("wide weight")
        m.require(
            weight is None or widens(m.dtype("weight"), weight), f"the weight is cast to {weight}, which rounds values of {m.dtype('x')}"
        )
        m.require(not m.present("bias") or m.rank("weight") == 1, "a weight of several dimensions has a bias")
        m.require(not m.present("weight") or m.same(m.shape("scaled"), m.shape("x")), "the weight broadcasts x")

    def rewrite(self, dsi, m):
        if not m.present("weight") or m.rank("weight") == 1:
            return dsi.layer_norm(m.x, m.weight, m.bias, eps=m.eps)
        x, product = m.dtype("x"), m.dtype("scaled")
        wide = product != x and m.cast("wide") is not None and m.cast("early") is None
        normalised = dsi.layer_norm(dsi.aten.cast(m.x, product) if wide else m.x, None, None, eps=m.eps)
        weight = dsi.aten.cast(m.weight, product) if m.dtype("weight") != product else m.weight
        scaled = dsi.aten.mul(normalised, weight)
        return dsi.aten.cast(scaled, x) if product != x else scaled

    def sample(self, s):
        # Over one channel the result is 0, and what is left of cancellation.
        d = 1 + s.size("D")
        weight = s.tensor_of(s.pick(([d], [d], [3, d])))
        return {**s.defaults(), "x": s.tensor_of([2, 3, d]), "weight": weight, "bias": s.tensor_of([d]), "narrow": s.dtype}
