"""Skinny kernels whose first step is peeled: its weights are loaded before the wait, and multiplied behind the loop or in its first
turn."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import sympy
import torch
from dsi.codegen import Choice, cost, generate
from dsi.codegen.deferred import peel_of, peeled
from dsi.codegen.devices import A100, H200
from dsi.codegen.linear_choices import PEELED, admissible
from dsi.codegen.linear_cost import linear_work, registers, resident, shared_bytes
from dsi.ir import tile as t

from bench import ptx

from . import plans
from .quantised import constant, quantised, rounded_rows
from .support import cast, check, const, op, resources, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SKINNY = Choice("skinny", 16, 16, 32, 16, 32, 4, 2)
LLAMA_8B = dict(heads=32, kv_heads=8, d=128, hidden=4096, cache=1024)
# name -> (case by dtype, rows and contracted elements, whether its weights are stored [K, N])
CASES = {
    "llama_qkv": (lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20), False),
    "llama_qkv_norms": (lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20, qk_norm=True), False),
    "gpt2_qkv": (lambda dtype, rows, k: plans.gpt2_qkv(dtype, 1, rows, heads=3, d=k // 3), True),
    "neox_qkv": (lambda dtype, rows, k: plans.neox_qkv(dtype, 1, rows, hidden=k), False),
    "gate_up": (lambda dtype, rows, k: plans.gate_up(dtype, rows, k), False),
    "symbolic": (lambda dtype, rows, k: plans.gate_up(dtype, rows, k, symbolic=True), False),
    "projection": (lambda dtype, rows, k: plans.projection(dtype, rows, k, columns=33), False),
    "projection_kn": (lambda dtype, rows, k: plans.projection(dtype, rows, k, columns=33, kn=True), True),
}


def drawn(seed: int):
    """A few odd sizes: rows, contracted elements, and a choice that has several steps."""
    source = random.Random(seed)
    while True:
        rows, k = source.choice((2, 3, 5, 8, 13, 16)), source.choice((48, 51, 66, 75, 96))
        choice = replace(SKINNY, block_k=source.choice((16, 32)), block_m=source.choice((16, 32)), split=source.choice((1, 1, 2, 3)))
        choice = replace(choice, peel=source.choice(("last", "first")), apart=source.random() < 0.3)
        if peel_of(sympy.Integer(k), choice):
            return rows, k, choice


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_peeled(interpreter, name, dtype, seed):
    rows, k, choice = drawn(hash((sorted(CASES).index(name), dtype.itemsize, dtype == BF16, seed)))
    case = constant(CASES[name][0](dtype, rows, k))
    assert peeled(case.spec, choice)
    check(case, interpreter, choice=choice)


@pytest.mark.parametrize("group", [0, 8, 20, 32], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("name", CASES)
def test_peeled_int8(interpreter, name, group):
    """Converted or beside digits; groups of a row, of less than a step, of more, and of no multiple of it."""
    make, kn = CASES[name]
    number = sorted(CASES).index(name)
    rows, k, choice = drawn(hash((group, number)))
    case = constant(quantised(lambda: make(BF16, rows, k), group, kn))
    if (number + group // 8) % 2:
        choice = replace(choice, digits=2, block_k=32, split=1)  # as long as int8 on the matrix units needs a step
        assert peeled(case.spec, choice)
    check(case, interpreter, choice=choice)


@pytest.mark.parametrize("peel", ["last", "first"])
@pytest.mark.parametrize("group", [0, 20], ids=lambda group: f"group{group}")
def test_peeled_rows_rounded_to_int8(interpreter, group, peel):
    for split in (1, 3):
        case = constant(rounded_rows(quantised(lambda: plans.projection(BF16, 13, inner=72, columns=33), group)))
        check(case, interpreter, choice=replace(SKINNY, split=split, peel=peel))


@pytest.mark.parametrize("peel", ["last", "first"])
def test_programs_with_one_step_or_none(interpreter, peel):
    """Steps of 16: by four programs two, two, one and none; by four one each; by two, two and one, which is cut off."""
    for inner, split in ((72, 4), (40, 4), (35, 2)):
        case = constant(plans.projection(BF16, 3, inner=inner, columns=33))
        choice = replace(SKINNY, split=split, peel=peel)
        assert peeled(case.spec, choice) in ("last", "")  # a loop without turns has no first one
        check(case, interpreter, choice=choice)


def test_a_sum_has_the_same_bits_whoever_is_last(interpreter):
    case = constant(plans.projection(F32, 5, inner=75, columns=33))
    for peel in ("last", "first"):
        one, two = (run(case, interpreter, choice=replace(SKINNY, split=2, peel=peel)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("peel", ["last", "first"])
def test_rows_hidden_by_bools(interpreter, peel):
    """LLVM aborts, and the process with it, on assembly over bools: they stay as they are loaded. Also those along one axis."""
    for along in ((t.R, t.K), (t.K,), (t.R,)):
        case = constant(plans.projection(BF16, 5, inner=72, columns=33))
        x, weight, bias, residual = range(4)
        shape = tuple(case.inputs[x].shape[{t.R: 0, t.K: 1}[symbol]] for symbol in along)
        shown = case.input("shown", shape, torch.bool, values=torch.rand(shape, generator=case.generator) < 0.5)
        value = op("where", case.load(shown, *along), case.spec.plan.x, const(0.0))
        case.spec.plan = replace(case.spec.plan, x=cast(value, BF16))
        case.spec.inputs = case.input_specs
        seen = case.real(shown)[:, None] if along == (t.R,) else case.real(shown)
        wanted = torch.where(seen, case.real(x), 0.0) @ case.real(weight).T + case.real(bias) + case.real(residual)
        case.expected[0] = wanted.to(BF16).reshape(case.outputs[0].shape)
        text = source(case, replace(SKINNY, peel=peel))
        assert "weight_held = late(weight, 2, PDL)" in text and not re.search(r"late\(\w+, 4, PDL\)", text)
        check(case, interpreter, choice=replace(SKINNY, peel=peel))


# ------------------------------------------------------------------------------------------------------------------------ the text


def source(case, choice):
    (kernel,) = generate(case.spec, choice)
    return kernel.source


@pytest.mark.parametrize("peel", ["last", "first"])
def test_all_weights_and_nothing_else_are_read_before_the_wait(peel):
    case = constant(plans.llama_qkv(BF16, 1, 3, hidden=96))
    for branch in source(case, replace(SKINNY, peel=peel)).split("# segment ")[1:]:
        before = branch[: branch.index("gdc_wait()")]
        read = re.findall(r"tl\.load\((\w+)_ptr", before)
        assert len(read) == 2 and {name.split("_")[1] for name in read} == {"weight"}, read  # two parts of a weight
        assert "tl.store" not in before


@pytest.mark.parametrize(
    "case, choice",
    [
        (lambda: constant(plans.projection(BF16, 3, inner=16, columns=33)), SKINNY),  # one step
        (lambda: constant(plans.projection(BF16, 3, inner=32, columns=33)), replace(SKINNY, split=2)),  # a step each
        (lambda: plans.projection(BF16, 3, inner=72, columns=33), SKINNY),  # a weight that the graph may write
        (lambda: constant(plans.projection(BF16, 1, inner=72, columns=33)), Choice("gemv", 1, 1, 16, 16, 64, 4, 1)),
        (lambda: constant(plans.projection(BF16, 70, inner=72, columns=33)), Choice("tiled", None, 16, 32, 16, 32, 4, 2)),
    ],
)
def test_without_effect(case, choice):
    case = case()
    for peel in ("last", "first"):
        assert not peeled(case.spec, replace(choice, peel=peel))
        assert source(case, replace(choice, peel=peel)) == source(case, choice)


def test_another_way_is_refused():
    with pytest.raises(ValueError, match="peels 'middle'; known ways: last, first"):
        source(constant(plans.projection(BF16, 3, inner=72, columns=33)), replace(SKINNY, peel="middle"))


def test_a_weight_of_one_segment_that_the_graph_writes_keeps_all_in_the_loop():
    case = constant(plans.llama_qkv(BF16, 1, 3, hidden=96))
    first = case.spec.plan.segments[0].windows[0].weight
    case.spec.constants = case.spec.constants - {first}
    assert "tl.load" not in source(case, replace(SKINNY, peel="last")).split("gdc_wait()")[0]


# --------------------------------------------------------------------------------------------------------------------- candidates


def projection(rows, inner=4096, columns=4096):
    with torch.device("meta"):
        return constant(plans.projection(BF16, rows, inner, columns, strided=False)).spec


def test_a_few_candidates_are_peeled_and_none_is_taken_untried():
    found = cost.candidates(projection(8))
    copies = [choice for choice in found if choice.peel]
    assert len(copies) == PEELED and all(replace(choice, peel="") in found for choice in copies)
    assert not found[0].peel and any(choice.peel for choice in found[:10])
    times = [cost.predict(projection(8), choice) for choice in found[1:]]
    assert times == sorted(times)
    assert len(found) <= 40 and len(set(found)) == len(found)
    assert not any(choice.peel for choice in cost.candidates(projection(1)) if choice.schedule == "gemv")


def test_no_candidate_is_peeled_where_that_has_no_effect():
    with torch.device("meta"):
        written = plans.projection(BF16, 8, 4096, 4096, strided=False).spec
    assert not any(choice.peel for choice in cost.candidates(written))
    assert not any(choice.peel for choice in cost.candidates(projection(128)))
    assert not any(choice.peel for choice in cost.candidates(projection(8), device=A100))  # no kernel starts early there


def test_predictions_and_resources_count_the_held_tile():
    spec = projection(8)
    work, plain = linear_work(spec, 8, {}), Choice("skinny", None, 8, 32, 512, 4096, 4, 4)
    last, first = (replace(plain, peel=peel) for peel in ("last", "first"))
    tile = (32 + 8) * 512 * 2
    assert registers(work, last) == registers(work, plain) + tile // (4 * 128) == registers(work, first)
    assert shared_bytes(work, last) == shared_bytes(work, plain) == shared_bytes(work, first) - tile
    assert resident(work, last, H200) <= resident(work, plain, H200)
    gain = cost.predict(spec, plain) - cost.predict(spec, last)
    assert 0 < gain <= 0.7e-6
    assert cost.predict(spec, plain, A100) == cost.predict(spec, last, A100)
    with torch.device("meta"):
        int8 = constant(quantised(lambda: plans.gate_up(BF16, 8, 4096, 14336))).spec
    digits = Choice("skinny", None, 8, 64, 128, 4096, 4, 3, digits=2)  # behind the kernel of the rows
    assert 0.7e-6 < cost.predict(int8, digits) - cost.predict(int8, replace(digits, peel="first")) < 3e-6
    wide = replace(plain, block_n=128, block_k=512, num_stages=2, peel="last")
    assert not admissible(work, wide, 8, H200) and admissible(work, wide, 8, H200, same=True)


def test_what_is_peeled_is_written_down_and_read_again(tmp_path):
    from dsi.codegen import defaults

    file = tmp_path / "defaults.json"
    choice = Choice("skinny", None, 8, 32, 512, 4096, 4, 3, peel="first")
    defaults.write(file, "H200", [defaults.entry(projection(8), choice, 9.5)])
    (entry,) = defaults.read(file)["H200"]
    assert entry.choice["peel"] == "first"
    assert "peel" not in defaults.entry(projection(8), replace(choice, peel=""), 9.5).choice


# ----------------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("peel", ["last", "first"])
@pytest.mark.parametrize(
    "name, choice", [("projection", Choice("skinny", 8, 8, 32, 256, 256, 4, 3)), ("gate_up", Choice("skinny", 8, 16, 64, 128, 256, 4, 3))]
)
def test_tiles_are_loaded_before_the_wait_and_stored_behind_it(name, choice, peel):
    """In the compiled code, where Triton could have moved them. The loop still copies as many stages ahead."""
    with torch.device("meta"):
        made = {
            "projection": lambda: plans.projection(BF16, 8, 4096, 4096, strided=False),
            "gate_up": lambda: plans.gate_up(BF16, 8, 4096, 14336),
        }
        case = constant(made[name]())
    texts, counts = {}, []
    for way in ("", peel):
        (kernel,) = generate(case.spec, replace(choice, peel=way))
        used = resources(case, kernel, 90, texts=texts)
        assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= 227 * 1024, used
        before, after = texts["ptx"].split("griddepcontrol.wait", 1)
        held = choice.block_n * choice.block_k * (2 if name == "gate_up" else 1) * 2 // (16 * 32 * choice.num_warps)
        assert len(re.findall(r"ld\.global\S*\.v4", before)) == (held if way else 0)
        assert "st.shared" not in before
        counts.append((len(re.findall(r"cp\.async\.c[ag]", after)), ptx.busiest(texts["ptx"]).loads))
    assert counts[0] == counts[1]  # before the loop, and in it
