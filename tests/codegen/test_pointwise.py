"""Every operation of the pointwise table has a Triton form that computes what torch computes, hot values included."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.pointwise import POINTWISE

from .support import Case, cast, check, const, op

R, C = t.R, t.C
HOT = [0.0, -0.0, 1.0, -1.0, 0.15, -0.15, 1e-4, -1e-4, 3.3, -3.3, 30.0, -30.0, 90.0, -90.0]


def case_of(name: str, tensors: list[torch.Tensor], result: torch.dtype, expected: torch.Tensor) -> Case:
    case = Case(name, torch.float32)
    loads = [case.load(case.input(f"x{i}", x.shape, x.dtype, values=x), R, C) for i, x in enumerate(tensors)]
    out = case.output("out", expected.shape, expected, dtype=result)
    store = t.Store(out, (R, C), t.Op(name, tuple(loads), result), result)
    return case.finish(t.RowPlan(sympy.Integer(expected.shape[0]), sympy.Integer(expected.shape[1]), (store,)))


def floats(name: str) -> torch.Tensor:
    x = torch.cat([torch.tensor(HOT), torch.randn(19) * 3]).view(3, 11)
    return x.abs() + 1e-3 if name in ("sqrt", "rsqrt", "log", "pow") else x


@pytest.mark.parametrize("name", [n for n in POINTWISE if n not in ("where", "cast", "not", "and", "or", "xor")])
def test_on_floats(interpreter, name):
    entry = POINTWISE[name]
    x = floats(name)
    tensors = [x, torch.randn(3, 11)][: entry.arity]
    if name in ("eq", "le", "ge", "ne"):
        tensors[1][0] = x[0]
    expected = entry.function(*(v.double() for v in tensors))
    check(case_of(name, tensors, torch.bool if entry.result == "bool" else torch.float32, expected), interpreter)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "silu", "gelu_tanh", "gelu_erf", "relu", "abs", "maximum", "minimum"])
def test_nan_and_infinities(interpreter, name):
    entry = POINTWISE[name]
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0]])
    if name in ("silu", "gelu_tanh", "gelu_erf"):
        x[0, 2] = -200.0  # -inf * 0 is NaN or 0, as one writes it
    tensors = [x, torch.tensor([[1.0, 2.0, 3.0, float("nan")]])][: entry.arity]
    # In fp64: gelu of infinity is NaN in the fp32 of some builds of torch.
    check(case_of(name, tensors, torch.float32, entry.function(*(v.double() for v in tensors))), interpreter)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "lt", "ge"])
def test_integers_are_exact(interpreter, name):
    entry = POINTWISE[name]
    x, y = torch.tensor([[2**40 + 1, -7, 12, 2**33]]), torch.tensor([[2**40, 5, 12, -(2**33) - 1]])
    if name == "mul":
        y = torch.tensor([[3, 5, -(2**31), 7]])
    check(case_of(name, [x, y], torch.bool if entry.result == "bool" else torch.int64, entry.function(x, y)), interpreter)


@pytest.mark.parametrize("name", ["and", "or", "xor", "not"])
def test_bools(interpreter, name):
    entry = POINTWISE[name]
    tensors = [torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]])][: entry.arity]
    check(case_of(name, tensors, torch.bool, entry.function(*tensors)), interpreter)


def test_integers_enter_functions_of_floats(interpreter):
    x = torch.tensor([[1, 4, 9, 16]])
    check(case_of("rsqrt", [x], torch.float32, x.double().rsqrt()), interpreter)
    check(case_of("div", [x, torch.tensor([[3, 3, 2, 7]])], torch.float32, x / torch.tensor([[3.0, 3, 2, 7]])), interpreter)


def test_not_flips_the_bits_of_integers(interpreter):
    x = torch.tensor([[0, -1, 5, 2**40]])
    check(case_of("not", [x], torch.int64, ~x), interpreter)


@pytest.mark.parametrize("exponent", [3.0, 4.0, -1.5, 0.0, 7.0])
def test_pow_of_a_constant_exponent(interpreter, exponent):
    x = torch.tensor([[-2.0, -0.5, 0.0, 0.7, 3.0]])
    case = Case("pow", torch.float32)
    value = op("pow", case.load(case.input("x", x.shape, values=x), R, C), const(exponent))
    out = case.output("out", x.shape, x.double() ** exponent)
    check(case.finish(t.RowPlan(sympy.Integer(1), sympy.Integer(5), (t.Store(out, (R, C), value, torch.float32),))), interpreter)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_casts(interpreter, source, target):
    x = torch.tensor([[0.0, 1.0, -2.7, 3.999, 1.00390625]]).to(source)
    expected = x.to(target)
    case = Case("cast", torch.float32)
    loaded = case.load(case.input("x", x.shape, source, values=x), R, C)
    # Stored as fp32, so that a rounding left out would show.
    wide = torch.float32 if target.is_floating_point else target
    out = case.output("out", x.shape, expected, dtype=wide)
    store = t.Store(out, (R, C), cast(loaded, target), wide)
    check(case.finish(t.RowPlan(sympy.Integer(1), sympy.Integer(5), (store,))), interpreter)


def test_where_reads_only_the_branch_that_a_point_lies_in(interpreter):
    case = Case("shift", torch.float32)
    x = case.input("x", (2, 4))
    value = op("where", t.Test(C >= 1), case.load(x, R, C - 1), const(math.inf))
    out = case.output("out", (2, 5), torch.cat([torch.full((2, 1), math.inf), case.inputs[x]], 1))
    case.finish(t.RowPlan(sympy.Integer(2), sympy.Integer(5), (t.Store(out, (R, C), value, torch.float32),)))
    from dsi.codegen import generate

    (kernel,) = generate(case.spec)
    (line,) = (line for line in kernel.source.splitlines() if "tl.load(x_ptr" in line)
    assert "c >= 1" in line or "c[None, :] >= 1" in line, f"the load is not masked where it would lie before the tensor: {line}"
    check(case, interpreter)


@pytest.mark.parametrize(
    "outer, expected", [("mul", lambda both, z: both * z), ("add", lambda both, z: both + z), ("sub", lambda both, z: z - both)]
)
def test_bits_are_taken_before_arithmetic(interpreter, outer, expected):
    x, y, z = (torch.randint(0, 99, (1, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    case = Case("bits", torch.float32)
    a, b, c = (case.load(case.input(name, v.shape, v.dtype, values=v), R, C) for name, v in (("x", x), ("y", y), ("z", z)))
    both = t.Op("and", (a, b), torch.int64)
    value = t.Op(outer, (c, both) if outer == "sub" else (both, c), torch.int64)
    out = case.output("out", x.shape, expected(x & y, z), dtype=torch.int64)
    check(case.finish(t.RowPlan(sympy.Integer(1), sympy.Integer(8), (t.Store(out, (R, C), value, torch.int64),))), interpreter)
