"""masked_fill(masked_fill(x, a, number), b, number)   ->   masked_fill(x, a | b, number)

A choice by `where` likewise, of what it keeps. Seen in: scores that are masked for padding and again for what comes later.
"""

import math

import torch
from dsi.patterns.rule import Rule

aten = torch.ops.aten


class FillChain(Rule):
    dims = {"x": "...", "a": "~...", "b": "~..."}
    dtypes = {"a": torch.bool, "b": torch.bool}
    literals = {"fill": (float("-inf"), -1e9, 2.0)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, a, b, fill):
        def filled(tag, value, mask):
            return op.either(tag, masked_fill=lambda: op.masked_fill(value, mask, fill), where=lambda: op.where(mask, value, fill))

        return filled("outer", filled("inner", x, a), b)

    def check(self, m):
        m.require(m.dtype("x").is_floating_point and m.output().dtype == m.dtype("x"), f"x is {m.dtype('x')}, chosen {m.output().dtype}")
        m.require(m.is_number("fill"), "what is filled in is computed in the graph")
        m.require(holds(m.dtype("x"), m.fill), f"{m.dtype('x')} does not hold {m.fill}")
        m.require(m.dtype("a") == m.dtype("b") == torch.bool, f"the choices are made by {m.dtype('a')} and {m.dtype('b')}")

    def rewrite(self, dsi, m):
        hidden = [dsi.call(aten.logical_not.default, x) if m.tag(tag) == "where" else x for tag, x in (("inner", m.a), ("outer", m.b))]
        return dsi.aten.masked_fill(m.x, dsi.call(aten.logical_or.default, *hidden), m.fill)


def holds(dtype, number):
    """Whether a number of this floating dtype can be that one but for rounding: `masked_fill` takes no other, `where` makes an infinity."""
    return dtype.is_floating_point and (math.isinf(number) or abs(number) <= torch.finfo(dtype).max)
