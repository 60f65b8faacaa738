"""Every pointwise operator that has a place in the table means what torch means, in every dtype that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dsi.ir.analysis import evaluate_plan, plan_region
from dsi.ir.errors import Refused
from dsi.ir.ops import ACTIVATIONS
from dsi.ir.pointwise import POINTWISE, common_dtype
from dsi.ir.tile import Op, RowPlan, parts_of

from .bodies import body_of, check, dsi

aten = torch.ops.aten


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 2


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(-5, 6, shape).to(dtype)


def bools(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "reciprocal": torch.reciprocal,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "relu": F.relu,
    "square": lambda x: x**2,
    "cube": lambda x: x.pow(3),
    "seventh power": lambda x: x**7,
    "rsub": lambda x: 3 - x,
    "alpha": lambda x: torch.add(x, x, alpha=3),
    "alpha of sub": lambda x: torch.sub(x, 1, alpha=2),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "clamp_max": lambda x: aten.clamp_max.default(x, 1),
    "true division": lambda x: x / 3,
    "compare with float": lambda x: x > 0.5,
    "compare with int": lambda x: x == 1,
    "not": torch.logical_not,
    "fill": lambda x: x.masked_fill(x > 0, 7),
    "where": lambda x: torch.where(x > 1, x, 0),
    "to half": lambda x: x.to(torch.float16),
    "to bool": lambda x: x.bool(),
    "to int": lambda x: (x * 3).to(torch.int32),
    "zeros": lambda x: x + torch.zeros_like(x),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: x.triu(1),
    "scalar pow": lambda x: 2.0**x,
}


def defined(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    """Whether torch has the operation for such operands."""
    try:
        function(*inputs)
    except RuntimeError:
        return False
    return True


KINDS = {"float32": floats(3, 5), "int64": ints(3, 5), "int32": ints(3, 5, dtype=torch.int32)}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, f in UNARY.items() for k, x in KINDS.items() if defined(f, x)])
def test_unary_and_scalar_forms(name: str, kind: str) -> None:
    x = KINDS[kind]
    expected = UNARY[name](x)
    assert expected.shape == x.shape
    check(UNARY[name], (x,), tolerance=1e-3 if expected.dtype == torch.float16 else 2e-5)


SPELLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus of another slope": lambda x: F.softplus(x, beta=3, threshold=2),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "leaky_relu": F.leaky_relu,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "threshold": lambda x: F.threshold(x, 0.5, -3.0),
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "log10": torch.log10,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLED)
def test_activations_that_are_spelled_out(name: str, dtype: torch.dtype) -> None:
    """Small values are as exact as large ones; large ones do not overflow on the way."""
    x = torch.cat([torch.logspace(-9, 4, 40), -torch.logspace(-9, 4, 40), torch.tensor([0.0, float("inf"), float("-inf"), -88.0, 88.0])])
    body = body_of(SPELLED[name], (x.to(dtype),))
    (actual,) = evaluate_plan(plan_region(body), (x.to(dtype),), {})
    expected = SPELLED[name](x.to(dtype).double()).float().double()
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6 if dtype == torch.float32 else 5e-3, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_gated_linear_units(dim: int) -> None:
    check(lambda x: F.glu(x, dim), (floats(4, 6, 8),))
    check(lambda x, w: F.glu(dsi.linear(x, w), -1), (floats(4, 6), floats(10, 6)))


def test_a_slope_a_channel() -> None:
    check(lambda x, w: F.prelu(x, w), (floats(4, 5, 6), floats(5)))


def test_activations_of_integers_are_left() -> None:
    with pytest.raises(Refused, match=r"of torch\.int64"):
        plan_region(body_of(lambda x: F.hardtanh(x, -2, 2), (ints(3, 5),)))


FLOAT_ONLY = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "power of one and a half": lambda x: x.abs() ** 1.5,
    "square root as power": lambda x: x.abs() ** 0.5,
    "inverse square root as power": lambda x: (x.abs() + 1) ** -0.5,
    "inverse as power": lambda x: x**-1,
    "infinite fill": lambda x: x.masked_fill(x < 0, float("-inf")),
    "least value": lambda x: x.masked_fill(x < 0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("name", FLOAT_ONLY)
def test_functions_of_floats(name: str) -> None:
    check(FLOAT_ONLY[name], (floats(3, 5),))


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "where": lambda x, y: torch.where(x > y, x, y),
}
OPERANDS = {
    "floats": (floats(3, 5), floats(3, 5)),
    "ints": (ints(3, 5), ints(3, 5)),
    "bools": (bools(3, 5), bools(3, 5)),
    "int and float": (ints(3, 5), floats(3, 5)),
    "bool and float": (bools(3, 5), floats(5)),
    "bool and int": (bools(3, 5), ints(3, 1)),
    "int32 and int64": (ints(3, 5, dtype=torch.int32), ints(3, 5)),
    "int and a 0-d float": (ints(3, 5), torch.tensor(0.75)),
    "half and a 0-d float": (floats(3, 5).half(), torch.tensor(0.75)),
    "uint8 and int8": (ints(3, 5).abs().to(torch.uint8), ints(3, 5, dtype=torch.int8)),
    "half and bfloat16": (floats(3, 5).half(), floats(3, 5).bfloat16()),
}


@pytest.mark.parametrize(("name", "operands"), [(n, k) for n, f in BINARY.items() for k, x in OPERANDS.items() if defined(f, *x)])
def test_binary_operations_promote_as_torch_does(name: str, operands: str) -> None:
    inputs = OPERANDS[operands]
    expected = BINARY[name](*inputs)
    check(BINARY[name], inputs, tolerance=2e-3 if expected.dtype == torch.float16 else 2e-5)


@pytest.mark.parametrize("powers", [torch.arange(1, 6), torch.arange(1, 6, dtype=torch.int32), floats(3, 5)])
def test_powers_of_a_constant(powers: torch.Tensor) -> None:
    check(lambda p: torch.pow(torch.full((), 0.25), p), (powers,))
    check(lambda p: torch.pow(torch.full((1,), 0.25), p), (powers,))


def test_int_overflow_wraps_in_its_own_type() -> None:
    check(lambda x: x * x, (torch.tensor([[100000, -70000, 3]], dtype=torch.int32),))
    check(lambda x: x + x, (torch.tensor([[100, -100, 3]], dtype=torch.int8),))


def test_a_cast_rounds() -> None:
    x = torch.tensor([[1.0002441, 2049.0, -3.3]])
    plan = check(lambda x: x.half().float() - x, (x,), tolerance=0.0)
    assert any(isinstance(p, Op) and p.name == "cast" for p in parts_of(plan.stores[0].value))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    check(lambda x: dsi.activation(x, kind), (floats(3, 5),))
    check(lambda x, y: dsi.gated(x, y, kind), (floats(3, 5), floats(3, 5)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(5) + x,
        lambda x: torch.arange(2, 12, 2) * x,
        lambda x: torch.arange(5, dtype=torch.float32) * x,
        lambda x: torch.full((3, 5), 2.5) + x,
        lambda x: torch.ones(3, 5, dtype=torch.int64) + x,
        lambda x: torch.scalar_tensor(3.0) * x,
    ],
)
def test_values_made_of_nothing(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check(function, (floats(3, 5),))
    check(function, (ints(3, 5),))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "floor division": (lambda x: torch.div(x, 2, rounding_mode="floor"), "neither a view nor pointwise"),
    "cumsum": (lambda x: x.cumsum(0), "neither a view nor pointwise"),
    "a negative base": (lambda x: (-2.0) ** x, "only positive bases"),
    "a computed exponent": (lambda x: x**x, "not known to be positive"),
    "random": (lambda x: torch.rand_like(x) + x, "neither a view nor pointwise"),
    "float steps": (lambda x: torch.arange(0, 2.5, 0.5) + x, "no integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(Refused, match=reason):
        plan_region(body_of(function, (floats(3, 5),)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_common_dtype_is_torchs(dtype: torch.dtype) -> None:
    other: list[Any] = [torch.ones(2, dtype=d) for d in (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32)]
    other += [torch.ones((), dtype=d) for d in (torch.int64, torch.float16, torch.float32)] + [True, 3, 2.5]
    for x in (torch.ones(2, dtype=dtype), torch.ones((), dtype=dtype)):
        for y in other:
            assert common_dtype([x, y]) == torch.result_type(x, y), f"{x.dtype} {x.dim()}-d with {y!r}"


def test_no_overload_has_two_names() -> None:
    overloads = [o for entry in POINTWISE.values() for o in entry.overloads]
    assert len(overloads) == len(set(overloads))


def test_plans_only_use_names_of_the_table() -> None:
    body = body_of(lambda x, y: (torch.where(x > 0, x.clamp(0, 1), y**3).half(), dsi.gated(x, y, "silu")), (floats(3, 5), floats(3, 5)))
    plan = plan_region(body)
    assert isinstance(plan, RowPlan)
    for store in plan.stores:
        for part in parts_of(store.value):
            if isinstance(part, Op):
                assert part.name in POINTWISE and len(part.args) == POINTWISE[part.name].arity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_rounded_before_they_are_compared_with(dtype: torch.dtype) -> None:
    x = torch.tensor([3.14, 0.1, 1.0]).to(dtype)
    check(lambda x: (x == 3.14, x > 0.1, x >= 0.1, x != 0.1), [x])


def test_numbers_are_not_rounded_before_they_are_added() -> None:
    x = torch.randn(64).bfloat16()
    check(lambda x: x * 0.1, [x])
