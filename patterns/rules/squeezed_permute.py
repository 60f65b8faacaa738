"""view(permute(view(a · b, split), order), sizes), where the last view only drops dimensions of one   ->   permute(view(a · b, rest))

The dimensions that it drops are not made. A permute that would be left with moving dimensions of one entry alone is a view.
Seen in: the results of `torch.einsum`, with a dimension of one entry for every letter that was summed over.
"""

from dsi.patterns.rule import Rule


class SqueezedPermute(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, a, b, split, order, sizes):
        parts = op.view(op.bmm(a, b), split).named("parts")
        return op.view(op.permute(parts, order).named("permuted"), sizes)

    def check(self, m):
        m.require(all(isinstance(d, int) for d in m.order), "the order is computed in the graph")
        before, after = m.shape("permuted"), m.output().shape
        m.require(len(after) < len(before), f"the view of {list(before)} as {list(after)} drops nothing")
        m.require(_kept(m) is not None, f"the view of {list(before)} as {list(after)} does not only drop dimensions of one entry")

    def rewrite(self, dsi, m):
        parts, kept = m.shape("parts"), _kept(m)
        product = dsi.aten.bmm(m.a, m.b)
        moved = [d for d in kept if not m.same(parts[d], 1)]
        if moved == sorted(moved):
            return dsi.aten.view(product, m.sizes)
        rest = sorted(kept)
        return dsi.aten.permute(dsi.aten.view(product, [m.split[d] for d in rest]), [rest.index(d) for d in kept])

    def sample(self, s):
        b, h, t, c = s.size("B"), s.size("H"), s.size("T"), s.size("C")
        split, order, sizes = s.pick(
            (
                ([b, h, t, 1, c], [0, 1, 2, 4, 3], [b, h, t, c]),
                ([b, h, t, 1, c], [0, 2, 1, 4, 3], [b, t, h, c]),
                ([b, h, t, 1, c], [0, 2, -1, 1, 3], [b, t, c, h]),
                ([b, h, t, 1, c], [0, 2, 1, 4, 3], [t, b, h, c]),
                ([b * h, t, 1, 1, c], [2, 1, 0, 3, 4], [1, t, -1, c]),
                ([b * h, 1, t, 1, c], [1, 0, 2, 4, 3], [1, b * h, t, c]),
            )
        )
        k = s.size("K")
        return {"a": s.tensor_of([b * h, t, k]), "b": s.tensor_of([b * h, k, c]), "split": split, "order": order, "sizes": sizes}


def _kept(m):
    """Which dimensions of the first view are left, in their order after the permute; None where more than dimensions of one are dropped."""
    parts, after = m.shape("parts"), [*m.output().shape]
    kept: list[int] = []
    for d in reversed([d % len(parts) for d in m.order]):
        if after and m.same(parts[d], after[-1]):
            after.pop()
            kept.insert(0, d)
        elif not m.same(parts[d], 1):
            return None
    return None if after else kept
