"""view(permute(view(x, split), order), sizes) of the sizes of x, where the permute only moves dimensions of one entry   ->   x

Seen in: a result of `torch.einsum` that is written to in place, whose views are undone and done again.
"""

from dsi.patterns.rule import Rule


class RoundTrip(Rule):
    literals = {"order": ([0, 1, 3, 2], [2, 0, 1, 3], [0, 2, 1, 3])}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, split, order, sizes):
        apart = op.view(x, split).named("apart")
        inner = op.permute(apart, order)
        return op.view(inner, sizes), inner

    def check(self, m):
        apart = m.shape("apart")
        m.require(all(isinstance(d, int) for d in m.order), "the order is computed in the graph")
        m.require(m.same(m.output().shape, m.shape("x")), f"{list(m.shape('x'))} comes back as {list(m.output().shape)}")
        moved = [d % len(apart) for d in m.order if not m.same(apart[d], 1)]
        m.require(moved == sorted(moved), f"it moves more than dimensions of one entry of {list(apart)}")

    def rewrite(self, dsi, m):
        return m.x, dsi.keep

    def sample(self, s):
        a, b, c = s.size("A"), s.size("B"), s.size("C")
        x, split = s.pick((([a, b, c], [a, b, c, 1]), ([a, b, c], [a, b, 1, c]), ([a * b, c], [a, 1, b, c]), ([a, b, c], [a, b, c, 1])))
        return {**s.defaults(), "x": s.tensor_of(x), "split": split, "sizes": s.pick((x, x, [c, *x[1:-1], x[0]]))}
