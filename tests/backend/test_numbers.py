"""Numbers of the kinds in which compilers are reported to be wrong (NaN, infinities, roundings, ranks of 0): each is eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([NAN, INF, -INF, 1.0, 0.0, -0.0])


def seeded(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def times_zero(x):
    return x * 0, x * torch.zeros(6), 0 * x + 1, x - x


def terms_with_a_factor_of_zero(x, a, b):
    return torch.addmm(x, a, b, beta=0), torch.addmm(x, a, b, beta=0.0, alpha=2.0), torch.addmm(a, x.expand(1, 4), b, alpha=0)


def rounded_between(x, w):
    y = (x @ w).to(torch.bfloat16) + w[0]
    return y, x.to(torch.bfloat16).to(torch.float32) * 3, x.half().float() - 1


def one_number(x):
    return x.sum().flip(0), x[0, 0].flip(-1) * 2, x.sum().flip(0).expand(3)


def attention_scaled_by_infinity(q, k):
    return ((q @ k.mT) / 0.0).softmax(-1) @ k, ((q / 0.0) @ k.mT).softmax(-1) @ k


def sums_of_constants(x):
    half = torch.full((4,), 0.5, dtype=torch.bfloat16)
    return (
        half.cumsum(0, dtype=torch.float32),
        torch.ones(3, 4).cumsum(0),
        torch.ones(4, dtype=torch.int32).cumsum(0, dtype=torch.int64) * x,
    )


def attention_of_no_numbers(q, k):
    return (q @ k.mT * 0.3).softmax(-1) @ k


def places_times_a_number(x):
    return torch.arange(16) * 10**9, x + torch.arange(16) * 3 * 10**8, torch.arange(16, dtype=torch.int32) * 10**9


def products_of_integers(a, b):
    return a @ b, torch.bmm(a, b) * 100, a.int() @ b.int()


def powers_of_two(x, exponent):
    half = x.bfloat16()
    return torch.ldexp(x, exponent), torch.ldexp(half, exponent), torch.ldexp(exponent, half), torch.ldexp(x.half(), exponent * x)


CASES: list[tuple[Callable[..., Any], list[Tensor]]] = [
    (times_zero, [SPECIAL]),
    (terms_with_a_factor_of_zero, [torch.full((4,), NAN), seeded(1, 4), seeded(4, 4)]),
    (rounded_between, [seeded(5, 32), seeded(32, 17)]),
    (one_number, [seeded(3, 4)]),
    (places_times_a_number, [seeded(16)]),
    (products_of_integers, [torch.ones(1, 1, 2, dtype=torch.int8), torch.full((1, 2, 3), 70, dtype=torch.int8)]),
    (powers_of_two, [seeded(4), torch.arange(-1, 3)]),
    (sums_of_constants, [seeded(4)]),
    (attention_of_no_numbers, [torch.cat([seeded(1, 2, 3, 4), torch.full((1, 2, 1, 4), NAN)], 2), seeded(1, 2, 5, 4)]),
    (attention_scaled_by_infinity, [seeded(1, 2, 3, 4), seeded(1, 2, 5, 4)]),
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("executor", ["reference", "auto"])
@pytest.mark.parametrize("function, inputs", CASES)
def test_numbers_are_eagers(function, inputs, executor, dynamic):
    if executor == "auto" and function in (rounded_between, one_number) and torch.__version__ < "2.13":
        pytest.skip("Inductor itself, before torch 2.13, leaves out casts on a CPU and does not compile a flip of one number")
    with torch.no_grad():
        got = torch.compile(function, backend="dsi", dynamic=dynamic, options={"executor": executor})(*copy.deepcopy(inputs))
        torch.testing.assert_close(got, function(*inputs), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_places_in_half_precision_are_rounded_integers(dtype, recwarn):
    def places(x):
        return (torch.arange(5000) * 3 + 1).to(dtype) * x, (torch.arange(9)[:, None] - torch.arange(5000)).to(dtype) + x

    x = torch.full((5000,), 2.0, dtype=dtype)
    with torch.no_grad():
        got = torch.compile(places, backend="dsi")(x)
    assert all(torch.equal(one, other) for one, other in zip(got, places(x), strict=True))
    assert not any("slowly" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("before", [False, True])
def test_a_derivative_of_zeros_has_no_memory_to_be_read(before):
    x = torch.ones(3, requires_grad=True)
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert zeros._is_zerotensor()
    compiled = torch.compile(lambda x: x[-1] + 10, backend="dsi")
    if before:
        assert compiled(torch.ones(3)) == 11
    assert compiled(zeros) == 10
