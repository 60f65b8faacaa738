"""Generated kernels under the interpreter against plain torch, on plans made by hand: every schedule, dtype and layout."""

from __future__ import annotations

import pytest
import sympy
import torch
from dsi.codegen import Choice, generate
from dsi.ir import tile as t
from dsi.ir.errors import Refused

from . import plans
from .support import Case, cast, check, const, op, pick, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])


@DTYPES
@pytest.mark.parametrize("batch, length, symbolic", [(1, 1, False), (1, 3, False), (3, 1, True), (1, 17, True)])
def test_llama_qkv(interpreter, dtype, batch, length, symbolic):
    """RMSNorm, q, k and v by three weights, rope, caches written at loaded positions."""
    check(plans.llama_qkv(dtype, batch, length, symbolic=symbolic, cache=20), interpreter)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("d", [16, 24, 80])
def test_norms_of_heads_before_rope(interpreter, rows, d):
    check(plans.llama_qkv(F32, 1, rows, d=d, symbolic=True, cache=20, qk_norm=True), interpreter)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("d", [16, 24])
def test_interleaved_rope(interpreter, rows, d):
    check(plans.llama_qkv(F16, 1, rows, d=d, cache=20, style="interleaved"), interpreter)


@DTYPES
@pytest.mark.parametrize("length, symbolic", [(1, True), (3, False), (17, True)])
def test_gpt2_qkv(interpreter, dtype, length, symbolic):
    """LayerNorm of rows with a large mean; one [K, N] weight cut into three."""
    check(plans.gpt2_qkv(dtype, 1, length, symbolic=symbolic), interpreter)


@DTYPES
@pytest.mark.parametrize("length, symbolic", [(1, False), (3, True), (17, False)])
def test_neox_qkv(interpreter, dtype, length, symbolic):
    """Heads of q, k and v side by side in one weight; rope on a part of each head."""
    check(plans.neox_qkv(dtype, 1, length, symbolic=symbolic), interpreter)


@pytest.mark.parametrize("rotary", [2, 4, 8, 10, 20])
def test_rope_on_any_part_of_a_head(interpreter, rotary):
    check(plans.neox_qkv(F32, 1, 3, rotary=rotary), interpreter)


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_gate_and_up(interpreter, dtype, rows):
    """Two weights in one pass over x, and the residual sum stored besides."""
    check(plans.gate_up(dtype, rows, symbolic=rows == 17), interpreter)


@DTYPES
@pytest.mark.parametrize(
    "rows, kn, kind, strided",
    [(1, False, None, True), (2, True, "gelu_tanh", True), (17, True, "gelu_erf", False), (5, False, "relu", True)],
)
def test_projection(interpreter, dtype, rows, kn, kind, strided):
    check(plans.projection(dtype, rows, kn=kn, kind=kind, strided=strided), interpreter)


@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64, 256, 257])
def test_each_row_bucket(interpreter, rows):
    """One kernel a bucket of rows; each is right at the most rows that it takes."""
    case = plans.projection(F32, rows, inner=64, columns=33, symbolic=True)
    kernels = generate(case.spec)
    assert [k.max_rows for k in kernels] == [1, 4, 16, 32, 64, 256, None]
    assert [k.schedule for k in kernels] == ["gemv", "gemv", "tiled", "tiled", "tiled", "tiled", "tiled"]
    check(case, interpreter, pick(kernels, rows))


def test_the_variant_for_any_number_of_rows_takes_few(interpreter):
    case = plans.gate_up(F32, 3, symbolic=True)
    check(case, interpreter, generate(case.spec)[-1])


def test_no_rows_launch_nothing(interpreter):
    for case in (
        plans.projection(F32, 0, symbolic=True),
        plans.post_norm(F32, 0, symbolic=True),
        plans.attention(F32, queries=0, symbolic=True),
    ):
        before = [o.clone() for o in case.outputs]
        after = run(case, interpreter)
        assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "schedule, block_m, block_n, block_k, block_s", [("gemv", 4, 8, 16, 16), ("tiled", 16, 16, 16, 32), ("tiled", 16, 64, 64, 256)]
)
def test_a_choice_of_blocks_is_obeyed(interpreter, schedule, block_m, block_n, block_k, block_s):
    case = plans.llama_qkv(F32, 1, 3)
    choice = Choice(schedule, None, block_m, block_n, block_k, block_s)
    (kernel,) = generate(case.spec, choice)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_S": block_s}
    used = kernel.launches[0].constants
    assert {name: used[name] for name in used if name.startswith("BLOCK")}.items() <= blocks.items() and "BLOCK_K" in used
    check(case, interpreter, kernel)


def test_a_permutation_that_no_cut_explains(interpreter):
    """Columns of each group in reverse order: the tile holds whole groups and gathers."""
    case = Case("reverse", F32)
    x, w = case.input("x", (3, 32)), case.input("w", (24, 32))
    out = case.output("out", (3, 24), (case.real(x) @ case.real(w).T).view(3, 4, 6).flip(-1).reshape(3, 24))
    lane = sympy.Mod(t.C, 6)
    value = t.Permuted(t.Window(0), t.C, t.C - lane + 5 - lane, F32)
    segment = t.Segment(sympy.Integer(24), (t.WeightWindow(w, t.C),), (t.Store(out, (t.R, t.C), value, F32),), 6)
    case.finish(t.LinearPlan(sympy.Integer(3), sympy.Integer(32), case.load(x, t.R, t.K), F32, (segment,)))
    (kernel,) = generate(case.spec)
    assert "tl.gather" in kernel.source
    check(case, interpreter, kernel)


@pytest.mark.parametrize("rows, schedule", [(1, "gemv"), (3, "gemv"), (5, "tiled")])
def test_columns_that_pad_a_group_are_gathered_from_within_the_block(interpreter, rows, schedule):
    """Rope of six heads that are held together, as under a norm of them all: 144 columns in a block of 256, whose last would have partners
    behind it."""
    case = Case("six_heads", F32)
    x, w = case.input("x", (rows, 16)), case.input("w", (144, 16))
    y = case.real(x) @ case.real(w).T
    turned = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).view(rows, 6, 2, 12).flip(2).reshape(rows, 144)
    out = case.output("out", (rows, 144), turned)
    partner = sympy.floor(t.C / 24) * 24 + sympy.Mod(t.C + 12, 24)
    value = op("mul", t.Permuted(t.Window(0), t.C, partner, F32), t.Statistic(0, "rstd"))
    norm = t.Reduction("rms", t.Window(0), t.C, sympy.Integer(144), 1e-5)
    segment = t.Segment(sympy.Integer(144), (t.WeightWindow(w, t.C),), (t.Store(out, (t.R, t.C), value, F32),), 144, (norm,))
    case.finish(t.LinearPlan(sympy.Integer(rows), sympy.Integer(16), case.load(x, t.R, t.K), F32, (segment,)))
    (kernel,) = generate(case.spec, Choice(schedule, None, 16 if schedule == "tiled" else 4 if rows > 1 else 1, 256, 16, 16))
    assert "tl.gather" in kernel.source
    check(case, interpreter, kernel)


# --------------------------------------------------------------------------------------------------------------------- attention


@DTYPES
@pytest.mark.parametrize("queries, keys, symbolic", [(1, 19, True), (3, 19, False), (17, 70, True)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3), (4, 1)])
def test_attention(interpreter, dtype, queries, keys, symbolic, heads, kv_heads):
    check(plans.attention(dtype, 2, heads, kv_heads, queries, keys, mask="bool", symbolic=symbolic), interpreter)


@pytest.mark.parametrize("d, dv", [(16, 16), (24, 24), (80, 80), (16, 40), (152, 152)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_head_size(interpreter, dtype, d, dv):
    check(plans.attention(dtype, 1, 2, 1, 5, 37, d, dv, causal=True), interpreter)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 5},
        {"window": 3},
        {"softcap": 2.0},
        {"bias": True, "causal": True},
        {"mask": "additive"},
        {"mask": "additive", "bias": True, "softcap": 3.0},
        {"mask": "bool", "window": 9, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_what_attention_may_be_told(interpreter, options, symbolic):
    check(plans.attention(F32, 1, 4, 2, 23, 23, strided=True, symbolic=symbolic, **options), interpreter)
    check(plans.attention(F16, 2, 2, 2, 1, 23, symbolic=symbolic, **options), interpreter)


def test_causal_attention_over_fewer_keys_than_queries(interpreter):
    check(plans.attention(F32, 1, 2, 2, 20, 7, causal=True), interpreter)


# -------------------------------------------------------------------------------------------------------------------------- rows


@DTYPES
@pytest.mark.parametrize("rows, columns, symbolic", [(1, 64, False), (3, 77, True), (17, 40, False), (2, 9001, True)])
def test_residual_and_norm(interpreter, dtype, rows, columns, symbolic):
    check(plans.post_norm(dtype, rows, columns, symbolic), interpreter)


@DTYPES
@pytest.mark.parametrize("symbolic", [False, True])
def test_embedding(interpreter, dtype, symbolic):
    check(plans.embedding(dtype, symbolic=symbolic), interpreter)


def test_an_index_out_of_range_touches_no_memory(interpreter):
    case = plans.embedding(F32)
    case.inputs[2][0, 0] = 10**12
    (out,) = run(case, interpreter)
    assert out[0, 0].isnan().all() and out[0, 1:].isfinite().all() and out[1:].isfinite().all()
    case = plans.llama_qkv(F32, 1, 3)
    case.inputs[7][1] = -5
    _, k, _ = run(case, interpreter)
    assert torch.isfinite(k).all()


@pytest.mark.parametrize("symbolic", [False, True])
def test_causal_mask(interpreter, symbolic):
    check(plans.causal_mask(symbolic=symbolic), interpreter)


@DTYPES
def test_concatenation(interpreter, dtype):
    check(plans.concatenated(dtype), interpreter)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("columns", [5, 9000])
def test_two_norms_in_a_row(interpreter, kind, columns):
    """The second statistic is taken of values that use the first."""
    case = Case("two_norms", F32)
    x = case.input("x", (3, columns), shift=2.0)
    n = sympy.Integer(columns)

    def normal(number, body):
        lowered = op("sub", body, t.Statistic(number, "mean")) if kind == "layer" else body
        return op("mul", lowered, t.Statistic(number, "rstd"))

    loaded = case.load(x, t.R, t.C)
    first = t.Reduction(kind, loaded, t.C, n, 1e-5)
    between = op("add", op("mul", normal(0, loaded), const(3.0)), const(0.5))
    second = t.Reduction(kind, between, t.C, n, 1e-5)

    def reference(y):
        if kind == "layer":
            return torch.nn.functional.layer_norm(y, (columns,), eps=1e-5)
        return y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    out = case.output("out", (3, columns), reference(reference(case.real(x)) * 3 + 0.5))
    store = t.Store(out, (t.R, t.C), normal(1, between), F32)
    check(case.finish(t.RowPlan(sympy.Integer(3), n, (store,), (first, second))), interpreter)


def test_a_scalar_result(interpreter):
    case = Case("scalar", F32)
    x = case.input("x", (), dtype=torch.int64, values=torch.tensor(41))
    out = case.output("out", (), torch.tensor(42), dtype=torch.int64)
    value = op("add", case.load(x), const(1, torch.int64), dtype=torch.int64)
    check(case.finish(t.RowPlan(sympy.Integer(1), sympy.Integer(1), (t.Store(out, (), value, torch.int64),))), interpreter)


def test_a_constant_result(interpreter):
    case = Case("constant", F32)
    out = case.output("out", (3, 5), torch.full((3, 5), 2.5))
    check(case.finish(t.RowPlan(sympy.Integer(3), sympy.Integer(5), (t.Store(out, (t.R, t.C), const(2.5), F32),))), interpreter)


# ---------------------------------------------------------------------------------------------------------------------- refusals


def test_float64_is_refused():
    case = Case("wide", torch.float64)
    x = case.input("x", (3, 5))
    out = case.output("out", (3, 5), case.inputs[x])
    case.finish(t.RowPlan(sympy.Integer(3), sympy.Integer(5), (t.Store(out, (t.R, t.C), case.load(x, t.R, t.C), torch.float64),)))
    with pytest.raises(Refused, match="float64"):
        generate(case.spec)


def test_operands_of_two_dtypes_are_refused():
    case = Case("mixed", F16)
    x, w = case.input("x", (3, 32)), case.input("w", (8, 32), dtype=F32)
    out = case.output("out", (3, 8), torch.zeros(3, 8))
    segment = t.Segment(sympy.Integer(8), (t.WeightWindow(w, t.C),), (t.Store(out, (t.R, t.C), cast(t.Window(0), F16), F16),))
    case.finish(t.LinearPlan(sympy.Integer(3), sympy.Integer(32), case.load(x, t.R, t.K), F16, (segment,)))
    with pytest.raises(Refused, match="the weight w is torch"):
        generate(case.spec)


def test_a_size_that_no_input_has_is_refused():
    n = sympy.Symbol("s9", integer=True, positive=True)
    case = Case("unknown", F32, {n: 4})
    x = case.input("x", (3, 5))
    out = case.output("out", (3, 5), case.inputs[x])
    case.finish(t.RowPlan(sympy.Integer(3), sympy.Integer(5), (t.Store(out, (t.R, t.C), case.load(x, t.R, sympy.Mod(t.C, n)), F32),)))
    with pytest.raises(Refused, match="s9"):
        generate(case.spec)
