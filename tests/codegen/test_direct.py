"""Skinny kernels whose weights go from memory straight into the matrix units' registers."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, cost, generate
from dsi.codegen.devices import H200
from dsi.codegen.direct import refusal
from dsi.codegen.linear_choices import DIRECT as DIRECT_CHOICES
from dsi.codegen.linear_choices import admissible
from dsi.codegen.linear_cost import linear_work, shared_bytes
from dsi.ir import tile as t

from bench import ptx

from . import plans
from .quantised import constant, quantised
from .support import cast, check, const, op, resources, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DIRECT = Choice("skinny", 16, 16, 16, 64, 32, 2, 1, direct=True)
CASES = {
    "llama_qkv": lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20),
    "llama_qkv_norms": lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20, qk_norm=True),
    "neox_qkv": lambda dtype, rows, k: plans.neox_qkv(dtype, 1, rows, hidden=k),
    "gate_up": lambda dtype, rows, k: plans.gate_up(dtype, rows, k),
    "symbolic": lambda dtype, rows, k: plans.gate_up(dtype, rows, k, symbolic=True),
    "projection": lambda dtype, rows, k: plans.projection(dtype, rows, k, columns=33),
}


def drawn(seed: int):
    """A few odd sizes: rows, contracted elements, and a choice that has one step or several."""
    source = random.Random(seed)
    warps = source.choice((1, 2, 4))
    rows, k = source.choice((2, 3, 5, 8, 13, 16)), source.choice((64, 96, 132, 204, 256, 300))
    block_k = 32 * warps * source.choice((1, 1, 2))
    choice = replace(DIRECT, block_k=block_k, num_warps=warps, block_m=16 if rows > 8 else source.choice((8, 16)))
    choice = replace(choice, block_n=source.choice((16, 32)), split=source.choice((1, 1, 2, 3)), apart=source.random() < 0.2)
    return rows, k, replace(choice, max_rows=choice.block_m) if choice.split > 1 else choice


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_direct(interpreter, name, dtype, seed):
    rows, k, choice = drawn(hash((sorted(CASES).index(name), dtype == BF16, seed)))
    case = CASES[name](dtype, rows, k)
    check(constant(case) if seed % 2 else case, interpreter, choice=choice)


def test_a_sum_has_the_same_bits_whoever_is_last(interpreter):
    case = constant(plans.projection(BF16, 5, inner=300, columns=33))
    one, two = (run(case, interpreter, choice=replace(DIRECT, split=2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_programs_with_one_step_or_none(interpreter):
    """Steps of 64: by four programs two, two, one and none; by two, one each; by one, one that is cut off."""
    for inner, split in ((300, 4), (100, 2), (40, 1)):
        check(constant(plans.projection(BF16, 3, inner=inner, columns=33)), interpreter, choice=replace(DIRECT, split=split))


def test_rows_that_are_gathered_or_hidden(interpreter):
    """What of the rows cannot be asked for a step ahead is loaded where it is used."""
    for along in ((t.R, t.K), (t.K,), (t.R,)):
        case = constant(plans.projection(BF16, 5, inner=132, columns=33))
        x, weight, bias, residual = range(4)
        shape = tuple(case.inputs[x].shape[{t.R: 0, t.K: 1}[symbol]] for symbol in along)
        shown = case.input("shown", shape, torch.bool, values=torch.rand(shape, generator=case.generator) < 0.5)
        order = torch.randperm(5, generator=case.generator)
        which = case.input("which", (5,), torch.int64, values=order)
        gathered = t.Load(x, (case.load(which, t.R), t.K), BF16)
        value = op("where", case.load(shown, *along), gathered, const(0.0))
        case.spec.plan = replace(case.spec.plan, x=cast(value, BF16))
        case.spec.inputs = case.input_specs
        seen = case.real(shown)[:, None] if along == (t.R,) else case.real(shown)
        rows = case.real(x)[order]
        wanted = torch.where(seen, rows, 0.0) @ case.real(weight).T + case.real(bias) + case.real(residual)
        case.expected[0] = wanted.to(BF16).reshape(case.outputs[0].shape)
        check(case, interpreter, choice=DIRECT)


# ------------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "case, fields, why",
    [
        (lambda: plans.projection(BF16, 3, inner=64), {"schedule": "tiled"}, "a way of the schedule skinny, not of tiled"),
        (lambda: plans.projection(BF16, 3, inner=64), {"num_stages": 3}, "num_stages=1, not 3"),
        (lambda: plans.projection(BF16, 3, inner=64), {"num_warps": 4}, "block_k a multiple of 128 .* they are 64, 16, 16"),
        (lambda: plans.projection(BF16, 3, inner=64), {"block_n": 8}, "block_n of 16 .* they are 64, 8, 16"),
        (lambda: plans.projection(F32, 3, inner=64), {}, "fp16 and bf16, not torch.float32"),
        (lambda: plans.projection(BF16, 3, inner=64, kn=True), {}, "contiguous along the contracted dimension, which weight does not"),
        (lambda: quantised(lambda: plans.projection(BF16, 3, inner=64)), {}, "weights of the rows' dtype; weight is torch.int8"),
        (lambda: quantised(lambda: plans.projection(BF16, 3, inner=64)), {"digits": 2}, "not int8"),
    ],
)
def test_what_cannot_be_direct_is_refused(case, fields, why):
    with pytest.raises(ValueError, match=why):
        generate(case().spec, replace(DIRECT, **fields))


def test_peeling_has_no_effect():
    case = constant(plans.projection(BF16, 3, inner=192))
    (plain,), (peeled,) = (generate(case.spec, replace(DIRECT, peel=peel)) for peel in ("", "last"))
    assert plain.source == peeled.source


# --------------------------------------------------------------------------------------------------------------------- candidates


def on_meta(make, rows):
    with torch.device("meta"):
        return constant(make(rows))


MODEL = {
    "projection": lambda rows: plans.projection(BF16, rows, 14336, 4096, strided=False),
    "gate_up": lambda rows: plans.gate_up(BF16, rows, 4096, 14336),
    "qkv": lambda rows: plans.llama_qkv(BF16, 1, rows, heads=32, kv_heads=8, d=128, hidden=4096, cache=1024),
}


def test_a_few_candidates_are_direct_where_that_can_be():
    for make in MODEL.values():
        for rows in (2, 8, 16):
            spec = on_meta(make, rows).spec
            found = [choice for choice in cost.candidates(spec) if choice.direct]
            assert 0 < len(found) <= DIRECT_CHOICES
            for choice in found:
                assert not refusal(spec, choice) and admissible(linear_work(spec, rows, {}), choice, rows, H200)
    refused = [
        plans.projection(BF16, 1, 4096, 4096),
        plans.projection(BF16, 32, 4096, 4096),
        plans.projection(F32, 8, 4096, 4096),
        plans.projection(BF16, 8, 4096, 4096, kn=True),
        plans.projection(BF16, 8, 4100, 4096),  # not 16 bytes at a time
        quantised(lambda: plans.projection(BF16, 8, 4096, 4096)),
    ]
    for case in refused:
        assert not any(choice.direct for choice in cost.candidates(case.spec))


def test_another_linear_has_no_direct_choice_where_that_cannot_be():
    choice = replace(DIRECT, block_m=8, max_rows=8, block_k=256, num_warps=8)
    for spec, allowed in (
        (on_meta(MODEL["projection"], 8).spec, True),
        (on_meta(lambda rows: plans.projection(BF16, rows, 4096, 4096, kn=True), 8).spec, False),
        (on_meta(lambda rows: plans.projection(F32, rows, 4096, 4096), 8).spec, False),
    ):
        assert admissible(linear_work(spec, 8, {}), choice, 8, H200) == allowed


# ----------------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("name", MODEL)
def test_no_shared_memory_before_the_sums_meet(name, rows):
    """In the compiled code: a loop of loads of 16 bytes and products, without a barrier between threads or a trip through memory."""
    case = on_meta(MODEL[name], rows)
    choice = next(choice for choice in cost.candidates(case.spec) if choice.direct)
    (kernel,) = generate(case.spec, choice)
    texts: dict[str, str] = {}
    used = resources(case, kernel, 90, texts=texts)
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert used["SHARED"] <= shared_bytes(linear_work(case.spec, rows, {}), choice)
    found = [loop for loop in ptx.loops(texts["ptx"]) if loop.again and loop.products]
    assert found
    for loop in found:
        assert set(loop.loads) == {16} and loop.exchanges == 0, loop
    if len(found) == 1 and name == "projection":  # nothing but the loop stands before its last product
        before = texts["ptx"][: texts["ptx"].rindex("mma.sync")]
        assert not re.search(r"ldmatrix|ld\.shared|shfl|bar\.sync", before)
