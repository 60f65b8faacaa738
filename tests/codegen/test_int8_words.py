"""int8 read as words: sixteen elements at a time, of weights and of digits, under few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.cost import candidates

from . import plans
from .quantised import quantised, rounded_rows
from .support import check, resources, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = {
    "llama_qkv": lambda dtype, rows: plans.llama_qkv(dtype, 1, rows, cache=20),
    "gate_up": lambda dtype, rows: plans.gate_up(dtype, rows),
    "projection": lambda dtype, rows: plans.projection(dtype, rows, inner=208, columns=33, strided=False),
}
WORDS = Choice("gemv", 1, 1, 4, 64, 64, 4, 1, digits=2)


@pytest.mark.parametrize(
    "name, group",
    [("gate_up", 0), ("gate_up", 16), ("gate_up", 48), ("projection", 128), ("projection", 0), ("llama_qkv", 0)],
    ids=lambda value: f"group{value}" if isinstance(value, int) else value,
)
def test_words(interpreter, name, group):
    """Scales of rows, of parts of a step, of several steps, of no multiple of one; a last step that is cut off; columns beyond the end."""
    for rows, dtype, choice in (
        (1, BF16, replace(WORDS, split=2)),
        (2, BF16, replace(WORDS, max_rows=2, block_m=2, block_k=512)),
        (3, F16, replace(WORDS, max_rows=4, block_m=4)),
    ):
        case = quantised(lambda rows=rows, dtype=dtype: CASES[name](dtype, rows), group)
        (kernel,) = generate(case.spec, choice)
        assert "dot16(" in kernel.source
        check(case, interpreter, kernel)


def test_the_error_of_words_has_a_bound(interpreter):
    """Half a unit an element, just above 2**-16 of its row's largest value, also beside outliers; so 2**-15 of it with what bf16 loses."""
    case = quantised(lambda: plans.projection(F16, 3, inner=208, columns=33, strided=False))
    case.inputs[0][:, 7] *= 3000
    (value,) = run(case, interpreter, choice=replace(WORDS, max_rows=4, block_m=4))
    x, w, bias, residual = (n for n, tensor in enumerate(case.spec.inputs) if "scale" not in tensor.name)
    exact = case.real(x) @ case.real(w).T + case.real(bias) + case.real(residual)
    bound = case.real(x).abs().amax(1, keepdim=True) * 2.0**-15.9 * case.real(w).abs().sum(1)
    assert ((value.double() - exact).abs() <= bound + 2.0**-10 * exact.abs()).all()


def test_a_row_that_is_not_finite_stays_so(interpreter):
    case = quantised(lambda: plans.projection(F16, 3, inner=208, columns=33, strided=False))
    case.inputs[0][1, 5], case.inputs[0][2, 6] = float("inf"), float("nan")
    (value,) = run(case, interpreter, choice=replace(WORDS, max_rows=4, block_m=4))
    assert value[0].isfinite().all() and not value[1].isfinite().any() and not value[2].isfinite().any()


@pytest.mark.parametrize("group", [0, 32], ids=lambda group: f"group{group}")
def test_rows_rounded_to_int8_are_one_digit(interpreter, group):
    case = rounded_rows(quantised(lambda: plans.projection(BF16, 3, inner=208, columns=33, strided=False), group))
    (kernel,) = generate(case.spec, replace(WORDS, max_rows=4, block_m=4, digits=1))
    assert "dot16(" in kernel.source and "low" not in kernel.source
    check(case, interpreter, kernel)


@pytest.mark.parametrize(
    "choice",
    [
        Choice("gemv", 1, 1, 4, 2048, 4096, 4, 1, digits=2),
        Choice("gemv", 2, 2, 2, 1024, 4096, 1, 1, 2, digits=2),
        Choice("gemv", 4, 4, 4, 1024, 4096, 2, 1, digits=2),
    ],
    ids=lambda choice: f"{choice.max_rows} rows",
)
def test_compiles_for_hopper(choice):
    """Without spills; shared memory is for the last sums of several warps alone, so no tile is exchanged on the way."""
    with torch.device("meta"):
        case = quantised(lambda: plans.gate_up(BF16, choice.max_rows, 4096, 14336))
    (kernel,) = generate(case.spec, choice)
    used = resources(case, kernel, 90)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 255 and used["SHARED"] <= 512, used


@pytest.mark.parametrize(
    "make, group",
    [
        (lambda: plans.projection(BF16, 1, inner=200, columns=33, strided=False), 0),  # rows of no whole 16 bytes
        (lambda: plans.projection(BF16, 1, inner=208, columns=33), 0),  # rows that are 216 bytes apart
        (lambda: plans.projection(F32, 1, inner=208, columns=33, strided=False), 0),  # two digits are not fp32
        (lambda: plans.projection(BF16, 1, inner=208, columns=33, strided=False), 8),  # two scales in 16 bytes
        (lambda: plans.projection(BF16, 1, inner=1 << 17, columns=2, strided=False), 0),  # sums of more than 32 bits
    ],
    ids=["inner", "apart", "fp32", "group", "long"],
)
def test_what_cannot_be_read_as_words_is_converted(make, group):
    with torch.device("meta"):
        case = quantised(make, group)
    (kernel,) = generate(case.spec, WORDS)
    assert "dot16(" not in kernel.source
    assert not [choice for choice in candidates(case.spec) if choice.schedule == "gemv" and choice.digits]


def test_the_rows_kernel_reads_a_row_once_and_constants_before_it_waits():
    with torch.device("meta"):
        case = quantised(lambda: plans.gate_up(BF16, 1, 4096, 96))
    names = [tensor.name for tensor in case.spec.inputs]
    case.spec.constants = case.spec.constants | {names.index("norm_weight")}
    (kernel,) = generate(case.spec, WORDS)
    early, late = kernel.source.split("def gate_up_rows(")[1].split("def gate_up(")[0].split("gdc_wait()")
    loads = {name: (early.count(f"tl.load({name}_ptr"), late.count(f"tl.load({name}_ptr")) for name in ("x", "delta", "norm_weight")}
    assert loads == {"x": (0, 1), "delta": (0, 1), "norm_weight": (1, 0)}
