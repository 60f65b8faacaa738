"""view, permute or clone of unsqueeze(x, dim)   ->   the same of x, an unsqueeze after it where one is left

A dimension of one entry sinks until a view takes it in, through a copy if it is the last one. Seen in: the operands of `torch.einsum`,
each with a dimension of one entry for every letter that it has not.
"""

import torch
from dsi.patterns.rule import Rule


class UnsqueezedView(Rule):
    literals = {"dim": (0, 3, -1, 3), "order": ([0, 2, 1, 3], [3, 1, 0, 2], [1, 2, -1, 0])}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, dim, sizes, order):
        inner = op.unsqueeze(x, dim)
        return op.either(
            "spelling",
            view=lambda: op.view(inner, sizes),
            permute=lambda: op.permute(inner, order),
            clone=lambda: op.clone(inner, memory_format=torch.contiguous_format),
        ), inner

    def check(self, m):
        m.require(m.is_int("dim"), "the dimension is computed in the graph")
        # A copy with a dimension in front, for a batch say, is what its readers want.
        appended = m.dim % (m.rank("x") + 1) == m.rank("x")
        m.require(m.tag("spelling") != "clone" or appended, f"dimension {m.dim} is not the last one of {m.rank('x') + 1}")

    def rewrite(self, dsi, m):
        if m.tag("spelling") == "view":
            return dsi.aten.view(m.x, m.sizes), dsi.keep
        rank = m.rank("x") + 1
        dim = m.dim % rank
        if m.tag("spelling") == "clone":
            return dsi.aten.unsqueeze(dsi.call(torch.ops.aten.clone.default, m.x, torch.contiguous_format), dim), dsi.keep
        order = [d % rank for d in m.order]
        rest = [d - (d > dim) for d in order if d != dim]
        return dsi.aten.unsqueeze(dsi.aten.permute(m.x, rest), order.index(dim)), dsi.keep

    def sample(self, s):
        a, b, c = s.size("A"), s.size("B"), s.size("C")
        return {**s.defaults(), "x": s.tensor("A B C"), "sizes": s.pick(([c, 1, a * b], [a * b, -1], [-1, 1]))}
