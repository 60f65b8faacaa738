"""x[:, :n] = a; x[:, n:] = b, as slice_scatter(slice_scatter(x, a, dim, 0, n), b, dim, n, size)   ->   cat([a, b], dim)

A tensor of which every entry is written is what is written there. Seen in: the keys of DeepSeek V3 and other models with latent attention,
written part by part into memory that is empty.
"""

import torch
from dsi.patterns.rule import Rule

aten = torch.ops.aten


class FilledParts(Rule):
    literals = {"dim": (1, -1), "start": (0, 0, 0, 1), "cut": (2, 3), "end": (5, 10**9, 4)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, first, second, dim, start, cut, end):
        def written(below, part, begin, stop, name):
            place = op.slice(below, dim, begin, stop)
            value = op.either(f"{name} part", copied=lambda: op.call(aten.copy.default, place, part), plain=lambda: part)
            return op.call(aten.slice_scatter.default, below, value, dim, begin, stop)

        return op.either(
            "order",
            ascending=lambda: written(written(x, first, start, cut, "first"), second, cut, end, "second"),
            descending=lambda: written(written(x, second, cut, end, "second"), first, start, cut, "first"),
        )

    def check(self, m):
        whole = m.shape("x")
        m.require(all(m.is_int(name) for name in ("dim", "start", "cut", "end")), "where a part lies is computed in the graph")
        size = whole[m.dim]
        m.require(isinstance(size, int), "the size along the dimension is symbolic")
        m.require(m.start == 0 and 0 < m.cut < size <= m.end, f"of {size} entries, {m.start} to {m.cut} and {m.cut} to {m.end} are written")
        for name, part in (("first", m.cut), ("second", size - m.cut)):
            expected = [*whole]
            expected[m.dim] = part
            m.require(m.dtype(name) == m.dtype("x"), f"{m.dtype(name)} is written to {m.dtype('x')}")
            m.require(m.same(m.shape(name), expected), f"{list(m.shape(name))} is repeated to {expected}")
            m.require(m.value(name).device == m.value("x").device, "it is written across devices")

    def rewrite(self, dsi, m):
        return dsi.aten.cat([m.first, m.second], m.dim)

    def sample(self, s):
        given, a, b = s.defaults(), s.size("A"), s.size("B")
        lead = [a] if given["dim"] == 1 else [a, b]
        parts = {}
        for name, begin, stop in (("first", given["start"], given["cut"]), ("second", given["cut"], given["end"])):
            width = min(stop, 5) - begin
            copied = s.chosen(f"{name} part") == "copied"
            parts[name] = s.pick(
                (s.tensor_of([*lead, width]), s.tensor_of([*lead, width]), s.tensor_of([*lead, 1] if copied else [*lead, width]))
            )
        return {**given, **parts, "x": s.tensor_of([*lead, 5])}
