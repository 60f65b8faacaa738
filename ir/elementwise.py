"""ATen's pointwise operators as `Op`s of ir/pointwise.py: operand types made explicit, spellings reduced to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .index_map import size_of
from .pointwise import BY_OVERLOAD, POINTWISE, common_dtype
from .pull import Coords, Handler, Puller, args_of, fail, fake
from .tile import Const, Expr, Index, Op, Test
from .views import argument

aten = torch.ops.aten
_ON_BOOLS = {"mul": "and", "add": "or", "maximum": "or", "minimum": "and"}
_LARGEST_POWER = 8  # integer powers up to this are products


def _value(node: fx.Node, operand: Any) -> Any:
    """What `common_dtype` looks at: a tensor or a Python number."""
    if isinstance(operand, fx.Node):
        operand = operand.meta.get("val")
    if isinstance(operand, torch.SymInt):
        return 0
    if isinstance(operand, torch.Tensor | bool | int | float):
        return operand
    raise fail(node, f"{node.name} takes {operand!r}, which is neither a tensor nor a number")


def operation(pull: Puller, node: fx.Node, name: str, operands: Sequence[Any], coords: Coords, dtype: torch.dtype | None = None) -> Expr:
    """`name` of POINTWISE on arguments of `node`, computed in their common type as torch does. `dtype`: of the result, if not the
    node's."""
    common = common_dtype([_value(node, x) for x in operands])
    kind = POINTWISE[name].result
    if kind == "float" and not common.is_floating_point:
        common = torch.get_default_dtype()
    if common == torch.bool:
        name = _ON_BOOLS.get(name, name)
    values = [pull.operand(node, x, coords, common) for x in operands]
    if kind == "bool":
        values = [_rounded(value, common) for value in values]
    return apply(pull, name, values, common, dtype or fake(node).dtype)


def _rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """`value`, a number, as a tensor of `dtype` holds it: torch compares with that. (Sums and products take numbers as they are.)"""
    return Const(torch.tensor(value.value, dtype=dtype).item(), dtype) if isinstance(value, Const) and value.dtype == dtype else value


def apply(pull: Puller, name: str, values: Sequence[Expr], common: torch.dtype, dtype: torch.dtype) -> Expr:
    """`name` on values, each converted to the type `common` that is computed in."""
    return Op(name, tuple(pull.cast(v, common) for v in values), dtype)


def _plain(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    name = BY_OVERLOAD[node.target]
    operands = list(args_of(node)[: POINTWISE[name].arity])
    if node.kwargs.keys() - {"alpha"} or len(args_of(node)) > POINTWISE[name].arity + (name in ("add", "sub")):
        raise fail(node, f"{node.name} has arguments that {name} does not take", 4)
    return operation(pull, node, name, operands, coords)


def _sum(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """add and sub with `alpha`; rsub is sub the other way round."""
    left, right = args_of(node)[:2]
    alpha = argument(node, 2, "alpha", 1)
    if node.target in (aten.rsub.Scalar, aten.rsub.Tensor):
        left, right = right, left
        if not isinstance(alpha, int | float) or alpha != 1:
            raise fail(node, f"{node.name} has alpha = {alpha}", 4)
    name = "add" if node.target in (aten.add.Tensor, aten.add.Scalar) else "sub"
    if isinstance(alpha, int | float) and alpha == 1:
        return operation(pull, node, name, (left, right), coords)
    common = common_dtype([_value(node, left), _value(node, right)])
    if common == torch.bool or not isinstance(alpha, int | float):
        raise fail(node, f"{node.name} has alpha = {alpha}", 4)
    scaled = apply(pull, "mul", (pull.operand(node, right, coords, common), Const(alpha, common)), common, common)
    return apply(pull, name, (pull.operand(node, left, coords, common), scaled), common, fake(node).dtype)


def _power(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    base, exponent = args_of(node)
    dtype = fake(node).dtype
    if node.target is aten.pow.Scalar:
        if not base > 0:
            raise fail(node, f"{node.name} raises {base} to a power: only positive bases are computed", 4)
        return operation(pull, node, "pow", (base, exponent), coords) if dtype.is_floating_point else _no_power(node)
    if not isinstance(exponent, int | float):
        fixed = pull.operand(node, base, coords)
        if not (dtype.is_floating_point and isinstance(fixed, Const) and fixed.value > 0):
            return _no_power(node)
        return Op("pow", (pull.cast(fixed, dtype), pull.cast(pull.operand(node, exponent, coords), dtype)), dtype)
    x = pull.cast(pull.operand(node, base, coords), dtype)
    if float(exponent).is_integer() and 1 <= exponent <= _LARGEST_POWER:
        result = x
        for bit in bin(int(exponent))[3:]:
            result = Op("mul", (result, result), dtype)
            if bit == "1":
                result = Op("mul", (result, x), dtype)
        return result
    if not dtype.is_floating_point:
        return _no_power(node)
    by_name = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if exponent in by_name:
        return Op(by_name[float(exponent)], (x,), dtype)
    return Op("pow", (x, Const(float(exponent), dtype)), dtype)


def _no_power(node: fx.Node) -> Expr:
    raise fail(node, f"{node.name} is a power that is no product, of a base that is not known to be positive", 4)


def _whole(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """The next whole number down or up; integers are that themselves."""
    return _plain(pull, node, coords) if fake(node).dtype.is_floating_point else pull.operand(node, args_of(node)[0], coords)


def _gelu(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    kinds = {"none": "gelu_erf", "tanh": "gelu_tanh"}
    return operation(pull, node, kinds[argument(node, 1, "approximate", "none")], args_of(node)[:1], coords)


def _clamp(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    target, x = node.target, args_of(node)[0]
    low = argument(node, 1, "min") if target not in (aten.clamp_max.default, aten.clamp_max.Tensor) else None
    high = argument(node, 1 if target in (aten.clamp_max.default, aten.clamp_max.Tensor) else 2, "max")
    if target in (aten.clamp_min.default, aten.clamp_min.Tensor):
        high = None
    limits = [v for v in (low, high) if v is not None]
    common = common_dtype([_value(node, v) for v in (x, *limits)])
    result = pull.cast(pull.operand(node, x, coords, common), common)
    if low is not None:
        result = apply(pull, "maximum", (result, pull.operand(node, low, coords, common)), common, fake(node).dtype)
    if high is not None:
        result = apply(pull, "minimum", (result, pull.operand(node, high, coords, common)), common, fake(node).dtype)
    return result


def _where(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    if len(args_of(node)) != 3:
        raise fail(node, f"{node.name} finds the true entries, whose number is not fixed")
    condition, yes, no = args_of(node)
    common = common_dtype([_value(node, yes), _value(node, no)])
    values = [pull.cast(pull.operand(node, v, coords, common), common) for v in (yes, no)]
    return Op("where", (truth(pull, node, condition, coords), *values), fake(node).dtype)


def _masked_fill(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    x, mask, value = args_of(node)
    dtype = fake(node).dtype
    filled = pull.cast(pull.operand(node, value, coords, dtype), dtype)
    return Op("where", (truth(pull, node, mask, coords), filled, pull.operand(node, x, coords)), dtype)


def truth(pull: Puller, node: fx.Node, operand: Any, coords: Coords) -> Expr:
    """An operand as a bool: != 0."""
    value = pull.operand(node, operand, coords)
    return value if value.dtype == torch.bool else Op("ne", (value, pull.cast(Const(0, torch.int64), value.dtype)), torch.bool)


_LOGIC: dict[Any, str] = {
    aten.logical_and.default: "and",
    aten.logical_or.default: "or",
    aten.logical_xor.default: "xor",
    aten.logical_not.default: "not",
}


def _logic(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    return Op(_LOGIC[node.target], tuple(truth(pull, node, x, coords) for x in args_of(node)), torch.bool)


def _to(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    source = args_of(node)[0]
    value, result = fake(source), fake(node)
    if value.device != result.device:
        raise fail(node, f"{node.name} moves {source.name} from {value.device} to {result.device}")
    x = pull.at(source, coords)
    return x if value.dtype == result.dtype else Op("cast", (x,), result.dtype)


def _arange(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    if node.target is aten.arange.default:
        start, step = 0, 1
    else:
        start = argument(node, 0, "start")
        step = argument(node, 2, "step", 1) if node.target is aten.arange.start_step else 1
    if not all(isinstance(v, int | torch.SymInt) for v in (start, step)) or isinstance(argument(node, 0, "end"), float):
        raise fail(node, f"{node.name} counts in steps that are no integers", 4)
    dtype = fake(node).dtype
    index = Index(size_of(start) + size_of(step) * (coords[0] if coords else 0))
    return index if dtype == torch.int64 else Op("cast", (index,), dtype)


_FILLS: dict[Any, int] = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
_FULLS: dict[Any, int] = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}


def _constant(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    dtype = fake(node).dtype
    value = _FILLS[node.target] if node.target in _FILLS else argument(node, _FULLS[node.target], "fill_value")
    if isinstance(value, torch.SymInt):
        index = Index(size_of(value))
        return index if dtype == torch.int64 else Op("cast", (index,), dtype)
    if not isinstance(value, bool | int | float) or (not dtype.is_floating_point and isinstance(value, float) and not math.isfinite(value)):
        raise fail(node, f"{node.name} is filled with {value!r}", 4)
    return pull.cast(Const(value, torch.float32 if isinstance(value, float) else torch.int64), dtype)


def _triangle(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    diagonal = size_of(argument(node, 1, "diagonal", 0))
    row, column = coords[-2:]
    dtype = fake(node).dtype
    keep = sympy.Le(column, row + diagonal, evaluate=False)
    if node.target is aten.triu.default:
        keep = sympy.Le(row + diagonal, column, evaluate=False)
    if keep.free_symbols & pull.gathers.keys():
        raise fail(node, f"{node.name} is read at a gathered index", 5)
    return Op("where", (Test(keep), pull.at(args_of(node)[0], coords), pull.cast(Const(0, torch.int64), dtype)), dtype)


ELEMENTWISE: dict[Any, Handler] = {
    **dict.fromkeys(BY_OVERLOAD, _plain),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor), _sum),
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    **dict.fromkeys((aten.floor.default, aten.ceil.default), _whole),
    aten.gelu.default: _gelu,
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_max.default, aten.clamp_max.Tensor), _clamp),
    **dict.fromkeys((aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar), _where),
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    **dict.fromkeys(_LOGIC, _logic),
    aten._to_copy.default: _to,
    torch.ops.prims.convert_element_type.default: _to,
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((*_FILLS, *_FULLS), _constant),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
}
