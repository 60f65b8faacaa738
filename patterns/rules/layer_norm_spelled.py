"""(x - mean(x)) / sqrt(var(x) + eps) [* weight] [+ bias]   ->   dsi.layer_norm

The variance is by `var` or the mean of squares; of one that is divided by D - 1 instead of D a factor is left after the norm. The epsilon
may be added to the root instead. A weight of more than one dimension (one a head) stays a product.
Seen in: models that write their own LayerNorm (early GPT code, MPT's low-precision norm, Cohere; `torch.std` in the annotated Transformer).
"""

import math

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.cast_chain import widens


class LayerNormSpelled(Rule):
    dims = {"x": "... D", "weight": "~... D", "bias": "D"}
    literals = {"eps": (1e-5, 1e-3, 0.1)}

    def pattern(self, op, x, weight, bias, eps, narrow):
        wide = op.maybe_cast(x, torch.float32, tag="wide")
        mean = op.mean(wide, [-1], True)
        centred = wide - mean
        variance = op.either(
            "variance",
            mean=lambda: op.mean(op.square(centred), [-1], True),
            var=lambda: op.var(wide, [-1], correction=0, keepdim=True),
            unbiased=lambda: op.var(wide, [-1], correction=1, keepdim=True),
        )
        above = op.either("centred", once=lambda: centred, twice=lambda: wide - mean)

        def normalised(above):
            return op.either(
                "root",
                rsqrt=lambda: above * op.reciprocal_root(variance + eps),
                divided=lambda: above / op.sqrt(variance + eps),
                beside=lambda: above / (op.sqrt(variance) + eps),
            )

        def after():
            early = op.maybe_cast(normalised(above), narrow, tag="early")
            scaled = (early * op.maybe_cast(weight, torch.float32, tag="wide weight")).named("scaled")
            return op.either("affine", both=lambda: scaled + bias, weight=lambda: scaled, none=lambda: early)

        def before():
            scaled = normalised(above * weight).named("scaled")
            return op.either("affine", both=lambda: scaled + bias, weight=lambda: scaled)

        return op.maybe_cast(op.either("weighted", after=after, before=before), narrow, tag="late")

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
        if m.tag("variance") == "unbiased":
            size = m.size("D")
            m.require(isinstance(size, int) and size > 1, f"a variance of {size} channels is divided by one less")

    def rewrite(self, dsi, m):
        # By how much the deviation is larger that is taken of D - 1.
        larger = math.sqrt(m.size("D") / (m.size("D") - 1)) if m.tag("variance") == "unbiased" else 1.0
        beside = m.tag("root") == "beside"
        place = {"eps": m.eps / larger, "place": "beside"} if beside else {"eps": m.eps / larger**2}
        if larger == 1.0 and (not m.present("weight") or m.rank("weight") == 1):
            return dsi.layer_norm(m.x, m.weight, m.bias, **place)
        x = m.dtype("x")
        wide = m.cast("wide") or x
        value = dsi.layer_norm(dsi.aten.cast(m.x, wide) if wide != x else m.x, None, None, **place)
        if larger != 1.0:
            value = dsi.aten.mul(value, 1 / larger)
        if m.cast("early") is not None:
            value = dsi.aten.cast(value, x)
        if m.present("weight"):
            weight = m.weight if m.cast("wide weight") is None else dsi.aten.cast(m.weight, m.cast("wide weight"))
            value = dsi.aten.mul(value, weight)
        if m.present("bias"):
            value = dsi.aten.add(value, m.bias)
        return dsi.aten.cast(value, x) if dsi.value(value).dtype != x else value

    def sample(self, s):
        # Over one channel the result is 0, and what is left of cancellation.
        d = 1 + s.size("D")
        weight = s.tensor_of(s.pick(([d], [d], [3, d])))
        return {**s.defaults(), "x": s.tensor_of([2, 3, d]), "weight": weight, "bias": s.tensor_of([d]), "narrow": s.dtype}
