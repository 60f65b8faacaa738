"""The semantic operators of ir/ops.py at one point: anchors and row statistics as leaves, everything else spelled out."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from . import quantised_ops  # noqa: F401  (registers dsi::linear_int8)
from .elementwise import operation
from .index_map import ZERO, size_of
from .pull import Contraction, Coords, Handler, Moment, MomentBody, Puller, args_of, fail, fake
from .tile import Const, Expr, Op, Test
from .views import argument, keyword

dsi = torch.ops.dsi
aten = torch.ops.aten
F32 = torch.float32


def _linear(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    dtype = fake(node).dtype
    bias = argument(node, 2 if node.target is dsi.linear.default else 3, "bias")
    result = Contraction(node, coords)
    if bias is None:
        return result
    return Op("add", (result, pull.at(bias, coords[-1:])), dtype)


def _attention(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    return Contraction(node, coords)


def _embedding(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    table, ids = args_of(node)[:2]
    row = pull.gathered(pull.at(ids, coords[:-1]), size_of(fake(table).shape[0]))
    return pull.at(table, (row, coords[-1]))


def _activation(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    return operation(pull, node, argument(node, 1, "kind"), args_of(node)[:1], coords)


def _gated(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    gate, up = args_of(node)[:2]
    dtype = fake(node).dtype
    active = Op(argument(node, 2, "kind"), (pull.at(gate, coords),), dtype)
    return Op("mul", (active, pull.at(up, coords)), dtype)


def _rope(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """x * cos + partner(x) * sin for the first `turned` entries, where the partner is another entry of the same head."""
    x, cos, sin = args_of(node)[:3]
    style = argument(node, 3, "style")
    dtype = fake(node).dtype
    *lead, channel = coords
    head, turned = size_of(fake(x).shape[-1]), size_of(fake(cos).shape[-1])
    if not (head.is_Integer and turned.is_Integer and turned % 2 == 0):
        raise fail(node, f"{node.name} turns {turned} of {head} entries: both must be numbers, the first even", 4)
    space, two = pull.space, sympy.Integer(2)
    # A channel that is not turned gets a partner too, one in its own head, so that loads stay inside the tensor; its value is not used.
    turning = channel if turned == head else space.mod(channel, turned)
    if style == "half":
        partner_channel = space.mod(turning + turned / 2, turned)
        is_lower = space.relation(sympy.StrictLessThan, (turning, turned / 2))
    else:
        pairing = channel if head % 2 == 0 else turning  # pairs of the whole head are in it as well
        partner_channel = 2 * space.floordiv(pairing, two) + 1 - space.mod(pairing, two)
        is_lower = space.relation(sympy.StrictLessThan, (space.mod(turning, two), sympy.Integer(1)))
    own, partner = pull.at(x, coords), pull.at(x, (*lead, partner_channel))
    cos_value, sin_value = (_table(pull, node, t, lead, turning) for t in (cos, sin))
    opposite = Op("neg", (partner,), dtype)
    rotated = _select(is_lower, opposite, partner, dtype)
    result: Expr = Op("add", (Op("mul", (own, cos_value), dtype), Op("mul", (rotated, sin_value), dtype)), dtype)
    return result if turned == head else _select(space.relation(sympy.StrictLessThan, (channel, turned)), result, own, dtype)


def _select(condition: sympy.Basic, yes: Expr, no: Expr, dtype: torch.dtype) -> Expr:
    if condition in (sympy.true, sympy.false):
        return yes if condition is sympy.true else no
    return Op("where", (Test(condition), yes, no), dtype)


def _table(pull: Puller, node: fx.Node, table: fx.Node, lead: list[sympy.Expr], channel: sympy.Expr) -> Expr:
    """cos or sin [..., R] at a point of x [..., D]: the leading dimensions broadcast, the last does not."""
    value, x = fake(table), fake(node)
    skipped = x.dim() - value.dim()
    coords: list[sympy.Expr] = []
    for n, full, c in zip(value.shape[:-1], x.shape[skipped:-1], lead[skipped:], strict=True):
        n, full = size_of(n), size_of(full)
        if n != 1 and n != full:
            raise fail(node, f"{node.name} broadcasts a dimension of size {n} of {table.name} to {full}, which may or may not be equal", 1)
        coords.append(ZERO if n == 1 else c)
    return pull.at(table, (*coords, channel))


def _moment(pull: Puller, node: fx.Node, lead: Coords, kind: str, eps: float, which: str) -> Moment:
    key = (node, lead)
    if key not in pull.moments:
        x = args_of(node)[0]
        size = size_of(fake(x).shape[-1])
        over = pull.space.add(sympy.Symbol(f"t{len(pull.moments)}_", integer=True, nonnegative=True), size)
        pull.moments[key] = MomentBody(kind, pull.at(x, (*lead, over)), over, size, eps)
    return Moment(node, lead, which)


def _reciprocal_root(pull: Puller, node: fx.Node, lead: Coords, kind: str) -> Expr:
    """1 / the root of the mean square of a row of norm `node`, by where its epsilon is; a row of zeros has the root 0."""
    eps, place = keyword(node, "eps"), keyword(node, "place", "under")
    if place == "under":
        return _moment(pull, node, lead, kind, eps, "rstd")
    root = Op("reciprocal", (_moment(pull, node, lead, kind, 0.0, "rstd"),), F32)
    return Op("reciprocal", (Op("add" if place == "beside" else "maximum", (root, Const(float(eps), F32)), F32),), F32)


def _layer_norm(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    x, weight, bias = (argument(node, i, n) for i, n in enumerate(("x", "weight", "bias")))
    *lead, last = coords
    rstd = _reciprocal_root(pull, node, tuple(lead), "layer")
    mean = Moment(node, tuple(lead), "mean")
    value: Expr = Op("mul", (Op("sub", (pull.at(x, coords), mean), F32), rstd), F32)
    if weight is not None:
        value = Op("mul", (value, pull.at(weight, (last,))), F32)
    if bias is not None:
        value = Op("add", (value, pull.at(bias, (last,))), F32)
    assert isinstance(value, Op)
    return Op(value.name, value.args, fake(node).dtype)


def _rms_norm(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    x, weight = (argument(node, i, n) for i, n in enumerate(("x", "weight")))
    dtype = fake(x).dtype
    *lead, last = coords
    cast, offset = keyword(node, "cast", "none"), keyword(node, "offset", 0.0)
    value = Op("mul", (pull.at(x, coords), _reciprocal_root(pull, node, tuple(lead), "rms")), F32)
    if cast == "before" and dtype != F32:
        value = Op("cast", (value,), dtype)
    if weight is not None:
        scale = pull.at(weight, (last,))
        if offset:
            scale = Op("add", (scale, Const(float(offset), F32)), F32)
        value = Op("mul", (value, scale), F32)
    return value if value.dtype == dtype else Op("mul", value.args, dtype) if value.name == "mul" else value


def _kv_write(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    raise fail(node, f"the cache that {node.name} writes is read in the same region", 9)


def _all_reduce(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    raise fail(node, f"{node.name} is an all-reduce, which regions never cross", 10)


SEMANTICS: dict[Any, Handler] = {
    dsi.linear.default: _linear,
    dsi.linear_int8.default: _linear,
    dsi.attention.default: _attention,
    dsi.embedding.default: _embedding,
    aten.embedding.default: _embedding,
    dsi.activation.default: _activation,
    dsi.gated.default: _gated,
    dsi.rope.default: _rope,
    dsi.layer_norm.default: _layer_norm,
    dsi.rms_norm.default: _rms_norm,
    dsi.kv_write.default: _kv_write,
    dsi.all_reduce.default: _all_reduce,
}

LINEARS = (dsi.linear.default, dsi.linear_int8.default)
ANCHORS = (*LINEARS, dsi.attention.default)
NORMS = (dsi.layer_norm.default, dsi.rms_norm.default)
