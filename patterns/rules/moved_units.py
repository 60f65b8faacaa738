"""view(permute(x, order), sizes), where the permute only moves dimensions of one entry   ->   view(x, sizes)

Seen in: `torch.einsum` of a batch of one, or of one query.
"""

from dsi.patterns.rule import Rule


class MovedUnits(Rule):
    literals = {"order": ([0, 2, 1, 3], [3, 0, 1, 2], [1, 2, 3, 0], [0, 1, -1, 2])}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, order, sizes):
        inner = op.permute(x, order)
        return op.view(inner, sizes), inner

    def check(self, m):
        x = m.shape("x")
        m.require(all(isinstance(d, int) for d in m.order), "the order is computed in the graph")
        moved = [d % len(x) for d in m.order if not m.same(x[d], 1)]
        m.require(moved == sorted(moved), f"it moves more than dimensions of one entry of {list(x)}")
        # One key transposed stays a transposed one.
        m.require(m.same(m.output().shape[-1:], x[-1:]), f"the last dimension is {list(m.output().shape[-1:])} after {list(x[-1:])}")

    def rewrite(self, dsi, m):
        return dsi.aten.view(m.x, m.sizes), dsi.keep

    def sample(self, s):
        a, b, c = s.size("A"), s.size("B"), s.size("C")
        x = s.pick(([1, a, b, c], [a, 1, b, c], [a, b, 1, c], [a, b, c, 1], [a, b, c, 2]))
        return {**s.defaults(), "x": s.tensor_of(x), "sizes": s.pick(([a * b, c], [-1, 1, c], [a * b, -1], [-1, x[-1]]))}
