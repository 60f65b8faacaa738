"""softmax(q kᵀ · scale + mask) v of q, k and v [B, *, *]   ->   dsi.attention of one head

Products of matrices with one leading dimension: a single head, or batch and heads in one from the start to the end. What may be done with
the scores is less than what `attention` knows. Seen in: `torch.bmm` and `torch.baddbmm` written by hand; diffusers' attention processors.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.attention import (
    check_choice,
    check_dtypes,
    check_numbers,
    check_sizes,
    check_term,
    chosen_bias,
    filled,
    folded_scale,
)


class AttentionOneHead(Rule):
    dims = {"q": "B S D", "v": "B L V"}
    literals = {
        "scale": (0.3, 2.0),
        "q_scale": (0.5, 1.5),
        "fill": (float("-inf"), torch.finfo(torch.float32).min, -1e9, -5.0),
        "alpha": (0.25, 1.0),
        "beta": (1.0, 2.0),
    }
    dtypes = {"keep": torch.bool}

    def pattern(self, op, q, k, v, mask, position, keep, scale, q_scale, fill, alpha, beta, narrow):
        scaled_q = op.either("q scale", mul=lambda: q * q_scale, div=lambda: q / q_scale, none=lambda: q)
        rows = op.maybe_contiguous(op.maybe_cast(scaled_q, torch.float32, tag="q wide")).named("rows")
        wide_k = op.maybe_cast(k, torch.float32, tag="k wide")
        columns = op.maybe_contiguous(op.either("keys", rows=lambda: op.permute(wide_k, [0, 2, 1]), columns=lambda: wide_k))

        def plain():
            product = op.bmm(rows, columns).named("product")
            scores = op.either("scale", mul=lambda: product * scale, div=lambda: product / scale, none=lambda: product)
            chosen = op.either("choice", **filled(op, scores, keep, fill), none=lambda: scores)
            return op.either("mask", added=lambda: chosen + mask, twice=lambda: (scores + position) + mask, none=lambda: chosen)

        def biased():
            return op.baddbmm(mask, rows, columns, beta=beta, alpha=alpha).named("product")

        masked = op.either("product", plain=plain, biased=biased)
        softmax = op.softmax(op.maybe_cast(masked, torch.float32, tag="wide"), -1)
        weights = op.maybe_contiguous(op.maybe_cast(softmax, narrow, tag="narrow")).named("weights")
        return op.bmm(weights, op.maybe_contiguous(v))

    def check(self, m):
        scores = m.shape("product")
        keys = (m.size("B"), m.size("L"), m.size("D"))
        k = keys if m.tag("keys") == "rows" else (keys[0], keys[2], keys[1])
        m.require(m.same(m.shape("k"), k), f"the keys are {list(m.shape('k'))}, not {list(k)}")
        check_sizes(m, 1, keys[1])
        check_dtypes(m, "weights", casts=("q wide", "k wide", "wide"))
        check_numbers(m, "scale", "q_scale", "alpha")
        for name in ("mask", "position"):
            if m.present(name):
                check_term(m, name, scores)
        m.require(m.tag("product") == "plain" or m.beta == 1, f"the bias counts {m.beta} times")
        if m.present("keep"):
            check_choice(m, "product")

    def rewrite(self, dsi, m):
        def one_head(x):
            return dsi.aten.unsqueeze(x, 1) if dsi.value(x).dim() == 3 else x

        scale = folded_scale(m) * (m.alpha if m.present("alpha") else 1.0)
        k = m.k if m.tag("keys") == "rows" else dsi.aten.permute(m.k, [0, 2, 1])
        mask = one_head(m.mask) if m.present("mask") else None
        bias = one_head(m.position) if m.present("position") else None
        bias = one_head(chosen_bias(dsi, m, inverted=m.tag("choice") == "masked_fill")) if m.present("keep") else bias
        result = dsi.attention(one_head(m.q), one_head(k), one_head(m.v), mask, bias, None, scale=float(scale))
        return dsi.aten.squeeze(result, 1)

    def sample(self, s):
        b, t, length, d = s.size("B"), s.size("S"), s.size("L"), s.size("D")
        values = s.defaults()
        inverted = s.chosen("choice") == "masked_fill"
        keep = s.mask_of(s.pick(([b, t, length], [1, t, length], [t, length])), invert=inverted)
        if values["fill"] > float("-inf"):
            keep[..., 0, :] = inverted  # a row that sees no key
        return {
            **values,
            "narrow": s.dtype,
            "k": s.tensor_of([b, length, d] if s.chosen("keys") == "rows" else [b, d, length]),
            "position": s.tensor_of(s.pick(([b, t, length], [t, 1]))),
            "mask": s.tensor_of(s.pick(([b, t, length], [1, t, length], [t, length], [b, 1, length]))),
            "keep": keep,
        }
