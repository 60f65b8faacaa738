"""Generated kernels on a device: every way of multiplying, with early starts, shared sums, prologues apart and int8 weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.integers import normalise
from dsi.ir.tolerances import disagreement

from tests.codegen import plans
from tests.codegen.interpret import load_module
from tests.codegen.quantised import quantised, rounded_rows
from tests.codegen.support import Case, bindings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GEMV = Choice("gemv", 1, 1, 16, 64, 256, 4, 1)
SKINNY = Choice("skinny", 16, 16, 64, 64, 128, 4, 3)
TILED = Choice("tiled", None, 64, 64, 32, 64, 4, 3)
RUNS = 20


def constant(case: Case) -> Case:
    case.spec.constants = frozenset(w.weight for s in case.spec.plan.segments for w in s.windows)
    return case


def laid_out(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the device, with its strides."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda").copy_(value)


def check(case: Case, choice: Choice, folder) -> None:
    """Runs a kernel many times without a pause: right, the same bits in every run, counters as they were."""
    (kernel,) = generate(case.spec, choice)
    folder.mkdir(exist_ok=True)
    module = load_module(kernel.source, folder)
    sizes = {s: sympy.Integer(v) for s, v in bindings(case).items()}
    number = lambda expr: int(normalise(sympy.sympify(expr)).xreplace(sizes))  # noqa: E731
    able = torch.cuda.get_device_capability() >= (9, 0)
    inputs = [laid_out(value) if isinstance(value, torch.Tensor) else value for value in case.inputs]
    results = []
    scratch = [
        (torch.zeros if space.zeroed else torch.empty)(number(space.size), dtype=getattr(torch, space.dtype), device="cuda")
        for space in kernel.workspaces
    ]
    for _ in range(RUNS):
        outputs = [laid_out(value) for value in case.outputs]
        groups = {"input": inputs, "output": outputs, "workspace": scratch}
        for position, launch in enumerate(kernel.launches):
            arguments = [number(a.expr) if a.kind == "size" else groups[a.kind][a.number] for a in launch.arguments]
            options = {**launch.constants, "num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
            if not able or position == 0:  # what the outputs start from was copied just now
                options.pop("launch_pdl", None)
            if not able:
                options["PDL"] = False
            getattr(module, launch.entry)[tuple(number(size) for size in launch.grid)](*arguments, **options)
        results.append(outputs)
    torch.cuda.synchronize()
    for space, left in zip(kernel.workspaces, scratch, strict=True):
        assert not space.zeroed or not left.any()
    for value, expected, spec in zip(results[0], case.expected, case.spec.outputs, strict=True):
        difference = disagreement(value.cpu(), expected)
        assert not difference, f"{case.name}, output {spec.name}: {difference}"
    for outputs in results[1:]:
        assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(results[0], outputs, strict=True))


CASES = {
    "llama_qkv": (lambda dtype, rows: plans.llama_qkv(dtype, rows, 1, heads=8, kv_heads=2, d=64, hidden=512, cache=20), False),
    "gpt2_qkv": (lambda dtype, rows: plans.gpt2_qkv(dtype, 1, rows, 4, 64), True),
    "gate_up": (lambda dtype, rows: plans.gate_up(dtype, rows, 512, 200), False),
    "projection": (lambda dtype, rows: plans.projection(dtype, rows, inner=520, columns=133), False),
    "projection_kn": (lambda dtype, rows: plans.projection(dtype, rows, inner=520, columns=136, kn=True), True),
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_linears(name, dtype, tmp_path):
    make, _ = CASES[name]
    small = {"block_n": 32, "block_k": 32} if dtype == F32 else {}
    for number, (rows, choice) in enumerate(
        [
            *((1, replace(GEMV, split=split)) for split in (1, 3)),
            (1, replace(GEMV, apart=True)),
            *((13, replace(SKINNY, split=split, **small)) for split in (1, 3)),
            (13, replace(SKINNY, apart=True, split=2, **small)),
            *((70, replace(TILED, block_m=32, apart=apart, **small)) for apart in (False, True)),
        ]
    ):
        check(constant(make(dtype, rows)), choice, tmp_path / str(number))


@pytest.mark.parametrize("group", [0, 128, 40], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("name", CASES)
def test_int8(name, group, tmp_path):
    make, kn = CASES[name]
    for number, (rows, choice) in enumerate(
        [
            (1, GEMV),
            (1, replace(GEMV, apart=True, split=2)),
            (13, replace(SKINNY, split=2)),
            *((13, replace(SKINNY, split=split, digits=2)) for split in (1, 3)),
            (70, TILED),
            (70, replace(TILED, digits=2)),
        ]
    ):
        case = quantised(lambda rows=rows: make(BF16, rows), group, kn)
        check(case, choice, tmp_path / str(number))


@pytest.mark.parametrize("group", [0, 16, 128], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("name", ["llama_qkv", "gate_up", "projection"])
def test_int8_as_words(name, group, tmp_path):
    make = (
        CASES[name][0]
        if name != "projection"
        else lambda dtype, rows: plans.projection(dtype, rows, inner=1040, columns=133, strided=False)
    )
    words = Choice("gemv", 1, 1, 2, 512, 256, 1, 1, digits=2)
    for number, (rows, choice) in enumerate(
        [
            (1, words),
            (1, replace(words, block_n=4, block_k=1024, num_warps=2, split=2)),
            (2, replace(words, max_rows=2, block_m=2, block_k=2048, num_warps=4)),
            (3, replace(words, max_rows=4, block_m=4, block_n=1)),
        ]
    ):
        (kernel,) = generate((case := quantised(lambda rows=rows: make(F16, rows), group)).spec, choice)
        assert "dot16(" in kernel.source
        check(case, choice, tmp_path / str(number))


@pytest.mark.parametrize("peel", ["last", "first"])
@pytest.mark.parametrize("name", CASES)
def test_peeled(name, peel, tmp_path):
    """A first step whose weights are read while the kernel before still runs."""
    make, kn = CASES[name]
    choice = replace(SKINNY, peel=peel)
    for number, more in enumerate(({"split": 3}, {"apart": True}, {"block_n": 32, "block_m": 32})):
        check(constant(make(BF16, 13)), replace(choice, **more), tmp_path / f"own{number}")
    for number, more in enumerate(({"split": 2}, {"digits": 2}, {"digits": 2, "split": 3})):
        check(quantised(lambda: make(BF16, 13), 128 if number else 40, kn), replace(choice, **more), tmp_path / f"int8{number}")


@pytest.mark.parametrize("block_k", [128, 32], ids=["one_step", "steps"])
@pytest.mark.parametrize("rows", [1, 2])
def test_layer_norm_behind_the_product(rows, block_k, tmp_path):
    """Sums that need no rows are made while the kernel before still runs, or beside the products."""
    for number, (block_n, warps) in enumerate(((4, 1), (2, 4), (8, 8))):
        choice = Choice("gemv", rows, rows, block_n, block_k, 128, warps, deferred=True)
        for name, case in (("gpt2", plans.gpt2_qkv(F16, 1, rows)), ("neox", plans.neox_qkv(BF16, 1, rows, d=16, rotary=16))):
            case.spec.constants = frozenset(range(1, len(case.inputs)))
            assert "add_each" in generate(case.spec, choice)[0].source
            check(case, choice, tmp_path / f"{name}{number}")


def test_rows_rounded_to_int8(tmp_path):
    for number, (rows, choice) in enumerate([(1, GEMV), (13, replace(SKINNY, split=3)), (70, TILED)]):
        case = rounded_rows(quantised(lambda rows=rows: plans.projection(BF16, rows, inner=520, columns=133)))
        check(case, choice, tmp_path / str(number))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("live", [(1, 600), (129, 77), (0, 640)], ids=str)
@pytest.mark.parametrize("heads, d", [((4, 1), 128), ((2, 2), 64), ((2, 2), 152)], ids=str)
def test_attention_over_a_cache(dtype, live, heads, d, tmp_path):
    """Keys over several programs, with and without matrix units, live keys behind padding."""
    j = torch.arange(640)
    mask = torch.stack([(j >= 640 - some) if number else (j < some) for number, some in enumerate(live)])[:, None, None]
    case = plans.attention(dtype, 2, *heads, 1, 640, d, mask=mask, sinks=live == (129, 77))
    rows = heads[0] // heads[1]
    parts = 128 if d == 152 else 1
    for block_m, split, block_s in ((16, 1, 512), (16, 8, 128), (rows, 4, 256), (rows, 32, 1)):
        narrow = dtype == F32 or d == 152
        block_n = 32 if narrow or split == 32 else 64
        prefetch = 128 if block_s == 1 else 0
        choice = Choice("attention_decode", None, block_m, block_n, parts, block_s, 8, 1 if block_s == 1 else 3, split, prefetch)
        check(case, choice, tmp_path)


@pytest.mark.parametrize("live", ["parts", "seen", "dealt"])
@pytest.mark.parametrize("lives", [(0, 5), (128, 129), (640, 300)], ids=str)
@pytest.mark.parametrize("heads, d, dtype", [((2, 2), 64, F16), ((8, 2), 128, BF16)], ids=str)
def test_attention_whose_programs_know_who_has_keys(live, lives, heads, d, dtype, tmp_path):
    """No part of a sequence has keys, one alone, or several: one block of keys a program and several, a softmax a warp."""
    j = torch.arange(640)
    mask = torch.stack([(j >= 640 - some) if number else (j < some) for number, some in enumerate(lives)])[:, None, None]
    case = plans.attention(dtype, 2, *heads, 1, 640, d, mask=mask)
    alone = Choice("attention_decode", None, 1 if heads[0] == heads[1] else 16, 128, 1, 1024, 8, 1, 8, live=live)
    check(case, replace(alone, early=True, by_warp=True), tmp_path)
    check(case, replace(alone, early=True, by_warp=True, overlaps=True, prefetch=2 * d, hint=True), tmp_path)
    check(case, replace(alone, block_n=64, split=4, num_stages=2 if alone.block_m == 16 else 3), tmp_path)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": "bool"}, {"causal": True, "window": 70, "softcap": 20.0, "sinks": True}], ids=str
)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_attention_of_a_prompt(options, d, tmp_path):
    """Blocks that all rows see and the others, at sizes that no block divides."""
    case = plans.attention(BF16, 2, 4, 2, 333, 333, d, **options)
    for block_m, block_n, warps in ((64, 64, 4), (128, 64, 8)):
        check(case, Choice("attention", None, block_m, block_n, 64 if d == 80 else 1, 128, warps, 2), tmp_path)
