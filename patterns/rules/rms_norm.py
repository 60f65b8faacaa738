"""x / sqrt(mean(x²) + eps) [* weight]   ->   dsi.rms_norm

The epsilon may be added to the root instead. Where rounding to x's dtype happens is recorded: nowhere in between ("none"), before the
weight ("before"), after it ("after").
Seen in: Llama, Mistral, Qwen (before); OLMo-2, GPT-OSS (after); Gemma (after, weight 1 + w).
"""

import torch
from dsi.patterns.rule import Rule


class RmsNorm(Rule):
    dims = {"x": "... D", "weight": "D"}
    literals = {"eps": (1e-6, 1e-5)}
    same_rounding = True

    def pattern(self, op, x, weight, eps, offset, narrow):
        wide = op.maybe_cast(x, torch.float32, tag="wide")
        mean_square = op.mean(op.square(wide), [-1], True)
        mean = mean_square + eps
        plain = op.either(
            "root",
            rsqrt=lambda: wide * op.rsqrt(mean),
            # Statistics in fp32 of an x that is widened by the product only.
            mixed=lambda: x * op.rsqrt(mean),
            pow=lambda: wide * op.pow(mean, -0.5),
            divided=lambda: wide / op.sqrt(mean),
            beside=lambda: wide / (op.sqrt(mean_square) + eps),
        ).named("plain")
        early = op.maybe_cast(plain, narrow, tag="early").named("early_value")
        wide_weight = op.maybe_cast(weight, torch.float32, tag="weight")
        scale = op.either("offset", present=lambda: wide_weight + offset, absent=lambda: wide_weight)
        return op.either(
            "affine",
            scaled=lambda: op.maybe_cast((early * scale).named("product"), narrow, tag="late"),
            none=lambda: early,
        )

    def check(self, m):
        x = m.dtype("x")
        m.require(m.is_float("eps"), f"eps is {m.eps}, not a float")
        m.require(x.is_floating_point, f"x is {x}")
        m.require(m.output().dtype == x, f"the result is {m.output().dtype}, x is {x}")
        m.require(m.offset is None or m.is_number("offset"), f"the offset {m.offset} of the weight is no literal")
        m.require(m.cast("early") in (None, x), f"the normalised value is rounded to {m.cast('early')}, x is {x}")
        if m.tag("root") != "rsqrt":
            m.require(m.dtype("plain") == torch.float32, "a root that is not rsqrt rounds elsewhere than the operator, in half precision")
        if m.present("weight") and cast_mode(m) != "after":
            m.require(m.dtype("weight") == x, f"x is {x} and the weight {m.dtype('weight')}")
            m.require(m.cast("weight") in (None, x), "the weight is widened although the product is not")
        if m.present("weight") and cast_mode(m) == "after" and m.present("offset"):
            m.require(
                torch.float32 in (m.cast("weight"), m.dtype("weight")),
                "the offset is added to the weight in half precision, the product is fp32",
            )
        m.require(cast_mode(m) is not None, "it rounds neither before nor after the weight as the operator does")

    def rewrite(self, dsi, m):
        place = {"place": "beside"} if m.tag("root") == "beside" else {}
        return dsi.rms_norm(m.x, m.weight, eps=m.eps, offset=float(m.offset or 0.0), cast=cast_mode(m), **place)

    def sample(self, s):
        return {**s.defaults(), "offset": s.pick((1.0, 1)), "narrow": s.dtype}


def cast_mode(m):
    """The operator's `cast` for where the pattern rounds; None if it has none for that."""
    x = m.dtype("x")
    if m.dtype("plain") == x:
        return "none"
    if m.dtype("plain") != torch.float32:
        return None
    if m.cast("early") == x or not m.present("weight"):
        return "before"
    return "after" if m.dtype("product") == torch.float32 else None
