"""The ways of multiplying few rows, with every prologue and epilogue: ahead of the wait, a tile ahead in the loop, shared
sums."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.ir import tile as t
from torch import nn

import dsi
from bench import ptx

from . import plans
from .support import check, resources

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = {
    "llama_qkv": lambda dtype, rows: plans.llama_qkv(dtype, 1, rows, cache=20),
    "gpt2_qkv": lambda dtype, rows: plans.gpt2_qkv(dtype, 1, rows),
    "neox_qkv": lambda dtype, rows: plans.neox_qkv(dtype, 1, rows),
    "gate_up": lambda dtype, rows: plans.gate_up(dtype, rows),
    "projection": lambda dtype, rows: plans.projection(dtype, rows, inner=72, columns=33),
    "projection_kn": lambda dtype, rows: plans.projection(dtype, rows, inner=72, columns=33, kn=True),
}
GEMV = Choice("gemv", 1, 1, 16, 16, 64, 4, 1)
SKINNY = Choice("skinny", 16, 16, 32, 16, 32, 4, 2)


def constant(case):
    """The case with its weights declared to be constants, so that they are read ahead."""
    case.spec.constants = frozenset(w.weight for s in case.spec.plan.segments for w in s.windows)
    return case


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_few_rows(interpreter, name, split, dtype):
    for rows, choice in ((1, GEMV), (3, replace(GEMV, max_rows=4, block_m=4)), (3, SKINNY), (13, SKINNY)):
        check(constant(CASES[name](dtype, rows)), interpreter, choice=replace(choice, split=split))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_prologues_apart(interpreter, name, dtype):
    """The prologue by a kernel of its own, which also stores what of it leaves the region."""
    for rows, choice in ((1, GEMV), (13, SKINNY), (13, Choice("tiled", None, 16, 32, 16, 32, 4, 2))):
        case = constant(CASES[name](dtype, rows))
        kernel, _ = text(case, replace(choice, apart=True))
        assert len(kernel.launches) == (1 if name.startswith("projection") else 2)  # a plain load has nothing to compute
        check(case, interpreter, kernel)


def test_a_share_without_elements(interpreter):
    """More programs than steps: some have nothing to sum."""
    case = constant(plans.projection(F32, 2, inner=40, columns=33))
    check(case, interpreter, choice=replace(SKINNY, split=4))


def text(case, choice):
    (kernel,) = generate(constant(case).spec, choice)
    return kernel, kernel.source


def test_only_constants_are_read_before_the_wait():
    case = plans.gate_up(F16, 1, 64, 96)
    _, source = text(case, GEMV)
    before = source[: source.index("gdc_wait()")]
    assert "tl.load(gate_weight_ptr" in before and "tl.load(up_weight_ptr" in before
    assert "x_ptr +" not in before and "delta_ptr +" not in before and "tl.store" not in before
    case.spec.constants = frozenset()  # a weight that the graph computes
    (kernel,) = generate(case.spec, GEMV)
    assert "tl.load" not in kernel.source[: kernel.source.index("gdc_wait()")]


def test_every_kernel_waits_before_it_stores():
    for name, make in CASES.items():
        for choice in (GEMV, replace(GEMV, split=2), SKINNY, Choice("tiled", 1, 16, 32, 16, 32, 4, 2)):
            _, source = text(make(F16, 1), choice)
            body = source[source.index("gdc_launch_dependents()\n") :]
            stores = [at for at in range(len(body)) if body.startswith("tl.store", at)]
            assert stores and body.index("gdc_wait()") < stores[0], name


@pytest.mark.parametrize(
    "name, choice",
    [
        ("gate_up", Choice("gemv", 1, 1, 8, 256, 4096, 8, 1)),
        ("gate_up", Choice("skinny", 16, 16, 64, 128, 256, 4, 3, 1)),
        ("gate_up", Choice("skinny", 16, 16, 64, 128, 256, 4, 3, 2)),
        ("llama_qkv", Choice("skinny", 16, 16, 64, 128, 256, 4, 3)),
        ("projection_kn", Choice("gemv", 1, 1, 32, 128, 512, 8, 1, 4)),
    ],
)
def test_compiles_for_hopper(name, choice):
    large = {
        "gate_up": lambda: plans.gate_up(BF16, choice.max_rows, 4096, 14336),
        "llama_qkv": lambda: plans.llama_qkv(BF16, choice.max_rows, 1, heads=32, kv_heads=8, d=128, hidden=4096, cache=1024),
        "projection_kn": lambda: plans.projection(BF16, choice.max_rows, 3072, 768, kn=True),
    }
    with torch.device("meta"):
        case = constant(large[name]())
    (kernel,) = generate(case.spec, choice)
    assert kernel.launches[0].constants["PDL"] is True and kernel.launches[0].options["launch_pdl"] is True
    used = resources(case, kernel, 90)
    assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= 227 * 1024, used
    assert isinstance(case.spec.plan, t.LinearPlan)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["llama_qkv", "gpt2_qkv", "neox_qkv", "gate_up"])
def test_norms_whose_weight_has_two_bytes_a_thread(interpreter, name, dtype):
    """It is loaded for every row, as x is: two bytes are no asynchronous copy."""
    for rows, choice in ((3, SKINNY), (13, Choice("tiled", None, 16, 32, 32, 32, 1, 2))):
        case = constant(CASES[name](dtype, rows))
        kernel, source = text(case, replace(choice, block_k=32, num_warps=1))
        norm = next(tensor.name for tensor in case.spec.inputs if tensor.name in ("norm_weight", "ln_weight"))
        assert f"tl.load(tl.broadcast_to({norm}_ptr + k" in source
        check(case, interpreter, kernel)


@pytest.mark.parametrize("choice", [Choice("skinny", 4, 8, 32, 128, 256, 4, 3, 4), Choice("skinny", 16, 16, 64, 256, 256, 8, 3, 2)])
def test_no_step_waits_for_a_norms_weight(choice):
    with torch.device("meta"):
        case = constant(plans.llama_qkv(BF16, choice.max_rows, 1, heads=32, kv_heads=8, d=128, hidden=4096, cache=1024))
    (kernel,), texts = generate(case.spec, choice), {}
    used = resources(case, kernel, 90, texts=texts)
    assert used["STACK"] == used["LOCAL"] == 0
    loop = ptx.busiest(texts["ptx"])
    assert loop.again and min(loop.loads) >= 4  # bytes, of which there are asynchronous copies


@pytest.mark.parametrize("schedule", ["skinny", "tiled"])
def test_one_row_of_a_norm_meets_the_matrix_units(schedule):
    """Whose statistics are of one row, where a block has 16."""
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 48, bias=False)).half().eval()
    (region,) = dsi.explain(model, torch.randn(1, 64).half()).regions
    (kernel,) = generate(region.spec, Choice(schedule, None, 16, 32, 32, 64, 4, 2))
    assert resources(SimpleNamespace(spec=region.spec), kernel, 90)["STACK"] == 0


class Looked(nn.Module):
    """A table looked up by indices that the graph computes: before the product, behind it, and in a norm's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(64, 64))
        self.first, self.second, self.third = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, z, a, b, c):
        index = a + b * c
        u = self.first(z * self.table[index])
        v = self.second(torch.relu(u) * self.table[index])
        return self.third(v) + self.table[index], index


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", [{}, {"apart": True}, {"block_k": 32}], ids=str)
def test_what_says_where_a_constant_is_read_must_be_constant_too(rows, options):
    indices = [torch.randint(0, 3, (rows,)) for _ in range(3)]
    regions = dsi.explain(Looked().half().eval(), torch.randn(rows, 64).half(), *indices).regions
    early = 0
    for region in regions:
        if region.kind != "linear":
            continue
        constants = {region.spec.inputs[number].name for number in region.spec.constants}
        (kernel,) = generate(region.spec, replace(Choice("gemv", rows, rows, 8, 64, 64, 4, 1), **options))
        for function in kernel.source.split("@triton.jit")[1:]:
            read = re.findall(r"tl\.load\((\w+)_ptr", function.split("gdc_wait()")[0])
            early += len(read)
            assert set(read) <= constants, (region.name, options)
    assert early  # weights are
