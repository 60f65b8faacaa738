"""The two parts of a turn written out, a · cos - b · sin and b · cos + a · sin   ->   dsi.rope, its tables repeated

a and b are the halves of a head, joined by `cat`, or the first and second of each pair, joined by `stack`; cos and sin hold one entry for
both. Seen in: GPT-OSS (halves); Llama 4, DeepSeek V2 and whoever turns complex numbers (pairs).
"""

from dsi.patterns.rule import Rule


class RopeParts(Rule):
    dims = {"x": "..."}
    same_rounding = True

    def pattern(self, op, x, cos, sin, half, end, split, sizes):
        def turned(a, b):
            return a * cos - b * sin, b * cos + a * sin

        def halves():
            return op.cat(list(turned(op.slice(x, -1, 0, half), op.slice(x, -1, half, end))), -1)

        def strided():
            return turned(op.slice(x, -1, 0, end, 2), op.slice(x, -1, 1, end, 2))

        def paired():
            pairs = op.view(x, split).named("pairs")
            return turned(op.select(pairs, -1, 0), op.select(pairs, -1, 1))

        def joined(parts):
            return op.view(op.stack(list(parts), -1).named("joined"), sizes)

        return op.either("style", half=halves, strided=lambda: joined(strided()), paired=lambda: joined(paired()))

    def check(self, m):
        p = m.shape("cos")[-1]
        paired = m.tag("style") == "paired"
        *lead, d = (*m.shape("pairs")[:-2], 2 * p) if paired else m.shape("x")
        m.require(isinstance(d, int) and m.same(m.shape("sin")[-1], p) and d == 2 * p, f"a head has {d} channels and the tables {p}")
        for name in ("cos", "sin"):
            leading = m.shape(name)[:-1]
            m.require(m.broadcasts(leading, lead), f"the leading dimensions {list(leading)} of {name} do not broadcast to {lead}")
        if not paired:
            m.require(m.is_int("end") and m.end >= d, f"the last channel turned is {m.end}, the head has {d}")
        if m.tag("style") == "half":
            m.require(m.is_int("half") and m.half == p, f"the halves meet at {m.half}, the head has {d} channels")
            m.require(m.same(m.output().shape, m.shape("x")), f"the result is {list(m.output().shape)}, x is {list(m.shape('x'))}")
        else:
            joined = m.shape("joined")
            m.require(m.same(joined, (*lead, p, 2)), f"the pairs are {list(joined)} of {[*lead, d]}")
        if paired:
            m.require(m.same(m.shape("pairs"), (*lead, p, 2)), f"x is seen as {list(m.shape('pairs'))}, the tables have {p} entries")
        m.require(m.dtype("x") == m.dtype("cos") == m.dtype("sin"), f"x is {m.dtype('x')}, cos {m.dtype('cos')}, sin {m.dtype('sin')}")
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        if m.tag("style") == "half":
            cos, sin = (dsi.aten.cat([table, table], -1) for table in (m.cos, m.sin))
            return dsi.rope(m.x, cos, sin, style="half")
        cos, sin = (self._paired(dsi, m, name) for name in ("cos", "sin"))
        x, whole = m.x, m.shape("x")
        if m.tag("style") == "paired":
            whole = (*m.shape("pairs")[:-2], 2 * m.shape("cos")[-1])
            x = x if m.same(m.shape("x"), whole) else dsi.aten.view(x, [*m.split[:-2], whole[-1]])
        turned = dsi.rope(x, cos, sin, style="interleaved")
        return turned if m.same(m.output().shape, whole) else dsi.aten.view(turned, m.sizes)

    def _paired(self, dsi, m, name):
        """The table with each of its entries twice, side by side."""
        table = getattr(m, name)
        sizes = [dsi.size(table, d) for d in range(m.rank(name) - 1)]
        return dsi.aten.view(dsi.aten.stack([table, table], -1), [*sizes, 2 * m.shape(name)[-1]])

    def sample(self, s):
        b, h, t, p = s.size("B"), s.size("H"), s.size("T"), s.size("P")
        d = 2 * p
        table = s.pick(([t, p], [b, 1, t, p], [1, 1, t, p]))
        return {
            "x": s.tensor_of([b, h, t, d] if s.chosen("style") != "paired" else s.pick(([b, h, t, d], [b, h, t * d]))),
            "cos": s.tensor_of(table),
            "sin": s.tensor_of(table),
            "half": s.pick((p, p, p, p + 1)),
            "end": s.pick((d, 10**9)),
            "split": [b, h, t, p, 2],
            "sizes": s.pick(([b, h, t, d], [b, h, t * d])),
        }
