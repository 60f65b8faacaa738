"""Layer norms behind the product of gemv: sums corrected by mean and deviation, with no pass over the rows before them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from dsi.codegen import Choice, cost, defaults, generate
from dsi.codegen.deferred import LONGEST_LAYER, deferred_layer
from dsi.codegen.devices import H200
from dsi.codegen.linear_choices import BEHIND
from dsi.codegen.linear_cost import linear_work
from dsi.ir import tile as t
from dsi.ir.tile import K, R

from . import plans
from .quantised import constant, quantised
from .support import Case, cast, check, const, op, resources, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
GEMV = Choice("gemv", 1, 1, 4, 128, 64, 4, deferred=True)
EPS = 1e-5


def layer(dtype, rows=1, inner=96, columns=12, x=None, gain=True, bias=True, total=False, kn=False, seed=0) -> Case:
    """A linear behind a layer norm, with a gain and a bias or without; `total`: of the sum of two tensors."""
    case = Case("layer", dtype, {}, seed)
    numbers = [case.input("x", (rows, inner), values=x)] + ([case.input("delta", (rows, inner))] if total else [])
    g = case.input("gain", (inner,), shift=1.0, scale=0.3) if gain else None
    b = case.input("bias", (inner,), scale=0.3) if bias else None
    w = case.input("weight", (inner, columns) if kn else (columns, inner), scale=inner**-0.5)
    body = case.load(numbers[0], R, K)
    body = op("add", body, case.load(numbers[1], R, K), dtype=dtype) if total else body
    value = op("mul", op("sub", body, t.Statistic(0, "mean")), t.Statistic(0, "rstd"))
    value = op("mul", value, case.load(g, K)) if gain else value
    value = op("add", value, case.load(b, K)) if bias else value
    summed = sum(case.real(number) for number in numbers)
    normal = F.layer_norm(summed, (inner,), *(None if n is None else case.real(n) for n in (g, b)), EPS)
    out = case.output("out", (rows, columns), normal @ (case.real(w) if kn else case.real(w).T))
    segment = t.Segment(sympy.Integer(columns), (t.WeightWindow(w, t.C, kn),), (t.Store(out, (R, t.C), t.Window(0), dtype),))
    reductions = (t.Reduction("layer", body, K, sympy.Integer(inner), EPS),)
    plan = t.LinearPlan(sympy.Integer(rows), sympy.Integer(inner), cast(value, dtype), dtype, (segment,), reductions)
    return case.finish(plan)


def known(case: Case) -> Case:
    """The case with all but its rows constant, so that what needs no rows is made before the wait."""
    case.spec.constants = frozenset(n for n, tensor in enumerate(case.spec.inputs) if tensor.name not in ("x", "delta"))
    return case


def errors(case: Case, interpreter, choice: Choice = GEMV) -> tuple[float, float]:
    """Relative errors against fp64, of the kernel and of eager, which rounds what the norm gives before the product."""
    (value,), (x, g, b, w) = run(case, interpreter, choice=choice), case.inputs[:4]
    normal = F.layer_norm(x.float(), (x.shape[-1],), g.float(), b.float(), EPS).to(x.dtype)
    eager = (normal.float() @ w.float().T).to(x.dtype)
    exact = F.layer_norm(x.double(), (x.shape[-1],), g.double(), b.double(), EPS) @ w.double().T
    return tuple(float((result.double() - exact).norm() / exact.norm()) for result in (value, eager))


@pytest.mark.parametrize("block_k", [128, 32], ids=["one_step", "steps"])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "written"])
@pytest.mark.parametrize("rows", [1, 3])
@HALVES
def test_in_one_step_and_in_several(interpreter, dtype, rows, ahead, block_k):
    choice = replace(GEMV, max_rows=None, block_m=1 if rows == 1 else 4, block_k=block_k)
    case = layer(dtype, rows, 100, 10)
    check(known(case) if ahead else case, interpreter, choice=choice)
    source = generate(case.spec, choice)[0].source
    assert len(re.findall("tl.(reduce|sum)", source.split("gdc_wait()")[-1])) == 1  # one exchange behind the wait
    assert ("tl.reduce" in source.split("    gdc_wait()")[0]) == (ahead and block_k == 128)


@pytest.mark.parametrize("gain,bias", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("block_k", [128, 32], ids=["one_step", "steps"])
def test_without_a_gain_or_a_bias(interpreter, gain, bias, block_k):
    case = layer(F16, gain=gain, bias=bias, total=True)
    check(known(case), interpreter, choice=replace(GEMV, block_k=block_k))


@pytest.mark.parametrize("block_k", [64, 16], ids=["one_step", "steps"])
@HALVES
def test_rows_with_a_mean_of_twenty_deviations_behind_a_weight_that_lies_across(interpreter, dtype, block_k):
    case = plans.gpt2_qkv(dtype, 1, 1)
    for one in (case, constant(case)):
        assert deferred_layer(one.spec.plan, GEMV) is not None
        check(one, interpreter, choice=replace(GEMV, block_n=8, block_k=block_k))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block_k", [64, 16], ids=["one_step", "steps"])
def test_sums_side_by_side(interpreter, rows, block_k):
    """Rope, whose channels are pairs of sums."""
    case = known(plans.neox_qkv(F16, 1, rows, d=16, rotary=16))
    choice = replace(GEMV, max_rows=None, block_m=rows, block_n=8, block_k=block_k)
    assert cost.accumulators(case.spec.plan) == 2 and deferred_layer(case.spec.plan, choice) is not None
    check(case, interpreter, choice=choice)


@pytest.mark.parametrize("group", [0, 16, 20])
@pytest.mark.parametrize("block_k", [64, 32], ids=["one_step", "steps"])
def test_int8_weights(interpreter, group, block_k):
    case = quantised(lambda: plans.gpt2_qkv(BF16, 1, 1), group, kn=True)
    assert deferred_layer(case.spec.plan, GEMV) is not None
    check(case, interpreter, choice=replace(GEMV, block_k=block_k))


# ---------------------------------------------------------------------------------------------------------------------- exactness


def random_rows(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """One row of 1024: with a mean of many deviations; with channels far from the others, those among them that the rows are lowered by."""
    x = torch.randn(1, 1024, generator=torch.Generator().manual_seed(3))
    if kind == "mean":
        x = x + 20
    elif kind == "hot":
        x = x * 1000
    elif kind.startswith("outlier"):
        x[0, {"outlier_first": 0, "outlier_third": 341, "outlier": 138, "outliers": slice(None, None, 100)}[kind]] = 300.0
    elif kind == "tiny":
        x = x * 1e-3
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["normal", "mean", "hot", "outlier_first", "outlier_third", "outlier", "outliers", "tiny"])
@HALVES
def test_no_worse_than_eager(interpreter, dtype, kind):
    case = known(layer(dtype, 1, 1024, 4, random_rows(kind, dtype)))
    mine, eager = errors(case, interpreter, replace(GEMV, block_k=1024))
    assert mine <= 1.05 * eager, (mine, eager)


@pytest.mark.parametrize("value", [0.0, 3.0, 60000.0])
def test_a_row_of_equal_elements_is_the_bias(interpreter, value):
    case = known(layer(F16, 1, 96, 12, torch.full((1, 96), value)))
    check(case, interpreter, choice=GEMV)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 50])
@pytest.mark.parametrize("block_k", [128, 32], ids=["one_step", "steps"])
def test_a_row_that_is_not_finite_is_nan_and_no_other(interpreter, place, value, block_k):
    x = torch.randn(3, 96)
    x[1, place] = value
    case = known(layer(F16, 3, 96, 12, x))
    (out,) = run(case, interpreter, choice=replace(GEMV, max_rows=None, block_m=4, block_k=block_k))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------- refusals


def test_what_stays_in_front_of_the_product(interpreter):
    """The choice is without effect there, and the kernel right all the same."""
    plan = layer(F16).spec.plan
    assert deferred_layer(plan, GEMV) is not None
    for other in ({"deferred": False}, {"schedule": "skinny"}, {"split": 2}, {"block_n": 16}, {"apart": True}):
        assert deferred_layer(plan, replace(GEMV, **other)) is None
    assert deferred_layer(layer(F32).spec.plan, GEMV) is None
    with torch.device("meta"):
        assert deferred_layer(layer(BF16, inner=2 * LONGEST_LAYER).spec.plan, GEMV) is None
    assert deferred_layer(plans.llama_qkv(BF16, 1, 1).spec.plan, GEMV) is None
    escaping = replace(plan, row_stores=(t.Store(0, (R, K), plan.x, F16),))
    assert deferred_layer(escaping, GEMV) is None
    assert deferred_layer(replace(plan, activations="int8"), GEMV) is None
    check(layer(F32), interpreter, choice=GEMV)
    check(layer(F16), interpreter, choice=replace(GEMV, block_k=32, split=2))


@pytest.mark.parametrize("way", ["tanh", "square", "twice", "scaled_mean", "own_gain", "other_body", "no_factor"])
def test_what_is_not_gain_and_bias_of_a_norm_stays(way):
    case = layer(F16)
    plan, x = case.spec.plan, case.load(0, R, K)
    lowered = op("sub", x, t.Statistic(0, "mean"))
    normal = op("mul", lowered, t.Statistic(0, "rstd"))
    value = {
        "tanh": lambda: op("tanh", normal),
        "square": lambda: op("mul", normal, normal),
        "twice": lambda: op("mul", normal, t.Statistic(0, "rstd")),
        "scaled_mean": lambda: op("mul", op("sub", op("mul", x, const(2.0)), t.Statistic(0, "mean")), t.Statistic(0, "rstd")),
        "own_gain": lambda: op("mul", normal, x),
        "other_body": lambda: op("mul", op("sub", case.load(0, R, sympy.Integer(0)), t.Statistic(0, "mean")), t.Statistic(0, "rstd")),
        "no_factor": lambda: lowered,
    }[way]()
    assert deferred_layer(replace(plan, x=normal), GEMV) is not None
    assert deferred_layer(replace(plan, x=value), GEMV) is None


def test_the_model_offers_it_and_never_takes_it_untried():
    with torch.device("meta"):
        spec = known(layer(F16, 1, 768, 2304)).spec
        found = cost.candidates(spec, None, H200)
    assert 0 < sum(choice.deferred for choice in found) <= BEHIND and not found[0].deferred
    assert all(deferred_layer(spec.plan, choice) for choice in found if choice.deferred)
    work = linear_work(spec, 1, {})
    one = next(choice for choice in found if choice.deferred)
    assert work.passes(one) == 0 < work.passes(replace(one, deferred=False))


def test_a_measured_choice_is_for_rows_that_one_step_takes(monkeypatch):
    """Longer ones have several, between which a thread carries three sums a column instead of one: the registers would not do."""
    one = {"rows": 1, "columns": 2304, "norm": "layer", "us": 1.0}
    measured = (
        defaults.Entry(
            inner=768, choice={"schedule": "gemv", "block_m": 1, "block_n": 4, "block_k": 1024, "num_warps": 1, "deferred": True}, **one
        ),
        defaults.Entry(inner=1600, choice={"schedule": "gemv", "block_m": 1, "block_n": 2, "block_k": 512, "num_warps": 4}, **one),
    )
    monkeypatch.setattr(defaults, "table", lambda: {"H200": measured})
    with torch.device("meta"):
        specs = {inner: known(layer(F16, 1, inner, 2304)).spec for inner in (768, 1000, 1024, 1025, 1100)}
    found = {inner: defaults.lookup(spec, None, "NVIDIA H200") for inner, spec in specs.items()}
    assert {inner for inner, choice in found.items() if choice.deferred} == {768, 1000, 1024}


@pytest.mark.parametrize("block_n,block_k,warps", [(4, 1024, 1), (2, 1024, 4), (4, 256, 4)])
def test_it_compiles(block_n, block_k, warps):
    """Without spills, and with what needs no rows in front of the wait, where there is one step."""
    with torch.device("meta"):
        case = known(layer(F16, 1, 768, 3072))
    choice, texts = replace(GEMV, block_n=block_n, block_k=block_k, num_warps=warps), {}
    found = resources(case, generate(case.spec, choice)[0], 90, texts=texts)
    assert found["STACK"] == 0 and found["REG"] <= 200
    assert ("shfl" in texts["ptx"].split("griddepcontrol.wait")[0]) == (block_k == 1024)
