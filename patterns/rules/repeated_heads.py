"""attention(q, repeat(k), repeat(v))   ->   attention(q, k, v)

repeat(k) copies every key/value head n times: [B, G, L, D] -> [B, G·n, L, D]. The operator reads head h // n instead. Keys may lie as
[B, G, D, L], and be permuted after they are repeated.
Seen in: Llama, Mistral, Qwen and every other grouped-query model whose attention is not torch's own with `enable_gqa`.
"""

from dsi.patterns.rule import Rule


class RepeatedHeads(Rule):
    dims = {"q": "B H S D", "v": "B G L V"}
    literals = {"scale": (0.3, 1.0), "causal": (False, True), "window": (0, 2), "softcap": (0.0, 3.0)}
    same_rounding = True

    def pattern(self, op, q, k, v, mask, bias, sinks, scale, causal, window, softcap, wide_k, wide_v, sizes_k, sizes_v):
        def repeated(x, wide, sizes, name):
            spread = op.expand(op.unsqueeze(x, 2), wide).named(f"spread_{name}")
            return op.view(op.maybe_contiguous(spread, tag=f"{name} copy"), sizes).named(f"repeated_{name}")

        keys = op.either(
            "keys",
            rows=lambda: repeated(k, wide_k, sizes_k, "k"),
            columns=lambda: op.permute(repeated(k, wide_k, sizes_k, "k"), [0, 1, 3, 2]),
        )
        values = repeated(v, wide_v, sizes_v, "v")

        def attention(*extra):
            return op.dsi.attention(q, keys, values, *extra, scale=scale, causal=causal, window=window, softcap=softcap)

        return op.either(
            "extra",
            mask=lambda: attention(mask, None),
            none=lambda: attention(None, None),
            bias=lambda: attention(None, bias),
            both=lambda: attention(mask, bias),
            sinks=lambda: attention(None, None, sinks),
            mask_sinks=lambda: attention(mask, None, sinks),
        )

    def check(self, m):
        b, groups, length, d = (m.size(name) for name in "BGLD")
        matrix = (d, length) if m.tag("keys") == "columns" else (length, d)
        m.require(m.same(m.shape("k"), (b, groups, *matrix)), f"the keys are {list(m.shape('k'))}, the values {list(m.shape('v'))}")
        for name in ("k", "v"):
            spread, matrix = m.shape(f"spread_{name}"), m.shape(name)[2:]
            m.require(len(spread) == 5 and m.same((*spread[:2], *spread[3:]), (b, groups, *matrix)), f"{name} is spread to {list(spread)}")
            n = spread[2]
            m.require(isinstance(n, int) and isinstance(groups, int), "the number of heads is symbolic")
            m.require(
                m.same(m.shape(f"repeated_{name}"), (b, groups * n, *matrix)),
                f"{name} is repeated to {list(m.shape(f'repeated_{name}'))}",
            )
            m.require(m.same(m.size("H"), groups * n), f"there are {m.size('H')} query heads for {groups} × {n} key heads")

    def rewrite(self, dsi, m):
        k = dsi.aten.permute(m.k, [0, 1, 3, 2]) if m.tag("keys") == "columns" else m.k
        return dsi.attention(m.q, k, m.v, m.mask, m.bias, m.sinks, scale=m.scale, causal=m.causal, window=m.window, softcap=m.softcap)

    def sample(self, s):
        b, g, n, length, d, v, t = s.size("B"), s.size("G"), s.pick((1, 2, 3)), s.size("L"), s.size("D"), s.size("V"), s.size("S")
        if "plain" in (s.chosen("k copy"), s.chosen("v copy")):
            n = 1
        matrix = [d, length] if s.chosen("keys") == "columns" else [length, d]
        return {
            **s.defaults(),
            "k": s.tensor_of([b, g, *matrix]),
            "q": s.tensor_of([b, g * n, t, d]),
            "mask": s.mask_of([b, 1, t, length]),
            "bias": s.tensor_of([1, g * n, 1, length]),
            "sinks": s.tensor_of([g * n]),
            "wide_k": [b, g, n, *matrix],
            "wide_v": [b, g, n, length, v],
            "sizes_k": [b, g * n, *matrix],
            "sizes_v": [b, g * n, length, v],
        }
