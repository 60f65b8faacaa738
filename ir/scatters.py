"""Writes into a part of a tensor, as functional graphs have them: what was written where the point lies in the part, else what was there.

y = x; y[..., 2:8] = a   ->   slice_scatter(x, a, -1, 2, 8)
y = x; y[:, 0] = a       ->   select_scatter(x, a, 1, 0)
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from .index_map import nonnegative, size_of
from .pull import Coords, Handler, Puller, args_of, fail, fake
from .tile import Expr, Op, Test
from .views import argument, axis, slice_start

aten = torch.ops.aten
_MOST = 8  # a loop over positions is no kernel
_Bounds = list[tuple[sympy.Expr, sympy.Expr]]  # pairs of which the first is to be less than the second


def _written(pull: Puller, node: fx.Node, coords: Coords, source: Coords, bounds: _Bounds) -> Expr:
    """The second argument at `source` where all `bounds` hold, else the first argument at `coords`."""
    base, written = args_of(node)[:2]
    dtype, chain, before = fake(node).dtype, 1, base
    while before.target in SCATTERS:
        chain, before = chain + 1, args_of(before)[0]
    if chain > _MOST:
        raise fail(node, f"{node.name} is the last of {chain} writes into parts of one tensor: each is a choice at every point", 4)
    tests = [pull.space.relation(sympy.StrictLessThan, pair) for pair in bounds]
    tests = [test for test in tests if test is not sympy.true]
    if sympy.false in tests:
        return pull.at(base, coords)
    if any(test.free_symbols & pull.gathers.keys() for test in tests):
        raise fail(node, f"{node.name} is read at a gathered index along the dimension that is written to", 5)
    sizes = [size_of(n) for n in fake(written).shape]
    if all(pull.space.within(c, n) for c, n in zip(source, sizes, strict=True)):
        value = pull.at(written, source)
    else:  # unwrapped where that is safe, so that what is written is read at one set of coordinates
        chosen = pull.selected(written, source)
        value = pull.at(written, [pull.wrap(c, n) for c, n in zip(source, sizes, strict=True)]) if chosen is None else chosen
    value = pull.cast(value, dtype)
    if not tests:
        return value
    inside: Expr = Test(tests[0])
    for test in tests[1:]:
        inside = Op("and", (inside, Test(test)), torch.bool)
    return Op("where", (inside, value, pull.at(base, coords)), dtype)


def _slice_scatter(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    base, written = args_of(node)[:2]
    dim = axis(node, argument(node, 2, "dim", 0), len(coords))
    length, step = size_of(fake(written).shape[dim]), argument(node, 5, "step", 1)
    if not isinstance(step, int) or step < 1:
        raise fail(node, f"{node.name} writes every {step}th entry, which is no literal", 4)
    start = slice_start(node, argument(node, 3, "start"), argument(node, 4, "end"), step, size_of(fake(base).shape[dim]), length)
    local = coords[dim] - start
    bounds = [(start - 1, coords[dim]), (local, length * step)]
    if step > 1:
        bounds.append((pull.space.mod(pull.wrap(local, length * step), sympy.Integer(step)), sympy.Integer(1)))
        local = pull.space.floordiv(pull.wrap(local, length * step), sympy.Integer(step))
    return _written(pull, node, coords, (*coords[:dim], local, *coords[dim + 1 :]), bounds)


def _select_scatter(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    dim = axis(node, argument(node, 2, "dim"), len(coords))
    index = size_of(argument(node, 3, "index"))
    if index.is_Integer and index < 0:
        index = size_of(fake(node).shape[dim]) + index
    elif not nonnegative(index):
        raise fail(node, f"{node.name} writes entry {index}, which may be negative", 1)
    at = coords[dim]
    return _written(pull, node, coords, (*coords[:dim], *coords[dim + 1 :]), [(index - 1, at), (at, index + 1)])


def _fill(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """aten.fill(destination, number): the number, of the destination's dtype."""
    dtype = fake(node).dtype
    return pull.cast(pull.operand(node, args_of(node)[1], coords, dtype), dtype)


SCATTERS: dict[Any, Handler] = {aten.slice_scatter.default: _slice_scatter, aten.select_scatter.default: _select_scatter}
FILLS: dict[Any, Handler] = {aten.fill.Scalar: _fill, aten.fill.Tensor: _fill}
