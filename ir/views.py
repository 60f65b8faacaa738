"""Index maps of the operators that only move elements: views, broadcasts, slices, concatenation, gathers.

Every coordinate made here lies inside its tensor at every point, also where another part of a `cat` is selected, so that a kernel may
load first and select afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .index_map import ZERO, nonnegative, size_of, view_coordinates
from .pull import Coords, Handler, Puller, args_of, fail, fake, sizes_of
from .tile import Const, Expr, Index, Op, Test

aten = torch.ops.aten
_TO_THE_END = 1 << 62


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword, with a size node replaced by its SymInt."""
    value = args_of(node)[position] if len(args_of(node)) > position else node.kwargs.get(name, default)
    return value.meta["val"] if isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), torch.Tensor) else value


def keyword(node: fx.Node, name: str, default: Any = None) -> Any:
    """A keyword-only argument."""
    return node.kwargs.get(name, default)


def axis(node: fx.Node, dim: int, rank: int) -> int:
    """A literal dimension, counted from the front."""
    if not isinstance(dim, int):
        raise fail(node, f"{node.name} works on a dimension that is no literal")
    return dim + rank if dim < 0 else dim


def _same(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    return pull.at(args_of(node)[0], coords)


def _view(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source = args_of(node)[0]
    old, new = sizes_of(fake(source)), sizes_of(fake(node))
    mapped = view_coordinates(pull.space, old, new, coords)
    if mapped is None:
        raise fail(node, f"{node.name} views sizes {old} as {new}, and their products are not plainly equal", 1)
    return pull.at(source, mapped)


def _permute(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    rank = len(coords)
    if node.target is aten.permute.default:
        order = [axis(node, d, rank) for d in args_of(node)[1]]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (argument(node, 1, "dim0"), argument(node, 2, "dim1"))
        order = list(range(rank))
        if rank > 1:
            a, b = axis(node, a, rank), axis(node, b, rank)
            order[a], order[b] = b, a
    source: list[sympy.Expr] = [ZERO] * rank
    for position, dim in enumerate(order):
        source[dim] = coords[position]
    return pull.at(args_of(node)[0], source)


def _expand(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    return pull.at(args_of(node)[0], pull.broadcast(node, args_of(node)[0], coords))


def _repeat(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    sizes = sizes_of(fake(args_of(node)[0]))
    inner = coords[len(coords) - len(sizes) :]
    return pull.at(args_of(node)[0], [ZERO if n == 1 else pull.space.mod(c, n) for c, n in zip(inner, sizes, strict=True)])


def slice_start(node: fx.Node, start: Any, end: Any, step: Any, size: sympy.Expr, length: sympy.Expr) -> sympy.Expr:
    """Where a slice of `length` entries of a dimension of `size` begins."""
    to_the_end = end is None or (isinstance(end, int) and end >= _TO_THE_END) or size_of(end) == size
    if to_the_end and size_of(step) == 1:
        return size - length  # whatever the sign of `start`, and however it was clamped
    first = size_of(0 if start is None else start)
    if first.is_Integer and first < 0:
        first = size + first
    if nonnegative(first):
        return first
    if not first.is_Integer:
        raise fail(node, f"{node.name} starts at {first}, which may be negative", 1)
    return ZERO  # torch clamps


def _slice(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source = args_of(node)[0]
    dim = axis(node, argument(node, 1, "dim", 0), len(coords))
    step, size, length = argument(node, 4, "step", 1), size_of(fake(source).shape[dim]), size_of(fake(node).shape[dim])
    first = slice_start(node, argument(node, 2, "start"), argument(node, 3, "end"), step, size, length)
    moved = list(coords)
    moved[dim] = coords[dim] * size_of(step) + first
    return pull.at(source, moved)


def _select(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source = args_of(node)[0]
    dim = axis(node, argument(node, 1, "dim"), len(coords) + 1)
    index = size_of(argument(node, 2, "index"))
    if index.is_Integer and index < 0:
        index = size_of(fake(source).shape[dim]) + index
    elif not nonnegative(index):
        raise fail(node, f"{node.name} selects entry {index}, which may be negative", 1)
    return pull.at(source, (*coords[:dim], index, *coords[dim:]))


def _flip(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    moved = list(coords)
    for d in args_of(node)[1] if coords else ():  # torch lets one number be flipped, too
        dim = axis(node, d, len(coords))
        moved[dim] = size_of(fake(node).shape[dim]) - 1 - coords[dim]
    return pull.at(args_of(node)[0], moved)


def _roll(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims", [])
    moved = list(coords)
    for shift, d in zip(shifts, dims, strict=False):
        dim = axis(node, d, len(coords))
        size = sizes_of(fake(node))[dim]
        if not isinstance(shift, int) or (shift > 0 and not size.is_Integer):
            raise fail(node, f"{node.name} rolls a dimension of {size} by {shift}, which may be more than once round", 4)
        moved[dim] = pull.space.mod(moved[dim] - shift, size) if size != 1 else ZERO
    if len(dims) != len(shifts) or len(set(dims)) != len(dims):
        raise fail(node, f"{node.name} rolls dimensions {dims} by {shifts}", 4)
    return pull.at(args_of(node)[0], moved)


def _getitem(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """One piece of a split, chunk or unbind."""
    pieces, number = args_of(node)
    if not isinstance(pieces, fx.Node) or pieces.target not in SPLITS or not isinstance(number, int):
        raise fail(node, f"{node.name} takes an item of {pieces}, which is no split, chunk or unbind", 4)
    values = pieces.meta["val"]
    number = number + len(values) if number < 0 else number
    source = args_of(pieces)[0]
    unbind = pieces.target is aten.unbind.int
    dim = axis(pieces, argument(pieces, 1 if unbind else 2, "dim", 0), fake(source).dim())
    if unbind:
        return pull.at(source, (*coords[:dim], sympy.Integer(number), *coords[dim:]))
    before = sympy.Add(*(size_of(v.shape[dim]) for v in values[:number]))
    return pull.at(source, (*coords[:dim], coords[dim] + before, *coords[dim + 1 :]))


def _piece(pull: Puller, source: fx.Node, coords: Coords, dim: int, local: sympy.Expr, size: sympy.Expr) -> Expr:
    """One piece of a `cat`, at `local` along `dim`, which lies in [0, size) only where the piece is selected."""
    at = (*coords[:dim], local, *coords[dim + 1 :])
    if pull.space.within(local, size):
        return pull.at(source, at)
    # Unwrapped, the pieces of one tensor keep reading it at the same coordinates, as a partial rope does.
    value = pull.selected(source, at)
    return value if value is not None else pull.at(source, (*coords[:dim], pull.wrap(local, size), *coords[dim + 1 :]))


def _parts(pull: Puller, node: fx.Node, position: sympy.Expr, parts: Sequence[tuple[sympy.Expr, Expr]]) -> Expr:
    """The part in which `position` lies; each part is (its exclusive end, its value)."""
    result: Expr | None = None
    for end, value in reversed(parts):
        if result is None:
            result = value
            continue
        inside = pull.space.relation(sympy.StrictLessThan, (position, end))
        if inside is sympy.true:
            result = value
        elif inside is not sympy.false:
            if inside.free_symbols & pull.gathers.keys():
                raise fail(node, f"{node.name} is read at a gathered index along its concatenated dimension", 5)
            result = Op("where", (Test(inside), value, result), fake(node).dtype)
    assert result is not None
    return result


def _cat(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    whole = fake(node)
    dim = axis(node, argument(node, 1, "dim", 0), whole.dim())
    start, parts = ZERO, []
    for source in args_of(node)[0]:
        if fake(source).dim() != whole.dim() or size_of(fake(source).shape[dim]) == 0:
            if any(n == 0 for n in sizes_of(fake(source))):
                continue
            raise fail(node, f"{node.name} concatenates {source.name} of another rank")
        size = size_of(fake(source).shape[dim])
        value = pull.cast(_piece(pull, source, coords, dim, coords[dim] - start, size), whole.dtype)
        start = start + size
        parts.append((start, value))
    if not parts:
        raise fail(node, f"{node.name} has no elements")
    return _parts(pull, node, coords[dim], parts)


def _pad(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """constant_pad_nd: the source where the point lies in it, a number around it."""
    source, pads = args_of(node)[:2]
    number, dtype = argument(node, 2, "value", 0), fake(node).dtype
    if not isinstance(number, bool | int | float):
        raise fail(node, f"{node.name} pads with {number}, which is no number")
    filler = Const(bool(number) if dtype == torch.bool else float(number) if dtype.is_floating_point else int(number), dtype)
    moved, tests = list(coords), []
    for i, before in enumerate(pads[::2]):
        dim, low = len(coords) - 1 - i, size_of(before.meta["val"] if isinstance(before, fx.Node) else before)
        size = size_of(fake(source).shape[dim])
        moved[dim] = coords[dim] - low
        tests += [
            pull.space.relation(sympy.StrictLessThan, (low - 1, coords[dim])),
            pull.space.relation(sympy.StrictLessThan, (moved[dim], size)),
        ]
    if any(test is sympy.false for test in tests):
        return filler
    sizes = sizes_of(fake(source))
    if all(pull.space.within(c, n) for c, n in zip(moved, sizes, strict=True)):
        return pull.at(source, moved)
    # Unwrapped where that is safe, so that the source is read at one set of coordinates.
    value = pull.selected(source, tuple(moved))
    if value is None:
        value = pull.at(source, [pull.wrap(c, n) for c, n in zip(moved, sizes, strict=True)])
    value = pull.cast(value, dtype)
    for test in tests:
        if test is not sympy.true:
            if test.free_symbols & pull.gathers.keys():
                raise fail(node, f"{node.name} is read at a gathered index along a padded dimension", 5)
            value = Op("where", (Test(test), value, filler), dtype)
    return value


def _stack(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    whole = fake(node)
    dim = axis(node, argument(node, 1, "dim", 0), whole.dim())
    rest = (*coords[:dim], *coords[dim + 1 :])
    parts = [(sympy.Integer(i + 1), pull.cast(pull.at(source, rest), whole.dtype)) for i, source in enumerate(args_of(node)[0])]
    return _parts(pull, node, coords[dim], parts)


def _from_index(pull: Puller, node: fx.Node, index: fx.Node, at: Coords, size: sympy.Expr, negative: bool) -> sympy.Expr:
    """The coordinate that an index tensor holds; `negative`: whether it may count from the end."""
    value = pull.at(index, at)
    if fake(index).dtype in (torch.bool, torch.uint8):
        raise fail(node, f"{node.name} indexes by a mask, whose result has no fixed size", 5)
    if negative:
        if value.dtype != torch.int64:
            value = Op("cast", (value,), torch.int64)
        below = Op("lt", (value, Const(0, torch.int64)), torch.bool)
        value = Op("where", (below, Op("add", (value, Index(size)), torch.int64), value), torch.int64)
    return pull.gathered(value, size)


def _index(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """x[..., i, j, ...] with adjacent integer index tensors: one load at gathered coordinates."""
    source, indices = args_of(node)
    rank = fake(source).dim()
    indices = [*indices, *([None] * (rank - len(indices)))]
    used = [d for d, i in enumerate(indices) if i is not None]
    if not used or used != list(range(used[0], used[-1] + 1)):
        raise fail(node, f"{node.name} indexes dimensions that are not adjacent", 5)
    first, block = used[0], fake(node).dim() - (rank - len(used))
    at = coords[first : first + block]
    block_sizes = sizes_of(fake(node))[first : first + block]
    moved: list[sympy.Expr] = list(coords[:first])
    for d in used:
        index, size = indices[d], size_of(fake(source).shape[d])
        own = sizes_of(fake(index))
        tail = at[block - len(own) :]
        if any(n not in (1, full) for n, full in zip(own, block_sizes[block - len(own) :], strict=True)):
            raise fail(node, f"{node.name} broadcasts {index.name} to sizes that are not plainly equal", 1)
        moved.append(
            _from_index(pull, node, index, tuple(ZERO if n == 1 else c for n, c in zip(own, tail, strict=True)), size, negative=True)
        )
    moved.extend(coords[first + block :])
    return pull.at(source, moved)


def _index_select(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source, dim, index = args_of(node)
    if not coords:  # of a tensor without dimensions only itself can be selected
        return pull.at(source, ())
    dim = axis(node, dim, len(coords))
    at = (coords[dim],) if fake(index).dim() else ()
    return pull.at(
        source, (*coords[:dim], _from_index(pull, node, index, at, size_of(fake(source).shape[dim]), negative=False), *coords[dim + 1 :])
    )


def _gather(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source, dim, index = args_of(node)[:3]
    dim = axis(node, dim, len(coords))
    picked = _from_index(pull, node, index, coords, size_of(fake(source).shape[dim]), negative=False)
    return pull.at(source, (*coords[:dim], picked, *coords[dim + 1 :]))


def _copy(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """aten.copy(destination, source): the source, broadcast and converted."""
    value = pull.at(args_of(node)[1], pull.broadcast(node, args_of(node)[1], coords))
    return value if value.dtype == fake(node).dtype else Op("cast", (value,), fake(node).dtype)


SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)

# Views in the sense of torch: the result shares memory with its first argument.
ALIASING: dict[Any, Handler] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.flatten.using_ints: _view,
    aten.unflatten.int: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.contiguous.default: _same,
    operator.getitem: _getitem,
}

VIEWS: dict[Any, Handler] = {
    **ALIASING,
    aten._reshape_copy.default: _view,
    aten.clone.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.repeat.default: _repeat,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.stack.default: _stack,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.copy.default: _copy,
}
