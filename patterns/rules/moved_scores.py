"""view(softmax(f(view(x, sizes)), -1), [B·H, S, L]) of one query or one head   ->   the same of view(x, [B, H, S, L])

`permuted_scores` where the permute moves dimensions of one entry, so that it is a view: sizes are [B, S, H, L] or [S, B, H, L].
Seen in: decode steps of what is seen there.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.permuted_scores import FILLS, between, built, check_terms, permuted, terms

ORDERS = ([0, 1, 2, 3], [0, 2, 1, 3], [1, 2, 0, 3])


class MovedScores(Rule):
    literals = {"scale": (0.3, 2.0), "cap": (2.0, 5.0), "fill": FILLS, "first_fill": FILLS}
    dtypes = {"keep": torch.bool, "first": torch.bool}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, sizes, flat, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow):
        scores = op.view(x, sizes).named("viewed")
        weights = between(op, scores, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow)
        return op.view(op.maybe_contiguous(weights), flat)

    def check(self, m):
        m.require(m.rank("x") == 3 and m.rank("viewed") == 4, f"{list(m.shape('x'))} is viewed as {list(m.shape('viewed'))}")
        m.require(m.same(m.output().shape, m.shape("x")), f"the view makes {list(m.output().shape)}, not {list(m.shape('x'))}")
        order = order_of(m)
        m.require(order is not None, f"{list(m.shape('viewed'))} is not {list(m.shape('x'))} with dimensions of one entry moved")
        m.require(order != ORDERS[0], "queries come last of the leading dimensions")
        check_terms(m, m.shape("viewed"))

    def rewrite(self, dsi, m):
        order = order_of(m)
        weights = built(dsi, m, dsi.aten.view(m.x, [m.sizes[d] for d in order]), permuted(dsi, order))
        return dsi.aten.view(weights, m.flat)

    def sample(self, s):
        b, h, t, length = s.pick(((2, 1, 3, 5), (2, 3, 1, 5), (1, 2, 1, 3), (3, 1, 1, 5), (1, 1, 4, 5), (2, 2, 3, 5)))
        sizes = s.pick(([b, t, h, length], [t, b, h, length]))
        return {
            **s.defaults(),
            **terms(s, sizes),
            "x": s.tensor_of([b * h, t, length]),
            "sizes": sizes,
            "flat": s.pick(([b * h, t, length], [b * h, t, length], [b, h * t, length])),
        }


def order_of(m):
    """In which order the dimensions of the view are [B, H, S, L], where only those of one entry change places; None if in none."""
    (n, s, length), viewed = m.shape("x"), m.shape("viewed")
    for order in ORDERS:
        batch, heads, queries, last = (viewed[d] for d in order)
        moved = [d for d in order if not m.same(viewed[d], 1)]
        if moved == sorted(moved) and m.same((batch * heads, queries, last), (n, s, length)):
            return order
    return None
