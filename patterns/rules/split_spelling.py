"""split(x, size, dim)[i]   ->   slice(x, dim, i * size, (i + 1) * size);   unbind(x, dim)[i]   ->   select(x, dim, i)

So that a value has one producer and one view. Seen in: GPT-2's fused query, key and value; Falcon; `chunk` of a rotary half.
"""

from dsi.patterns.rule import Rule


class SplitSpelling(Rule):
    literals = {"part": (2, 3), "parts": ([2, 5], [3, 3, 1]), "dim": (1, -2), "index": (0, 1)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, part, parts, dim, index):
        whole = op.either(
            "spelling",
            split=lambda: op.split(x, part, dim),
            split_with_sizes=lambda: op.split_with_sizes(x, parts, dim),
            unbind=lambda: op.unbind(x, dim),
        )
        return op.item(whole, index), whole

    def check(self, m):
        if m.tag("spelling") == "split":
            m.require(m.is_int("part"), "the size of a part is symbolic")
        elif m.tag("spelling") == "split_with_sizes":
            m.require(all(isinstance(p, int) for p in m.parts), "the size of a part is symbolic")

    def rewrite(self, dsi, m):
        if m.tag("spelling") == "unbind":
            return dsi.aten.select(m.x, m.dim, m.index), dsi.keep
        if m.tag("spelling") == "split":
            start, size = m.index * m.part, m.part
        else:
            start, size = sum(m.parts[: m.index]), m.parts[m.index]
        return dsi.aten.slice(m.x, m.dim, start, start + size), dsi.keep

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor("A 7 B")}
