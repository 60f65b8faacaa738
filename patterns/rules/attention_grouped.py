"""softmax(q kᵀ · scale + mask) v of q [B, G, N, S, D] and one key and value [B, G, *, *] for the N heads of a group   ->   dsi.attention

The N · S queries of a group are the rows of one product with its keys ("shared"), or the keys are repeated for each of its heads, as matmul
broadcasts them ("repeated"). Seen in: grouped-query attention written with `torch.einsum`, or with `k.unsqueeze(2)`.
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
    without_ones,
)


class AttentionGrouped(Rule):
    literals = {
        "scale": (0.3, 2.0),
        "q_scale": (0.5, 1.5),
        "fill": (float("-inf"), torch.finfo(torch.float32).min, -1e9, -5.0),
    }
    dtypes = {"keep": torch.bool}

    def pattern(
        self, op, q, k, v, mask, keep, scale, q_scale, fill, narrow, flat_q, flat_k, flat_v, flat_p, spread_k, spread_v, sizes, restored
    ):
        def heads(x, sizes, name):
            return op.either("heads", shared=lambda: x, repeated=lambda: op.expand(op.unsqueeze(x, 2), sizes).named(f"repeated_{name}"))

        scaled_q = op.either("q scale", mul=lambda: q * q_scale, div=lambda: q / q_scale, none=lambda: q)
        wide_q = op.maybe_cast(scaled_q, torch.float32, tag="q wide")
        wide_k = op.maybe_cast(k, torch.float32, tag="k wide")
        rows = op.view(op.maybe_contiguous(wide_q), flat_q).named("rows")
        turned = op.either("keys", rows=lambda: op.permute(wide_k, [0, 1, 3, 2]), columns=lambda: wide_k)
        columns = op.view(op.maybe_contiguous(heads(turned, spread_k, "k")), flat_k).named("columns")
        product = op.view(op.bmm(rows, columns).named("product"), sizes).named("scores")
        scores = op.either("scale", mul=lambda: product * scale, div=lambda: product / scale, none=lambda: product)
        chosen = op.either("choice", **filled(op, scores, keep, fill), none=lambda: scores)
        masked = op.either("mask", added=lambda: chosen + mask, none=lambda: chosen)
        softmax = op.softmax(op.maybe_cast(masked, torch.float32, tag="wide"), -1)
        weights = op.maybe_cast(softmax, narrow, tag="narrow")
        # einsum lets the queries lead where they lead in what it is asked for.
        ordered = op.either("order", heads_first=lambda: weights, queries_first=lambda: op.permute(weights, [0, 1, 3, 2, 4]))
        flat_weights = op.view(op.maybe_contiguous(ordered), flat_p).named("flat_weights")
        values = op.view(op.maybe_contiguous(heads(v, spread_v, "v")), flat_v).named("flat_values")
        return op.view(op.bmm(flat_weights, values).named("flat_result"), restored)

    def check(self, m):
        m.require(m.rank("scores") == 5, f"the scores have {m.rank('scores')} dimensions, not 5")
        b, g, n, s, length = scores = m.shape("scores")
        m.require(isinstance(g, int) and isinstance(n, int), "the number of heads is symbolic")
        check_sizes(m, g * n, length)
        d, dv = m.shape("rows")[-1], m.shape("flat_values")[-1]
        shared = m.tag("heads") == "shared"
        r = n * s if shared else s
        m.require(shared or m.tag("order") == "heads_first", "the weights are permuted between repeated heads")
        matrices = {
            "rows": (r, d),
            "columns": (d, length),
            "product": (r, length),
            "flat_weights": (r, length),
            "flat_values": (length, dv),
            "flat_result": (r, dv),
        }
        for name, matrix in matrices.items():
            m.require(m.rank(name) == 3 and m.same(m.shape(name)[1:], matrix), f"{name} is {list(m.shape(name))}, of {list(scores)}")
        keys = (b, g, length, d) if m.tag("keys") == "rows" else (b, g, d, length)
        parts = {"q": [(b, g, n, s, d), (b, g * n, s, d)], "k": [keys], "v": [(b, g, length, dv)]}
        for name, shapes in parts.items():
            found = without_ones(m, m.shape(name)) if shared else list(m.shape(name))
            m.require(
                any(m.same(found, without_ones(m, shape) if shared else list(shape)) for shape in shapes),
                f"{name} is {list(m.shape(name))}, the scores are {list(scores)}",
            )
        if not shared:
            for name, matrix in {"k": (d, length), "v": (length, dv)}.items():
                spread = m.shape(f"repeated_{name}")
                m.require(m.same(spread, (b, g, n, *matrix)), f"{name} is repeated to {list(spread)}, the scores are {list(scores)}")
        check_dtypes(m, "flat_weights", casts=("q wide", "k wide", "wide"))
        check_numbers(m, "scale", "q_scale")
        if m.present("mask"):
            check_term(m, "mask", scores)
        if m.present("keep"):
            check_choice(m, "scores")
        for name in ("mask", "keep"):
            alike = not m.present(name) or all(m.same(size, 1) for size in m.shape(name)[-4:-2])
            m.require(alike, f"the {name} is not the same for all heads")

    def rewrite(self, dsi, m):
        g, n = m.shape("scores")[1:3]
        b, _, _, t, length = m.sizes
        d, dv = m.flat_q[-1], m.flat_v[-1]

        def seen(x, sizes, shape):
            return x if m.same(tuple(dsi.value(x).shape), shape) else dsi.aten.view(x, sizes)

        def flat(x):
            return dsi.aten.view(x, [dsi.size(x, 0), 1, dsi.size(x, 3), dsi.size(x, 4)]) if dsi.value(x).dim() == 5 else x

        batch, length_known = m.shape("scores")[0], m.shape("scores")[4]
        d_known, dv_known = m.shape("rows")[-1], m.shape("flat_values")[-1]
        q = seen(m.q, [b, g * n, t, d], (batch, g * n, m.shape("scores")[3], d_known))
        if m.tag("keys") == "rows":
            k = seen(m.k, [b, g, length, d], (batch, g, length_known, d_known))
        else:
            k = dsi.aten.permute(seen(m.k, [b, g, d, length], (batch, g, d_known, length_known)), [0, 1, 3, 2])
        v = seen(m.v, [b, g, length, dv], (batch, g, length_known, dv_known))
        scale = folded_scale(m)
        mask = flat(m.mask) if m.present("mask") else None
        bias = flat(chosen_bias(dsi, m, inverted=m.tag("choice") == "masked_fill")) if m.present("keep") else None
        result = dsi.attention(q, k, v, mask, bias, None, scale=float(scale))
        if m.tag("order") == "queries_first":
            turned = dsi.aten.permute(dsi.aten.view(result, [b, g, n, t, dv]), [0, 1, 3, 2, 4])
            result = dsi.call(torch.ops.aten.clone.default, turned, torch.contiguous_format)
        return dsi.aten.view(result, m.restored)

    def sample(self, s):
        b, g, n, t, length, d, dv = (s.size(name) for name in ("B", "G", "N", "T", "L", "D", "V"))
        shared = s.chosen("heads") == "shared"
        matrix, last = ([b * g, n * t], b * g) if shared else ([b * g * n, t], b * g * n)
        queries_first = s.chosen("order") == "queries_first"
        mask = ([b, 1, 1, t, length], [1, 1, 1, t, length], [t, length], [length])
        return {
            **s.defaults(),
            "narrow": s.dtype,
            "q": s.tensor_of(s.pick(([b, g, n, t, d], [b, g * n, t, d]))),
            "k": s.tensor_of([b, g, length, d] if s.chosen("keys") == "rows" else [b, g, d, length]),
            "v": s.tensor_of([b, g, length, dv]),
            "mask": s.tensor_of(s.pick(mask)),
            "keep": s.mask_of(s.pick(mask), invert=s.chosen("choice") == "masked_fill"),
            "flat_q": [*matrix, d],
            "flat_k": [last, d, length],
            "flat_v": [last, length, dv],
            "flat_p": [*matrix, length],
            "spread_k": [b, g, n, d, length],
            "spread_v": [b, g, n, length, dv],
            "sizes": [b, g, n, t, length],
            "restored": [b, g, t, n, dv] if queries_first else s.pick(([b, g, n, t, dv], [b, g * n, t, dv])),
        }
