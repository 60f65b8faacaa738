"""softmax((x + term) * c), with a number c   ->   softmax(x * c + term * c)

A choice between x and a number likewise, x * a becomes x * (a · c), and x + 0, scaled or not, is x. In between may stand terms or a choice
that are not scaled. So that attention finds its scores scaled once, and before anything is added to them.
Seen in: relative positions as Transformer-XL has them (XLNet, Conformers); softmax scales that hold log2(e).
"""

import math

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.fill_chain import holds

_WIDE = (torch.float32, torch.float64)


class ScaledTerms(Rule):
    literals = {"a": (0.5, 3.0, 4), "c": (0.3, 4.0), "fill": (float("-inf"), -5.0, 1.5), "inner_fill": (float("-inf"), -5.0, 1.5)}
    dtypes = {"keep": torch.bool, "inner_keep": torch.bool}
    stage = "normalise"

    def pattern(self, op, x, inner, inner_keep, inner_fill, a, c, term, second, keep, fill, wide, dim):
        summed = op.either(
            "inner",
            added=lambda: x + inner,
            masked_fill=lambda: op.masked_fill(x, inner_keep, inner_fill),
            mul=lambda: op.mul(x, a),
            div=lambda: op.div(x, a),
            zero=lambda: op.add(x, 0),
        )
        scaled = op.either("factor", mul=lambda: op.mul(summed, c), div=lambda: op.div(summed, c), none=lambda: summed)
        scores = op.either(
            "outer",
            none=lambda: scaled,
            added=lambda: scaled + term,
            twice=lambda: (scaled + term) + second,
            masked_fill=lambda: op.masked_fill(scaled, keep, fill),
            where=lambda: op.where(keep, scaled, fill),
        ).named("scores")
        return op.softmax(op.maybe_cast(scores, wide, tag="wide"), dim)

    def check(self, m):
        x = m.dtype("x")
        m.require(x.is_floating_point and m.dtype("scores") == x, f"x is {x}, the scores are {m.dtype('scores')}")
        m.require(m.is_int("dim"), "the dimension is computed in the graph")
        for name in ("a", "c", "fill", "inner_fill"):
            m.require(not m.present(name) or m.is_number(name), f"{name} is {getattr(m, name)}, not a number")
        m.require(m.tag("factor") != "none" or m.tag("inner") == "zero", "there is no factor")
        m.require(not m.present("c") or (m.c > 0 and math.isfinite(m.c)), f"the factor is {m.c}")
        m.require(not m.present("fill") or holds(x, m.fill), f"{x} does not hold {m.fill}")
        if m.tag("inner") == "added":
            m.require(m.dtype("inner") == x, f"x is {x}, the term {m.dtype('inner')}")
            m.require(m.broadcasts(m.shape("inner"), m.shape("x")), f"a term {list(m.shape('inner'))} of {list(m.shape('x'))}")
        elif m.tag("inner") == "masked_fill":
            m.require(holds(x, scaled(m, m.inner_fill)), f"{x} does not hold {scaled(m, m.inner_fill)}")
        elif m.tag("inner") != "zero":
            m.require(x in _WIDE, f"a product of {x} is rounded before it is multiplied again")
            m.require(m.a > 0 and 1e-30 < factor(m) < 1e30, f"there is no one factor for {m.a} and {m.c}")

    def rewrite(self, dsi, m):
        def times(value):
            return value if m.tag("factor") == "none" else getattr(dsi.aten, m.tag("factor"))(value, m.c)

        if m.tag("inner") == "added":
            # Terms of half precision may cancel each other: what is rounded of each before must not be left over.
            values = (m.x, m.inner) if m.dtype("x") in _WIDE else (dsi.aten.cast(v, torch.float32) for v in (m.x, m.inner))
            scores = dsi.aten.add(*(times(value) for value in values))
        elif m.tag("inner") == "masked_fill":
            scores = dsi.aten.masked_fill(times(m.x), m.inner_keep, scaled(m, m.inner_fill))
        elif m.tag("inner") == "zero":
            scores = times(m.x)
        else:
            scores = dsi.aten.mul(m.x, factor(m))
        if m.tag("outer") in ("added", "twice"):
            scores = dsi.aten.add(scores, m.term)
            scores = dsi.aten.add(scores, m.second) if m.tag("outer") == "twice" else scores
        elif m.tag("outer") != "none":
            hidden = dsi.call(torch.ops.aten.logical_not.default, m.keep) if m.tag("outer") == "where" else m.keep
            scores = dsi.aten.masked_fill(scores, hidden, m.fill)
        wide = m.cast("wide")
        weights = dsi.aten.softmax(scores if wide in (None, dsi.value(scores).dtype) else dsi.aten.cast(scores, m.wide), m.dim)
        return dsi.aten.cast(weights, m.dtype("x")) if wide is None and dsi.value(weights).dtype != m.dtype("x") else weights

    def sample(self, s):
        shape = [s.size(name) for name in "ABC"]
        x = s.tensor_of(shape)
        return {
            **s.defaults(),
            "x": x,
            "inner": s.pick((s.tensor_of(shape), s.tensor_of(shape[1:]), -1.01 * x, -1.01 * x)),
            **{name: s.tensor_of(s.pick((shape, shape[1:]))) for name in ("term", "second")},
            "keep": s.mask_of(shape, invert=s.chosen("outer") != "where"),
            "inner_keep": s.mask_of(shape[1:], invert=True),
            "wide": torch.float32,
            "dim": s.pick((-1, 1)),
        }


def scaled(m, number):
    """A number after the factor."""
    return number * m.c if m.tag("factor") == "mul" else number / m.c


def factor(m):
    """Both factors of x as one."""
    return scaled(m, m.a if m.tag("inner") == "mul" else 1 / m.a)
