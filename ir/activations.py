"""ATen's activations and functions that ir/pointwise.py has no name for, at one point: spelled out in the operations that it has.

Where torch takes care of small values (log1p, expm1) the spelling does: rounding of 1 + u is divided out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .index_map import size_of
from .pull import Coords, Handler, Puller, args_of, fail, fake
from .tile import Const, Expr, Op
from .views import argument

aten = torch.ops.aten
F32 = torch.float32
_POWER_ALONE = 20.0  # from here on exp(x) - 1 is exact but for rounding
_SUM_ALONE = 1e10  # from here on 1 + u is u in fp32
_MISH_LINEAR = 20.0  # from here on mish(x) is x in fp32, and exp(x)² does not overflow before


def _op(name: str, *args: Expr | float) -> Op:
    return Op(name, tuple(Const(float(a), F32) if isinstance(a, int | float) else a for a in args), F32)


def _where(condition: str, x: Expr, bound: float, yes: Expr | float, no: Expr | float) -> Op:
    """`yes` where `x` compares with `bound` as `condition` says, else `no`."""
    test = Op(condition, (x, Const(float(bound), F32)), torch.bool)
    return Op("where", (test, *(Const(float(a), F32) if isinstance(a, int | float) else a for a in (yes, no))), F32)


def log1p(u: Expr) -> Op:
    """log(1 + u) of a finite u > -1."""
    whole = _op("add", u, 1.0)
    return _where("eq", whole, 1.0, u, _op("mul", _op("log", whole), _op("div", u, _op("sub", whole, 1.0))))


def expm1(x: Expr) -> Op:
    """exp(x) - 1 of an x <= 0."""
    power = _op("exp", x)
    less = _op("sub", power, 1.0)
    exact = _op("div", _op("mul", less, x), _op("log", power))
    return _where("eq", power, 1.0, x, _where("eq", less, -1.0, -1.0, exact))


def expm1_anywhere(x: Expr) -> Op:
    """exp(x) - 1."""
    return _where("gt", x, _POWER_ALONE, _op("sub", _op("exp", x), 1.0), expm1(_op("minimum", x, _POWER_ALONE)))


def log1p_anywhere(u: Expr) -> Op:
    """log(1 + u), of an infinite u too."""
    return _where("gt", u, _SUM_ALONE, _op("log", u), log1p(u))


def softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Op:
    """log(1 + exp(beta · x)) / beta, and x itself where beta · x is beyond the threshold."""
    scaled = _op("mul", x, beta)
    power = _op("exp", _op("minimum", scaled, min(threshold, 80.0)))
    return _where("gt", scaled, threshold, x, _op("div", log1p(power), beta))


def mish(x: Expr) -> Op:
    """x · tanh(log(1 + exp(x))), as a ratio of polynomials of exp(x)."""
    power = _op("exp", _op("minimum", x, _MISH_LINEAR))
    part = _op("mul", power, _op("add", power, 2.0))
    return _where("gt", x, _MISH_LINEAR, x, _op("mul", x, _op("div", part, _op("add", part, 2.0))))


def elu(x: Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Op:
    """scale · x above 0, scale · alpha · (exp(input_scale · x) - 1) below."""
    below = expm1(_op("mul", _op("minimum", x, 0.0), input_scale))
    return _where("gt", x, 0.0, _op("mul", x, scale), _op("mul", below, alpha * scale))


def clamp(x: Expr, low: float, high: float) -> Op:
    """x between two numbers."""
    return _op("minimum", _op("maximum", x, low), high)


_SPELLED: dict[Any, Callable[..., Op]] = {
    aten.mish.default: mish,
    aten.softplus.default: softplus,
    aten.elu.default: elu,
    aten.celu.default: lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    aten.leaky_relu.default: lambda x, slope=0.01: _where("gt", x, 0.0, x, _op("mul", x, slope)),
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: clamp(x, low, high),
    aten.hardsigmoid.default: lambda x: _op("div", clamp(_op("add", x, 3.0), 0.0, 6.0), 6.0),
    aten.hardswish.default: lambda x: _op("div", _op("mul", x, clamp(_op("add", x, 3.0), 0.0, 6.0)), 6.0),
    aten.expm1.default: expm1_anywhere,
    aten.log1p.default: log1p_anywhere,
    aten.exp2.default: lambda x: _op("pow", 2.0, x),
    aten.log2.default: lambda x: _op("mul", _op("log", x), 1 / math.log(2)),
    aten.log10.default: lambda x: _op("mul", _op("log", x), 1 / math.log(10)),
    aten.threshold.default: lambda x, threshold, value: _where("le", x, threshold, value, x),
}


def _spelled(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    dtype = fake(node).dtype
    x, *numbers = args_of(node)
    if not dtype.is_floating_point or node.kwargs or not all(isinstance(n, int | float) for n in numbers):
        raise fail(node, f"{node.name} is {node.target} of {dtype} with {numbers or dict(node.kwargs)}, not of a float with numbers", 4)
    result = _SPELLED[node.target](pull.operand(node, x, coords), *numbers)
    return Op(result.name, result.args, dtype)


def _prelu(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    x, slope = (pull.operand(node, a, coords) for a in args_of(node)[:2])
    result = _where("gt", x, 0.0, x, _op("mul", x, slope))
    return Op(result.name, result.args, fake(node).dtype)


def _glu(pull: Puller, node: fx.Node, coords: Coords) -> Expr:
    """The first half along a dimension times the sigmoid of the second."""
    source = args_of(node)[0]
    rank, dim = fake(source).dim(), argument(node, 1, "dim", -1)
    dim = dim + rank if dim < 0 else dim
    half = size_of(fake(node).shape[dim])
    gate = pull.at(source, (*coords[:dim], coords[dim] + half, *coords[dim + 1 :]))
    return Op("mul", (pull.at(source, coords), _op("sigmoid", gate)), fake(node).dtype)


ACTIVATIONS_OF_ATEN: dict[Any, Handler] = {
    **dict.fromkeys(_SPELLED, _spelled),
    aten._prelu_kernel.default: _prelu,
    aten.glu.default: _glu,
}
