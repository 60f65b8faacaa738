"""attention(q, k, v) of [B, H, *, *], where H is a symbol   ->   attention of [B·H, 1, *, *]

A kernel knows how many heads there are. Seen in: functions compiled with `dynamic=True` that are given q, k and v by heads.
"""

import torch
from dsi.patterns.rule import Rule


class SymbolicHeads(Rule):
    dims = {"q": "B H S D", "k": "B H L D", "v": "B H L V"}
    literals = {"scale": (0.3, 1.0), "causal": (False, True), "window": (0, 2), "softcap": (0.0, 3.0)}
    same_rounding = True

    def pattern(self, op, q, k, v, mask, bias, scale, causal, window, softcap):
        def attention(*extra):
            return op.dsi.attention(q, k, v, *extra, scale=scale, causal=causal, window=window, softcap=softcap)

        return op.either(
            "extra",
            mask=lambda: attention(mask, None),
            none=lambda: attention(None, None),
            bias=lambda: attention(None, bias),
            both=lambda: attention(mask, bias),
        )

    def check(self, m):
        samples = isinstance(m.q, torch.Tensor)  # whose sizes are all numbers
        m.require(samples or not isinstance(m.size("H"), int), "the number of heads is known")
        scores = tuple(m.size(name) for name in "BHSL")
        for name in ("mask", "bias"):
            m.require(
                not m.present(name) or m.broadcasts(m.shape(name), scores),
                f"the {name} does not surely broadcast to {list(scores)}",
            )

    def rewrite(self, dsi, m):
        def flat(x):
            copy = dsi.aten.clone(x, memory_format=torch.contiguous_format)
            return dsi.aten.view(copy, [-1, 1, dsi.size(x, 2), dsi.size(x, 3)])

        def term(x):
            rank = dsi.value(x).dim() if x is not None else 0
            if rank < 3 or m.same(tuple(dsi.value(x).shape)[:-2], (1,) * (rank - 2)):
                return x
            x = dsi.aten.unsqueeze(x, 0) if rank == 3 else x
            return flat(dsi.aten.expand(x, [dsi.size(m.q, 0), dsi.size(m.q, 1), dsi.size(x, 2), dsi.size(x, 3)]))

        options = {"scale": m.scale, "causal": m.causal, "window": m.window, "softcap": m.softcap}
        result = dsi.attention(flat(m.q), flat(m.k), flat(m.v), term(m.mask), term(m.bias), **options)
        return dsi.aten.view(result, [dsi.size(m.q, 0), dsi.size(m.q, 1), dsi.size(m.q, 2), dsi.size(m.v, 3)])

    def sample(self, s):
        values = s.defaults()
        b, h, t = values["q"].shape[:3]
        length = values["k"].shape[2]
        return {
            **values,
            "mask": s.pick((s.mask_of([b, 1, t, length]), s.mask_of([1, 1, 1, length]), s.tensor_of([t, length]))),
            "bias": s.tensor_of(s.pick(([1, h, 1, length], [h, t, length], [b, h, t, length]))),
        }
