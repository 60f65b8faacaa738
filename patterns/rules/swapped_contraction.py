"""bmm of [.., D, H] with [D, H, N], each flattened   ->   bmm of [.., H, D] with [H, D, N]

The order of what is summed is free: where the weight lies as [N, H, D] or [H, D, N], it is read as it lies. `torch.einsum` sums by the
alphabet. Seen in: output projections by einsum (XLNet's "ibnd,hnd->ibh").
"""

import torch
from dsi.patterns.rule import Rule


class SwappedContraction(Rule):
    literals = {"x_order": ([0, 2, 1], [1, 0, 3, 2], [0, 1, 2]), "order": ([2, 1, 0], [1, 0, 2], [3, 2, 0, 1], [0, 1, 2])}
    stage = "normalise"

    def pattern(self, op, x, w, x_order, order, flat, flat_w):
        rows = op.permute(x, x_order).named("rows")
        stored = op.permute(w, order).named("stored")
        return op.bmm(
            op.view(op.maybe_contiguous(rows), flat).named("flat_rows"), op.view(op.maybe_contiguous(stored), flat_w).named("flat_stored")
        )

    def check(self, m):
        rows, stored = m.shape("rows"), m.shape("stored")
        m.require(all(isinstance(d, int) for d in (*m.x_order, *m.order)), "an order is computed in the graph")
        m.require(
            len(rows) > 2 and len(stored) > 2 and m.same(rows[-2:], stored[:2]), f"{list(rows)} and {list(stored)} share no two dimensions"
        )
        m.require(all(isinstance(size, int) for size in stored), "the size of the weight is symbolic")
        (one, k, _), (first, _, inner) = m.shape("flat_stored"), m.shape("flat_rows")
        m.require(m.same((one, first), (1, 1)) and m.same(k, stored[0] * stored[1]) and m.same(inner, k), f"{k} entries are summed over")
        rank = len(stored)
        read = [d % rank for d in swapped(m.order)]
        m.require(read in ([*range(1, rank), 0], [*range(rank)]), f"the weight is permuted by {m.order}")

    def rewrite(self, dsi, m):
        x = dsi.aten.permute(m.x, [*m.x_order[:-2], *m.x_order[-2:][::-1]])
        w = dsi.aten.permute(m.w, swapped(m.order))
        x = dsi.aten.clone(x, memory_format=torch.contiguous_format)
        return dsi.aten.bmm(dsi.aten.view(x, m.flat), dsi.aten.view(w, m.flat_w))

    def sample(self, s):
        values = s.defaults()
        h, d, n, b, t = (s.size(name) for name in "HDNBT")
        x_order, order = values["x_order"], values["order"]
        rows, stored = ([b, d, h] if len(x_order) == 3 else [b, t, d, h]), ([d, h, n] if len(order) == 3 else [d, h, n, 2])
        x, w = [0] * len(rows), [0] * len(stored)
        for sizes, permuted, dims in ((x, rows, x_order), (w, stored, order)):
            for size, dim in zip(permuted, dims, strict=True):
                sizes[dim] = size
        return {
            **values,
            "x": s.tensor_of(x),
            "w": s.tensor_of(w),
            "flat": [1, -1, d * h],
            "flat_w": [1, d * h, -1],
        }


def swapped(order):
    """The order with its first two dimensions exchanged."""
    return [order[1], order[0], *order[2:]]
