"""Activations as two int8 digits: the stated bound holds, with outliers too."""

import torch
from dsi.ir.ops import REGISTRY
from dsi.quantize import digits
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(
    k=st.sampled_from([1, 7, 64, 300]),
    seed=st.integers(0, 999),
    outlier=st.sampled_from([1.0, 100.0, 1e6]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_is_off_by_less_than_two_to_the_minus_15_of_its_largest_entry(k, seed, outlier, scale, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, k, generator=generator)
    x[:, seed % k] *= outlier
    x[0] = 0
    x = (x * scale).to(dtype)
    found = digits.split(x)
    assert found.high.dtype == found.low.dtype == torch.int8
    top = x.double().abs().amax(-1, keepdim=True)
    error = (found.value() - x.double()).abs()
    assert (error <= found.step.double() / 2 * (1 + 2.0**-8)).all() and (error <= top * digits.BOUND).all()
    assert (found.value()[0] == 0).all() and (found.high.int().abs() <= 127).all()


def test_every_value_has_its_digits():
    value = torch.arange(-digits.TOP, digits.TOP + 1).float()
    found = digits.split(value[None])
    assert found.step.item() == 1 and torch.equal(found.value()[0], value.double())


def test_a_row_that_is_not_finite_gives_no_finite_numbers():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [1.0, 2.0]])
    weight = quantise(torch.randn(4, 2))
    assert digits.linear(x, *weight[:2]).isfinite().all(-1).tolist() == [False, False, True]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    outlier=st.sampled_from([1.0, 300.0]),
    grouping=st.sampled_from([Grouping(), Grouping("inner", 32), Grouping("flat", 4)]),
    kn=st.booleans(),
    bias=st.booleans(),
)
def test_a_linear_by_digits_is_within_its_bound(seed, outlier, grouping, kn, bias):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(3, 80, generator=generator), quantise(torch.randn(24, 80, generator=generator), Format(grouping))
    x[:, 11] *= outlier
    stored = weight.weight.t().contiguous() if kn else weight.weight
    added = torch.randn(24, generator=generator) if bias else None
    given_ = dict(kn=kn, group=weight.group)
    expected = REGISTRY["linear_int8"].reference(x.double(), stored, weight.scales, None if added is None else added.double(), **given_)
    found = digits.linear(x, stored, weight.scales, added, **given_)
    bound = x.abs().amax(-1, keepdim=True) * digits.BOUND * weight.dequantise().abs().sum(1)
    assert ((found.double() - expected).abs() <= bound + expected.abs() * 2.0**-23).all()


def test_outliers_that_ruin_int8_activations_do_not_ruin_digits():
    ordinary, weight = torch.randn(4, 256), quantise(torch.randn(16, 256))
    ordinary[:, 3] = 0
    x = ordinary.clone()
    x[:, 3] = 1000
    rest = (ordinary.double() @ weight.dequantise(torch.float64).T).norm()
    exact = x.double() @ weight.dequantise(torch.float64).T
    by_digits = digits.linear(x, *weight[:2])
    by_one = torch.ops.dsi.linear_int8(x, *weight[:2], activations="int8")
    assert (by_digits - exact).norm() < 0.05 * rest < 0.5 * rest < (by_one - exact).norm()
