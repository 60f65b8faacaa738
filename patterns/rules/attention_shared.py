"""softmax(q kᵀ · scale + mask) v of q [B, H, S, D] and one key and value [B, *, *] for all heads   ->   dsi.attention

The H · S queries are the rows of one product with the keys. Seen in: multi-query attention by `torch.einsum("bhid,bjd->bhij", q, k)`.
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


class AttentionShared(Rule):
    dims = {"q": "B H S D", "v": "B L V"}
    literals = {
        "scale": (0.3, 2.0),
        "q_scale": (0.5, 1.5),
        "fill": (float("-inf"), torch.finfo(torch.float32).min, -1e9, -5.0),
    }
    dtypes = {"keep": torch.bool}

    def pattern(self, op, q, k, v, mask, position, keep, scale, q_scale, fill, narrow, flat_q, flat_p, sizes, restored):
        scaled_q = op.either("q scale", mul=lambda: q * q_scale, div=lambda: q / q_scale, none=lambda: q)
        rows = op.view(op.maybe_contiguous(op.maybe_cast(scaled_q, torch.float32, tag="q wide")), flat_q).named("rows")
        wide_k = op.maybe_cast(k, torch.float32, tag="k wide")
        columns = op.maybe_contiguous(op.either("keys", rows=lambda: op.permute(wide_k, [0, 2, 1]), columns=lambda: wide_k))
        scores = op.view(op.bmm(rows, columns).named("product"), sizes).named("scores")
        scaled = op.either("scale", mul=lambda: scores * scale, div=lambda: scores / scale, none=lambda: scores)
        chosen = op.either("choice", **filled(op, scaled, keep, fill), none=lambda: scaled)
        masked = op.either("mask", added=lambda: chosen + mask, twice=lambda: (scaled + position) + mask, none=lambda: chosen)
        softmax = op.softmax(op.maybe_cast(masked, torch.float32, tag="wide"), -1)
        weights = op.maybe_cast(softmax, narrow, tag="narrow")
        flat_weights = op.view(op.maybe_contiguous(weights), flat_p).named("weights")
        return op.view(op.bmm(flat_weights, op.maybe_contiguous(v)), restored)

    def check(self, m):
        b, h, s, d = (m.size(name) for name in "BHSD")
        length, dv = m.size("L"), m.size("V")
        m.require(isinstance(h, int), "the number of heads is symbolic")
        check_sizes(m, h, length)
        shapes = {
            "k": (b, length, d) if m.tag("keys") == "rows" else (b, d, length),
            "rows": (b, h * s, d),
            "scores": (b, h, s, length),
            "weights": (b, h * s, length),
        }
        for name, shape in shapes.items():
            m.require(m.same(m.shape(name), shape), f"{name} is {list(m.shape(name))}, not {list(shape)}")
        m.require(m.same(m.output().shape, (b, h, s, dv)), f"the result is {list(m.output().shape)}, not {[b, h, s, dv]}")
        check_dtypes(m, "weights", casts=("q wide", "k wide", "wide"))
        check_numbers(m, "scale", "q_scale")
        for name in ("mask", "position"):
            if m.present(name):
                check_term(m, name, m.shape("scores"))
        if m.present("keep"):
            check_choice(m, "scores")

    def rewrite(self, dsi, m):
        k = m.k if m.tag("keys") == "rows" else dsi.aten.permute(m.k, [0, 2, 1])
        bias = m.position
        if m.present("keep"):
            bias = chosen_bias(dsi, m, inverted=m.tag("choice") == "masked_fill")
        k, v = (dsi.aten.unsqueeze(x, 1) for x in (k, m.v))
        return dsi.attention(m.q, k, v, m.mask, bias, None, scale=float(folded_scale(m)))

    def sample(self, s):
        b, h, t, length, d, dv = (s.size(name) for name in "BHSLDV")
        inverted = s.chosen("choice") == "masked_fill"
        keep = s.mask_of(s.pick(([b, 1, t, length], [t, length], [h, 1, length])), invert=inverted)
        return {
            **s.defaults(),
            "narrow": s.dtype,
            "k": s.tensor_of([b, length, d] if s.chosen("keys") == "rows" else [b, d, length]),
            "position": s.tensor_of(s.pick(([h, t, length], [b, 1, 1, length]))),
            "mask": s.tensor_of(s.pick(([b, 1, t, length], [t, length], [length], [h, t, length]))),
            "keep": keep,
            "flat_q": [b, h * t, d],
            "flat_p": [b, h * t, length],
            "sizes": [b, h, t, length],
            "restored": [b, h, t, dv],
        }
