"""scatter(cache, dim, index, new), whose index is one position for all that lies at it, repeated   ->   index_copy(cache, dim, pos, new)

Seen in: caches that are written with `cache.scatter_(2, pos.view(1, 1, -1, 1).expand_as(k), k)`.
"""

import torch
from dsi.patterns.rule import Rule


class ScatteredRows(Rule):
    literals = {"dim": (2, -2, 1)}
    dtypes = {"index": torch.int64}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, cache, index, new, dim):
        return op.call(torch.ops.aten.scatter.src, cache, dim, index, new)

    def check(self, m):
        m.require(isinstance(m.dim, int), "the dimension written to is computed in the graph")
        cache, index = m.shape("cache"), m.shape("index")
        place = m.dim % len(cache) if cache else 0
        expected = [*cache]
        expected[place:] = [*index[place : place + 1], *cache[place + 1 :]]
        m.require(m.same(index, expected), f"of {list(cache)} a part, {list(index)}, is written")
        m.require(not any(m.same(size, 0) for size in index), "nothing is written")
        steps = [step for number, step in enumerate(m.value("index").stride()) if number != place and not m.same(index[number], 1)]
        m.require(all(m.same(step, 0) for step in steps), "the positions are not known to be the same for all that is written at one")
        m.require(m.same(m.shape("new"), index), f"what is written has shape {list(m.shape('new'))}, not {list(index)}")
        m.require(m.dtype("new") == m.dtype("cache"), f"{m.dtype('new')} is written to a cache of {m.dtype('cache')}")

    def rewrite(self, dsi, m):
        rank = m.rank("cache")
        pos = m.index
        for other in reversed([number for number in range(rank) if number != m.dim % rank]):
            pos = dsi.aten.select(pos, other, 0)
        return dsi.aten.index_copy(m.cache, m.dim % rank, pos, m.new)

    def sample(self, s):
        given, t = s.defaults(), 3
        sizes = [s.size("B"), s.size("H"), s.size("L"), s.size("D")]
        place = given["dim"] % 4
        sizes[place] += 3
        new, column = [*sizes], [1, 1, 1, 1]
        new[place] = column[place] = t
        index = s.positions(t, sizes[place]).view(column)
        index = s.pick((index.expand(new), index.expand(new), index.expand(new).clone()))
        return {**given, "cache": s.tensor_of(sizes), "index": index, "new": s.tensor_of(new)}
