"""int8 weights in every schedule: scales of rows and of groups, rows as digits, rows rounded to int8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, cost, generate
from dsi.codegen.devices import A100, H200
from dsi.codegen.quantised import digits_beside, int8_rows

from . import plans
from .quantised import quantised, rounded_rows
from .support import check, resources, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = {
    "llama_qkv": (lambda dtype, rows: plans.llama_qkv(dtype, 1, rows, cache=20), False),
    "gpt2_qkv": (lambda dtype, rows: plans.gpt2_qkv(dtype, 1, rows), True),
    "gate_up": (lambda dtype, rows: plans.gate_up(dtype, rows), False),
    "projection": (lambda dtype, rows: plans.projection(dtype, rows, inner=72, columns=33), False),
    "projection_kn": (lambda dtype, rows: plans.projection(dtype, rows, inner=72, columns=33, kn=True), True),
}
GEMV = Choice("gemv", 1, 1, 16, 16, 64, 4, 1)
SKINNY = Choice("skinny", 16, 16, 32, 16, 32, 4, 2)
TILED = Choice("tiled", None, 16, 32, 16, 32, 4, 2)
# Steps as long as int8 on the matrix units needs them.
INT8_SKINNY, INT8_TILED = (replace(choice, block_k=32) for choice in (SKINNY, TILED))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("group", [0, 8, 32, 20], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("name", CASES)
def test_int8_weights(interpreter, name, group, dtype):
    """Groups of a row, of less than a step, of more, and of no multiple of it."""
    make, kn = CASES[name]
    for rows, choice in ((1, replace(GEMV, split=2)), (3, replace(GEMV, max_rows=4, block_m=4)), (13, SKINNY), (13, TILED)):
        check(quantised(lambda rows=rows: make(dtype, rows), group, kn), interpreter, choice=choice)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [0, 32], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("name", CASES)
def test_rows_as_digits(interpreter, name, group, dtype):
    make, kn = CASES[name]
    for rows, choice in ((3, INT8_SKINNY), (13, replace(INT8_SKINNY, split=3)), (13, INT8_TILED)):
        case = quantised(lambda rows=rows: make(dtype, rows), group, kn)
        assert int8_rows(case.spec, replace(choice, digits=2))
        if dtype == F32:  # two digits hold 16 bits
            found = run(case, interpreter, choice=replace(choice, digits=2))
            for value, expected in zip(found, case.expected, strict=True):
                assert (value.double() - expected.double()).norm() <= 2**-14 * expected.double().norm(), name
        else:
            check(case, interpreter, choice=replace(choice, digits=2))


def test_more_rows_than_half_a_tile_share_sums_as_digits(interpreter):
    """Prompts of up to 128 tokens: no program takes fewer rows, and several share a sum."""
    wide = replace(INT8_SKINNY, max_rows=128, block_m=128, block_n=64, digits=2)
    for choice in (wide, replace(wide, split=3), replace(INT8_TILED, block_m=64, block_n=64, block_k=64, digits=2)):
        check(quantised(lambda: plans.projection(BF16, 70, inner=200, columns=33)), interpreter, choice=choice)
    for choice in (wide, replace(wide, max_rows=None, block_m=64)):
        case = quantised(lambda: plans.gate_up(BF16, 70))
        assert digits_beside(case.spec, choice) and not digits_beside(case.spec, replace(choice, block_m=32))
        check(case, interpreter, choice=choice)


@pytest.mark.parametrize("rows", [64, 70, 150])
@pytest.mark.parametrize("name", ["llama_qkv", "gate_up", "projection"])
def test_any_number_of_rows_goes_in_blocks(interpreter, name, rows):
    """Blocks that read the same weights run one behind another; the last one may be cut off."""
    make = {"llama_qkv": lambda: plans.llama_qkv(BF16, 1, rows, cache=rows + 3)}.get(name, lambda: CASES[name][0](BF16, rows))
    case, choice = quantised(make), replace(INT8_SKINNY, max_rows=None, block_m=64, block_n=64, digits=2)
    (kernel,) = generate(case.spec, choice)
    assert digits_beside(case.spec, choice) and (kernel.launches[-1].grid[0] == -(-rows // 64) or rows == 64)
    check(case, interpreter, choice=choice)


@pytest.mark.parametrize("group", [0, 32], ids=lambda group: f"group{group}")
def test_rows_rounded_to_int8_go_in_blocks(interpreter, group):
    case = rounded_rows(quantised(lambda: plans.projection(BF16, 45, inner=72, columns=33), group))
    check(case, interpreter, choice=replace(INT8_SKINNY, max_rows=None))


def test_the_error_of_digits_has_a_bound(interpreter):
    """Half a unit an element, just above 2**-16 of its row's largest value, also beside outliers."""
    case = quantised(lambda: plans.projection(F32, 5, inner=72, columns=33))
    case.inputs[0][:, 7] *= 3000
    (value,) = run(case, interpreter, choice=replace(INT8_SKINNY, digits=2))
    x, w, bias, residual = (n for n, tensor in enumerate(case.spec.inputs) if "scale" not in tensor.name)
    exact = case.real(x) @ case.real(w).T + case.real(bias) + case.real(residual)
    bound = case.real(x).abs().amax(1, keepdim=True) * 2.0**-15.9 * case.real(w).abs().sum(1)
    assert ((value.double() - exact).abs() <= bound + 1e-5 * exact.abs()).all()


def test_rows_of_next_to_nothing_are_digits_like_others(interpreter):
    """The inverse of a step that is no normal number would not be finite."""
    case = quantised(lambda: plans.projection(BF16, 6, inner=72, columns=33))
    x, _, bias, residual = (n for n, tensor in enumerate(case.spec.inputs) if "scale" not in tensor.name)
    for row, largest in enumerate((0.0, 1e-39, 1e-37, 1e-34, 1e-30)):
        case.inputs[x][row] = (case.real(x)[row] / case.real(x)[row].abs().max() * largest).to(BF16)
    for number in (bias, residual):
        case.inputs[number].zero_()
    (value,) = run(case, interpreter, choice=replace(INT8_SKINNY, digits=2))
    w = next(n for n, tensor in enumerate(case.spec.inputs) if tensor.name == "weight")
    exact = case.real(x) @ case.real(w).T
    step = (case.real(x).abs().amax(1, keepdim=True) * 2.0**-15).clamp(min=2.0**-126)
    assert (
        value.isfinite().all() and ((value.double() - exact).abs() <= 0.51 * step * case.real(w).abs().sum(1) + 2**-8 * exact.abs()).all()
    )
    assert not value[0].any() and value[4].any()


@pytest.mark.parametrize("activations", ["", "int8"], ids=["digits", "W8A8"])
@pytest.mark.parametrize("choice", [INT8_SKINNY, INT8_TILED], ids=["skinny", "tiled"])
def test_integers_do_not_overflow_over_a_long_row(interpreter, choice, activations):
    case = quantised(lambda: plans.projection(F32, 3, inner=150016, columns=3, strided=False))
    x, w, bias, residual = (n for n, tensor in enumerate(case.spec.inputs) if "scale" not in tensor.name)
    case.inputs[x].fill_(1), case.inputs[w].fill_(127)
    case.expected[0] = (case.real(x) @ case.real(w).T + case.real(bias) + case.real(residual)).float()
    case = rounded_rows(case) if activations else case
    check(case, interpreter, choice=replace(choice, block_n=16, block_k=1024, digits=0 if activations else 2))


def test_a_row_that_is_not_finite_stays_so(interpreter):
    case = quantised(lambda: plans.projection(F32, 3, inner=72, columns=33))
    case.inputs[0][1, 5], case.inputs[0][2, 6] = float("inf"), float("nan")
    (value,) = run(case, interpreter, choice=replace(INT8_SKINNY, digits=2))
    assert value[0].isfinite().all() and not value[1].isfinite().any() and not value[2].isfinite().any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [0, 32, 8, 20], ids=lambda group: f"group{group}")
def test_rows_rounded_to_int8(interpreter, group, dtype):
    for rows, choice in ((1, GEMV), (3, SKINNY), (3, INT8_SKINNY), (13, replace(INT8_SKINNY, split=3)), (13, TILED), (13, INT8_TILED)):
        case = rounded_rows(quantised(lambda rows=rows: plans.projection(dtype, rows, inner=72, columns=33), group))
        check(case, interpreter, choice=choice)


@pytest.mark.parametrize("group", [0, 20], ids=lambda group: f"group{group}")
def test_half_way_between_two_codes_the_even_one_is_taken(interpreter, group):
    for rows, choice in ((1, GEMV), (3, INT8_SKINNY), (3, TILED)):
        case = quantised(lambda rows=rows: plans.projection(F32, rows, inner=72, columns=33), group)
        case.inputs[0].copy_(torch.where(case.inputs[0] > 0, 0.5, -0.5))  # 63.5 of 127, but for a row's largest
        case.inputs[0][:, 0] = 1.0
        check(rounded_rows(case), interpreter, choice=choice)


@pytest.mark.parametrize("group", [0, 20], ids=lambda group: f"group{group}")
def test_rows_are_rounded_wherever_the_prologue_is_computed(interpreter, group):
    """A prologue apart leaves rows that the product still has to round, where it does not leave them as int8."""
    for rows, choice in ((1, GEMV), (5, INT8_SKINNY), (5, INT8_TILED)):
        case = quantised(lambda rows=rows: plans.gate_up(F32, rows), group)
        case.spec.plan = replace(case.spec.plan, activations="int8")
        together, apart = (run(case, interpreter, choice=replace(choice, apart=apart)) for apart in (False, True))
        for one, other, exact in zip(together, apart, case.expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert 1e-4 < (one - exact).norm() / exact.norm() < 0.05 or torch.equal(one, exact), "rounded, and to int8"


def test_steps_that_are_too_short_for_int8_on_the_matrix_units():
    case = rounded_rows(quantised(lambda: plans.projection(BF16, 13, inner=96, columns=33), 48))
    assert not int8_rows(case.spec, SKINNY), "Triton has no such product of int8"
    (kernel,) = generate(case.spec, SKINNY)
    assert "tl.int32)" not in kernel.source


@pytest.mark.parametrize("group", [16, 32, 48, 64, 128, 24])
@pytest.mark.parametrize("rows", [8, 33, 256])
def test_no_choice_has_scales_change_within_a_step(group, rows):
    """The weights would be made fp32 before they are multiplied, and multiplied without the matrix units. Where groups leave nothing else,
    tiles are those of fp32."""
    for make in (lambda: plans.projection(BF16, rows, 4096, 4096, strided=False), lambda: plans.gate_up(BF16, rows, 4096, 14336)):
        with torch.device("meta"):
            spec = quantised(make, group).spec
        for choice in (*cost.choices(spec), *cost.candidates(spec)):
            if group == 24:
                assert choice.schedule == "tiled" and choice.block_m * choice.block_n <= 64 * 64 and not choice.digits
            else:
                assert group % choice.block_k == 0, choice
                assert not choice.digits or int8_rows(spec, choice), choice


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_rows_of_fp32_are_no_digits(rows, group):
    """Two hold 16 bits: an entry beside an outlier would lose most of what fp32 has."""
    with torch.device("meta"):
        spec = quantised(lambda: plans.projection(F32, rows, 4096, 4096, strided=False), group).spec
    assert not any(
        choice.digits for device in (H200, A100) for choice in (*cost.choices(spec, device), *cost.candidates(spec, None, device))
    )


@pytest.mark.parametrize("group, rows", [(32, 16), (48, 16), (24, 8)])
def test_groups_compile_for_hopper(group, rows):
    """Some needed 950 KB of shared memory."""
    with torch.device("meta"):
        case = quantised(lambda: plans.gate_up(BF16, rows, 4096, 14336), group)
    (kernel,) = generate(case.spec)
    used = resources(case, kernel, 90)
    assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= H200.shared, used


def test_no_weight_is_converted_beside_digits():
    case = quantised(lambda: plans.gate_up(BF16, 8, 1024, 96))
    (kernel,) = generate(case.spec, replace(SKINNY, digits=2, block_k=128))
    assert "gate_weight.to(" not in kernel.source and "out_dtype=tl.int32" in kernel.source


@pytest.mark.parametrize(
    "choice",
    [
        Choice("gemv", 1, 1, 1, 2048, 4096, 4, 1),
        Choice("skinny", 16, 16, 64, 128, 256, 4, 3, 2),
        Choice("skinny", 16, 16, 64, 256, 256, 8, 3, 2, digits=2),
    ],
)
def test_compiles_for_hopper(choice):
    with torch.device("meta"):
        case = quantised(lambda: plans.gate_up(BF16, choice.max_rows, 4096, 14336), 0)
    (kernel,) = generate(case.spec, choice)
    used = resources(case, kernel, 90)
    assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= 227 * 1024, used
