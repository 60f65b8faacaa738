"""select(select_scatter(x, part, dim, i), dim, j)   ->   part where i = j, else select(x, dim, j); slices likewise

What is read of a tensor that parts are written into is what was written, or what was there before; so that parts are read as they are made,
and the whole is written once, when all its parts are known. Seen in: caches of several layers, or of keys and values, in one tensor.
"""

import torch
from dsi.patterns.rule import Rule

aten = torch.ops.aten


class WrittenPart(Rule):
    literals = {
        "dim": (0, 1),
        "at": (1, 2),
        "other": (1, 0, -3),
        "begin": (1, 2),
        "end": (3, 10**9),
        "first": (1, 0, 3),
        "last": (3, 1, 10**9),
    }
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, part, dim, at, other, begin, end, first, last):
        selected = op.call(aten.select_scatter.default, x, part, dim, at).named("selected")
        sliced = op.call(aten.slice_scatter.default, x, part, dim, begin, end).named("sliced")
        whole = op.either("written", select=lambda: selected, slice=lambda: sliced)
        return op.either("read", select=lambda: op.select(selected, dim, other), slice=lambda: op.slice(sliced, dim, first, last)), whole

    def check(self, m):
        m.require(m.tag("read") == m.tag("written"), "it is written and read in two ways")
        m.require(isinstance(m.dim, int), "the dimension is computed in the graph")
        m.require(m.dtype("part") == m.dtype("x"), f"{m.dtype('part')} is written to {m.dtype('x')}")
        size = m.shape("x")[m.dim]
        m.require(isinstance(size, int), "the size along the dimension is symbolic")
        names = ("at", "other") if m.tag("read") == "select" else ("begin", "end", "first", "last")
        m.require(all(m.is_int(name) for name in names), "where a part lies is computed in the graph")
        (a, b), (c, d) = places(m, size)
        m.require((a, b) == (c, d) or b <= c or d <= a, f"of entries {a} to {b}, which are written, and others {c} to {d} are read")

    def rewrite(self, dsi, m):
        (written, read), keep = places(m, m.shape("x")[m.dim]), dsi.keep
        if written == read:
            return m.part, keep
        if m.tag("read") == "select":
            return dsi.aten.select(m.x, m.dim, m.other), keep
        return dsi.aten.slice(m.x, m.dim, m.first, m.last), keep

    def sample(self, s):
        given = s.defaults()
        whole = [4, 4, s.size("A")]
        part = [*whole]
        if s.chosen("written") == "select":
            del part[given["dim"]]
        else:
            part[given["dim"]] = len(range(*slice(given["begin"], given["end"]).indices(4)))
        return {**given, "x": s.tensor_of(whole), "part": s.tensor_of(part)}


def places(m, size):
    """The entries that are written, and those that are read: the first, and the one behind the last."""
    if m.tag("read") == "select":
        return tuple((number % size, number % size + 1) for number in (m.at, m.other))
    return tuple(slice(*ends).indices(size)[:2] for ends in ((m.begin, m.end), (m.first, m.last)))
