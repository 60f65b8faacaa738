"""The table of pointwise operations: what an `Op` of a tile expression may be, and which ATen operators stand for it.

One name, one meaning. Whatever ATen spells in several ways (`alpha`, scalar variants, `masked_fill`, powers) is brought to these names
when a plan is made (ir/pull.py), so that a printer of kernels only needs this table. Arithmetic on floats is fp32; integers and bools are
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .ops import ACTIVATIONS

aten = torch.ops.aten


@dataclass(frozen=True)
class Pointwise:
    """One operation: its ATen overloads with plain positional meaning, its torch function (for evaluation), its arity, and the kind of
    its result: "same" as its common operand type, "float" (integers are converted first), or "bool"."""

    overloads: tuple[torch._ops.OpOverload, ...]
    function: Callable[..., torch.Tensor]
    arity: int
    result: str = "same"


def _square(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) * F.relu(x)


POINTWISE: dict[str, Pointwise] = {
    # Arithmetic. `alpha` of add and sub is an explicit mul; integer powers are muls.
    "add": Pointwise((aten.add.Tensor, aten.add.Scalar), torch.add, 2),
    "sub": Pointwise((aten.sub.Tensor, aten.sub.Scalar), torch.sub, 2),
    "mul": Pointwise((aten.mul.Tensor, aten.mul.Scalar), torch.mul, 2),
    "div": Pointwise((aten.div.Tensor, aten.div.Scalar), torch.div, 2, "float"),
    "neg": Pointwise((aten.neg.default,), torch.neg, 1),
    "abs": Pointwise((aten.abs.default,), torch.abs, 1),
    "floor": Pointwise((aten.floor.default,), torch.floor, 1),
    "ceil": Pointwise((aten.ceil.default,), torch.ceil, 1),
    "reciprocal": Pointwise((aten.reciprocal.default,), torch.reciprocal, 1, "float"),
    "maximum": Pointwise((aten.maximum.default,), torch.maximum, 2),
    "minimum": Pointwise((aten.minimum.default,), torch.minimum, 2),
    # Functions of floats. "pow" has a float base >= 0 or a scalar exponent that is no small integer.
    "pow": Pointwise((), torch.pow, 2, "float"),
    "sqrt": Pointwise((aten.sqrt.default,), torch.sqrt, 1, "float"),
    "rsqrt": Pointwise((aten.rsqrt.default,), torch.rsqrt, 1, "float"),
    "exp": Pointwise((aten.exp.default,), torch.exp, 1, "float"),
    "log": Pointwise((aten.log.default,), torch.log, 1, "float"),
    "tanh": Pointwise((aten.tanh.default,), torch.tanh, 1, "float"),
    "sigmoid": Pointwise((aten.sigmoid.default,), torch.sigmoid, 1, "float"),
    "erf": Pointwise((aten.erf.default,), torch.erf, 1, "float"),
    "sin": Pointwise((aten.sin.default,), torch.sin, 1, "float"),
    "cos": Pointwise((aten.cos.default,), torch.cos, 1, "float"),
    # Activations, as in `ir.ops.ACTIVATIONS` ("tanh" is above).
    "gelu_erf": Pointwise((), F.gelu, 1, "float"),
    "gelu_tanh": Pointwise((), ACTIVATIONS["gelu_tanh"], 1, "float"),
    "gelu_quick": Pointwise((), ACTIVATIONS["gelu_quick"], 1, "float"),
    "silu": Pointwise((aten.silu.default,), F.silu, 1, "float"),
    "relu": Pointwise((aten.relu.default,), F.relu, 1),
    "relu_squared": Pointwise((), _square, 1, "float"),
    # Comparison.
    "eq": Pointwise((aten.eq.Tensor, aten.eq.Scalar), torch.eq, 2, "bool"),
    "ne": Pointwise((aten.ne.Tensor, aten.ne.Scalar), torch.ne, 2, "bool"),
    "lt": Pointwise((aten.lt.Tensor, aten.lt.Scalar), torch.lt, 2, "bool"),
    "le": Pointwise((aten.le.Tensor, aten.le.Scalar), torch.le, 2, "bool"),
    "gt": Pointwise((aten.gt.Tensor, aten.gt.Scalar), torch.gt, 2, "bool"),
    "ge": Pointwise((aten.ge.Tensor, aten.ge.Scalar), torch.ge, 2, "bool"),
    # Bits: on bools the logical operations (logical_and of numbers is "and" of "ne" 0).
    "and": Pointwise((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.__and__.Tensor, aten.__and__.Scalar), torch.bitwise_and, 2),
    "or": Pointwise((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.__or__.Tensor, aten.__or__.Scalar), torch.bitwise_or, 2),
    "xor": Pointwise((aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.__xor__.Tensor, aten.__xor__.Scalar), torch.bitwise_xor, 2),
    "not": Pointwise((aten.bitwise_not.default,), torch.bitwise_not, 1),
    # Selection and conversion. "cast" takes its target from `Op.dtype`.
    "where": Pointwise((), torch.where, 3),
    "cast": Pointwise((), lambda x: x, 1),
}

BY_OVERLOAD: dict[Any, str] = {overload: name for name, entry in POINTWISE.items() for overload in entry.overloads}


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 1 if not dtype.is_floating_point else 2


def common_dtype(operands: Sequence[torch.Tensor | bool | int | float]) -> torch.dtype:
    """The type in which torch computes on these operands: tensors with dimensions first, then 0-d tensors, then Python numbers of a
    higher kind."""
    groups: tuple[list[torch.dtype], list[torch.dtype], list[torch.dtype]] = ([], [], [])
    for x in operands:
        if isinstance(x, torch.Tensor):
            groups[0 if x.dim() else 1].append(x.dtype)
        elif isinstance(x, bool):
            groups[2].append(torch.bool)
        elif isinstance(x, float):
            groups[2].append(torch.get_default_dtype())
        else:
            groups[2].append(torch.int64)
    result: torch.dtype | None = None
    for group in groups:
        best: torch.dtype | None = None
        for dtype in group:
            best = dtype if best is None else torch.promote_types(best, dtype)
        if best is not None and (result is None or _category(best) > _category(result)):
            result = best
    assert result is not None, "an operation without operands"
    return result
