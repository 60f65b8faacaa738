"""index_copy(cache, dim, pos, new), cache[:, :, pos] = new   ->   dsi.kv_write

Functional still: whether the cache may be written in place is decided by lowering. Indexing counts negative positions from the end, which
neither index_copy nor the operator does. Seen in: every model with a StaticCache; Mistral and Gemma 2 (position -1 of a window).
"""

import torch
from dsi.patterns.rule import Rule


class KvWrite(Rule):
    dims = {"pos": "S"}
    literals = {"dim": (1, 2)}
    dtypes = {"pos": torch.int64}
    same_rounding = True

    def pattern(self, op, cache, pos, new, dim):
        return op.either(
            "spelling",
            index_copy=lambda: op.index_copy(cache, dim, pos, new),
            index_put_0=lambda: op.index_put(cache, [pos], new),
            index_put_1=lambda: op.index_put(cache, [None, pos], new),
            index_put_2=lambda: op.index_put(cache, [None, None, pos], new),
        )

    def check(self, m):
        dim = written_dim(m)
        m.require(isinstance(dim, int), "the dimension written to is computed in the graph")
        m.require(m.rank("cache") > dim, f"the cache has {m.rank('cache')} dimensions")
        m.require(m.dtype("pos") == torch.int64, f"the positions are {m.dtype('pos')}")
        places = {m.value(name).device for name in ("cache", "pos", "new")}
        m.require(len(places) == 1, f"cache, positions and what is written are on {', '.join(sorted(map(str, places)))}")
        m.require(m.dtype("new") == m.dtype("cache"), f"{m.dtype('new')} is written to a cache of {m.dtype('cache')}")
        expected = [*m.shape("cache")]
        expected[dim] = m.shape("pos")[0]
        m.require(m.same(m.shape("new"), expected), f"what is written has shape {list(m.shape('new'))}, not {expected}")

    def rewrite(self, dsi, m):
        pos = m.pos
        if m.tag("spelling") != "index_copy":
            below = dsi.call(torch.ops.aten.lt.Scalar, pos, 0)
            pos = dsi.aten.where(below, dsi.aten.add(pos, dsi.size(m.cache, written_dim(m))), pos)
        return dsi.kv_write(m.cache, pos, m.new, dim=written_dim(m))

    def sample(self, s):
        b, h, length, d, t = s.size("B"), s.size("H"), s.size("L") + 5, s.size("D"), 3
        defaults = s.defaults()
        spelling = s.chosen("spelling")
        dim = defaults["dim"] if spelling == "index_copy" else int(spelling[-1])
        sizes = [b, h, length, d]
        sizes[dim] = length
        new = [*sizes]
        new[dim] = t
        pos = s.positions(t, length)
        if spelling != "index_copy" and s.pick((True, False)):
            pos = pos - length
        return {**defaults, "cache": s.tensor_of(sizes), "new": s.tensor_of(new), "pos": pos}


def written_dim(m):
    """The dimension that the positions count along."""
    return m.dim if m.tag("spelling") == "index_copy" else int(m.tag("spelling")[-1])
