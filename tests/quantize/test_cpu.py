"""int8 linears on the CPU: every form that rows, dtypes and groups lead to computes what the reference does."""

import pytest
import torch
from dsi.ir.quantised_ops import linear_int8_reference
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.runtime import cpu_int8
from dsi.runtime.cpu_int8 import linear_int8
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import dsi

DTYPES = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("activations", ["", "int8"])
def test_every_form(integers, dtype, group, activations, monkeypatch):
    monkeypatch.setattr(cpu_int8, "has_integer_products", lambda: integers)
    found = quantise(torch.randn(24, 80), Format(Grouping("inner", group)) if group else Format())
    bias = torch.randn(24).to(dtype)
    for shape in ((1, 80), (2, 80), (2, 3, 80), (3, 3, 80)):
        x = torch.randn(shape).to(dtype)
        x[..., 7] *= 40  # an outlier in each row
        for kn in (False, True):
            for added in (None, bias):
                stored = found.weight.t().contiguous() if kn else found.weight
                given = dict(kn=kn, group=found.group, activations=activations)
                result = linear_int8(x, stored, found.scales, added, **given)
                exact = linear_int8_reference(
                    x if activations else x.double(),
                    stored,
                    found.scales,
                    added if activations or added is None else added.double(),
                    **given,
                )
                assert result.dtype == dtype and result.shape == exact.shape
                top = (x.double().abs() @ found.dequantise(torch.float64).abs().T).max()  # what sums of products may cancel
                assert ((result.double() - exact.double()).abs() / top).max() < DTYPES[dtype]


def test_a_row_that_is_not_finite_stays_its_own_affair():
    x = torch.randn(9, 80)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    found = quantise(torch.randn(24, 80))
    finite = linear_int8(x, found.weight, found.scales).isfinite().all(-1)
    assert finite.tolist() == [i not in (2, 4) for i in range(9)]


def test_double_precision_is_the_reference():
    x, found = torch.randn(3, 80, dtype=torch.float64), quantise(torch.randn(24, 80))
    assert torch.equal(linear_int8(x, found.weight, found.scales), linear_int8_reference(x, found.weight, found.scales))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_no_weight_is_written_out_in_floating_point(rows):
    """The compiled code of a bf16 linear holds no floating-point buffer of the weight's size."""
    found = quantise(torch.randn(192, 320))
    x = torch.randn(rows, 320).bfloat16()
    monitored = torch.compile(lambda *args: linear_int8(*args), dynamic=False)
    result, (code,) = run_and_get_code(monitored, x, found.weight, found.scales)
    assert "(192, 320), (320, 1), torch.float32" not in code and "(192, 320), (320, 1), torch.bfloat16" not in code
    exact = linear_int8_reference(x.double(), found.weight, found.scales)
    assert (result.double() - exact).norm() / exact.norm() < 4e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("activations", ["", "int8"])
def test_any_number_of_rows_is_one_graph(dtype, group, activations):
    found = quantise(torch.randn(24, 80), Format(Grouping("inner", group)) if group else Format())
    given = dict(group=found.group, activations=activations)
    traced = make_fx(lambda x, w, s: linear_int8(x, w, s, **given), tracing_mode="symbolic")
    graph = traced(torch.randn(11, 5, 80).to(dtype), *found[:2])
    for rows in (1, 3, 40):
        x = torch.randn(rows, 7, 80).to(dtype)
        exact = linear_int8_reference(x if activations else x.double(), found.weight, found.scales, **given)
        assert (graph(x, *found[:2]).double() - exact.double()).norm() / exact.double().norm() < DTYPES[dtype]


@pytest.mark.parametrize("inner, group", [(96, 64), (72, 32)])
def test_a_short_last_group_is_compiled_too(inner, group):
    """Inductor's C++ for scales that were repeated and cut off read other memory in the last group, wherever the weight is dequantised."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(inner, 32), torch.randn(16, inner)
    with torch.no_grad():
        quantised = dsi.quantise_model(torch.nn.Sequential(linear), format=Format(Grouping("inner", group)))
        expected = quantised(x)
        found = torch.compile(quantised, backend="dsi")(x)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
