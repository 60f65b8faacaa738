"""permute(softmax(f(permute(x, order)), -1), back), where `back` undoes `order`   ->   softmax(f(x), -1)

f is what attention does with scores: a factor, a cap, terms that are added, choices between a score and a number; what has dimensions of
its own is permuted instead. Where dimensions of one entry end elsewhere, they alone are permuted after it.
Seen in: `torch.einsum("bqhd,bkhd->bqhk", q, k)` and its like, whose scores are laid out by queries.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.fill_chain import holds

FILLS = (float("-inf"), -5.0, 1.5)


class PermutedScores(Rule):
    literals = {
        "order": ([0, 2, 1, 3], [2, 0, 1, 3], [1, 2, 0, 3], [0, 3, 1, 2]),
        "scale": (0.3, 2.0),
        "cap": (2.0, 5.0),
        "fill": FILLS,
        "first_fill": FILLS,
    }
    dtypes = {"keep": torch.bool, "first": torch.bool}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, order, back, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow):
        scores = op.permute(x, order).named("permuted")
        return op.permute(between(op, scores, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow), back)

    def check(self, m):
        rank = m.rank("x")
        m.require(all(isinstance(d, int) for d in (*m.order, *m.back)), "the order is computed in the graph")
        moved = [d for d in left_over(m) if not m.same(m.shape("x")[d], 1)]
        m.require(moved == sorted(moved), f"{m.order} is not undone by {m.back}")
        m.require(m.order[-1] % rank == rank - 1, f"dimension {m.order[-1]} of {rank} is the last one after the permute")
        check_terms(m, m.shape("permuted"))

    def rewrite(self, dsi, m):
        rank, left = m.rank("x"), left_over(m)
        order = [d % rank for d in m.order]
        weights = built(dsi, m, m.x, permuted(dsi, [order.index(d) for d in range(rank)]))
        return weights if left == sorted(left) else dsi.aten.permute(weights, left)

    def sample(self, s):
        values = s.defaults()
        order = values["order"]
        sizes = [s.size(name) for name in "ABCD"]
        for d in s.pick(((), (), (0,), (1,), (0, 2))):
            sizes[d] = 1
        return {
            **values,
            **terms(s, [sizes[d] for d in order]),
            "x": s.tensor_of(sizes),
            "back": s.pick(([order.index(d) for d in range(4)], [order.index(d) for d in range(4)], [0, 2, 1, 3], [2, 1, 3, 0])),
        }


def left_over(m):
    """What both permutes do together."""
    return [m.order[d % len(m.order)] % len(m.order) for d in m.back]


def between(op, scores, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow):
    """The weights that attention makes of scores."""
    scaled = op.either("scale", mul=lambda: scores * scale, div=lambda: scores / scale, none=lambda: scores)
    capped = op.either("cap", tanh=lambda: cap * op.tanh(scaled / cap), none=lambda: scaled)

    def terms(tag, value, term, keep, fill):
        return op.either(
            tag,
            added=lambda: value + term,
            where=lambda: op.where(keep, value, fill),
            masked_fill=lambda: op.masked_fill(value, keep, fill),
            none=lambda: value,
        )

    masked = terms("second", terms("first", capped, bias, first, first_fill), mask, keep, fill)
    softmax = op.softmax(op.maybe_cast(masked, wide, tag="wide"), -1)
    return op.maybe_cast(softmax, narrow, tag="narrow")


def check_terms(m, scores):
    """Refuses terms that are no tensors, that widen the scores, or that are not known to broadcast to them."""
    for name in ("bias", "mask", "keep", "first"):
        if m.present(name):
            shape = m.shape(name)
            m.require(m.broadcasts(shape, scores), f"{name} {list(shape)} does not surely broadcast to {list(scores)}")
    for name in ("scale", "cap", "fill", "first_fill"):
        m.require(not m.present(name) or m.is_number(name), f"{name} is {getattr(m, name)}, not a number")
        if m.present(name) and name.endswith("fill"):
            m.require(holds(m.dtype("x"), getattr(m, name)), f"{m.dtype('x')} does not hold {getattr(m, name)}")


def permuted(dsi, back):
    """How a term of scores that are permuted by `back` is permuted."""

    def turned(x):
        missing = len(back) - dsi.value(x).dim()
        return dsi.aten.permute(dsi.aten.view(x, [1] * missing + dsi.sizes(x)) if missing else x, back)

    return turned


def built(dsi, m, scores, turned):
    """What `between` computes of `scores`, with `turned` of every tensor in it."""

    def with_term(tag, value, term, keep, fill):
        if m.tag(tag) == "added":
            return dsi.aten.add(value, turned(term))
        if m.tag(tag) == "where":
            return dsi.aten.masked_fill(value, dsi.call(torch.ops.aten.logical_not.default, turned(keep)), fill)
        return dsi.aten.masked_fill(value, turned(keep), fill) if m.tag(tag) == "masked_fill" else value

    value = getattr(dsi.aten, m.tag("scale"))(scores, m.scale) if m.tag("scale") != "none" else scores
    if m.tag("cap") == "tanh":
        value = dsi.aten.mul(dsi.aten.tanh(dsi.aten.div(value, m.cap)), m.cap)
    value = with_term("first", value, m.bias, m.first, m.first_fill)
    value = with_term("second", value, m.mask, m.keep, m.fill)
    if m.cast("wide") is not None:
        value = dsi.aten.cast(value, m.wide)
    value = dsi.aten.softmax(value, -1)
    return dsi.aten.cast(value, m.narrow) if m.cast("narrow") is not None else value


def terms(s, scores):
    """Samples of what `between` takes besides scores of that shape."""
    shape = s.pick((scores, [scores[0], 1, 1, scores[3]], [scores[1], 1, scores[3]], [1, *scores[1:3], 1], [scores[3]]))
    return {
        **{name: s.tensor_of(shape) for name in ("bias", "mask")},
        **{name: s.mask_of(shape) for name in ("keep", "first")},
        "wide": torch.float32,
        "narrow": s.dtype,
    }
