"""The cost model and the choices made by it."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import sympy
import torch
from dsi.codegen import Choice, cost, defaults, generate, linear_cost
from dsi.codegen.devices import A100, DEVICES, H200, SMALLER, find_device
from dsi.codegen.linear_choices import SCRATCH
from dsi.codegen.linear_cost import linear_work, shared_bytes
from dsi.codegen.roofline import assumptions
from torch import nn
from torch.utils._sympy.functions import FloorDiv

import dsi

from . import plans
from .quantised import quantised
from .support import resources

F16, BF16 = torch.float16, torch.bfloat16


def on_meta(make):
    with torch.device("meta"):
        return make().spec


LLAMA = dict(heads=32, kv_heads=8, d=128, hidden=4096, cache=1024)


def test_bytes_of_a_projection_are_counted_once_each():
    spec = on_meta(lambda: plans.projection(torch.float16, 1, inner=4096, columns=1024, strided=False))
    assert cost.traffic(spec) == 2 * (4096 + 1024 * 4096 + 3 * 1024)
    assert cost.work(spec.plan) == 2 * 4096 * 1024


def test_a_gathered_table_counts_what_is_gathered():
    spec = on_meta(lambda: plans.embedding(torch.float16, 1, 2, vocabulary=50257, hidden=768))
    assert cost.traffic(spec) < 4 * 2 * 768 * 2 + 1000


# name -> (rows -> specification): the linears of models that people deploy, from 768 x 768 to a head of 128,256 columns.
SHAPES = {
    "qkv_8b": lambda rows: plans.llama_qkv(BF16, rows, 1, **LLAMA),
    "qkv_8b_norms": lambda rows: plans.llama_qkv(BF16, rows, 1, qk_norm=True, **LLAMA),
    "out_8b": lambda rows: plans.projection(BF16, rows, 4096, 4096, strided=False),
    "gate_up_8b": lambda rows: plans.gate_up(BF16, rows, 4096, 14336),
    "down_8b": lambda rows: plans.projection(BF16, rows, 14336, 4096, strided=False),
    "head_8b": lambda rows: plans.projection(BF16, rows, 4096, 128256, strided=False),
    "qkv_gpt2": lambda rows: plans.gpt2_qkv(F16, rows, 1, 12, 64),
    "out_gpt2": lambda rows: plans.projection(F16, rows, 768, 768, kn=True, strided=False),
    "mlp_gpt2": lambda rows: plans.projection(F16, rows, 3072, 768, kn=True, strided=False),
    "qkv_xl": lambda rows: plans.gpt2_qkv(F16, rows, 1, 25, 64),
    "wide_fp32": lambda rows: plans.projection(torch.float32, rows, 2048, 2048, strided=False),
}
ROWS = (1, 4, 8, 16, 64, 128, 512, 2048)


@pytest.fixture(scope="module", params=SHAPES)
def listed(request):
    """(specification, work, candidates) of one shape at every number of rows."""
    found = []
    for rows in ROWS:
        spec = on_meta(lambda rows=rows: SHAPES[request.param](rows))
        found.append((spec, linear_work(spec, rows, {}), cost.candidates(spec)))
    return found


def test_candidates_are_few_different_and_in_order(listed):
    for spec, work, found in listed:
        assert 5 <= len(found) <= 40 and len(set(found)) == len(found), work.rows
        times = [cost.predict(spec, choice) for choice in found]
        assert times == sorted(times)


def test_candidates_fit_the_processor(listed):
    for _, work, found in listed:
        for choice in found:
            assert linear_cost.shared_bytes(work, choice) <= H200.shared
            sums = choice.block_m * choice.block_n * (choice.block_k if choice.schedule == "gemv" else 1) * work.accumulators
            assert choice.split >= 1 and sums <= 32 * choice.num_warps * 128 and choice.block_n >= work.held
            assert all(b > 0 and b & (b - 1) == 0 for b in (choice.block_m, choice.block_n, choice.block_k, choice.block_s))


def test_schedules_keep_to_their_rows(listed):
    for _, work, found in listed:
        schedules = {choice.schedule for choice in found}
        if work.wide:
            assert schedules == ({"gemv"} if work.rows <= 4 else {"tiled"})
        elif work.rows <= 4:
            assert "skinny" in schedules and schedules <= {"gemv", "skinny"}
            assert work.rows > 1 or "gemv" in schedules
        else:
            assert schedules == ({"skinny"} if work.rows <= 64 else {"tiled"})
        assert all(choice.split == 1 for choice in found if choice.schedule == "tiled")


def test_one_block_holds_all_rows_where_programs_share_a_sum(listed):
    assert all(choice.block_m >= work.rows for _, work, found in listed for choice in found if choice.schedule != "tiled")


def test_the_best_keeps_the_device_busy(listed):
    """Enough programs for every processor, or as many as there are steps to share."""
    for _, work, found in listed:
        best = found[0]
        tiles = work.columns * work.inner * math.ceil(work.rows / best.block_m) / (best.block_n * best.block_k * work.accumulators)
        assert linear_cost.programs_of(work, best) >= min(0.35 * H200.processors, tiles / 16), (work.rows, best)


def test_predictions_stay_near_the_bound(listed):
    """No faster than bytes and operations allow; and as the best kernels on one card do: a weight of 30 MB and more at .6 of the bandwidth,
    a small one within some microseconds."""
    for spec, work, found in listed:
        floor = max(float(cost.traffic(spec)) / H200.bandwidth, float(cost.work(spec.plan)) / H200.matrix[4 if work.wide else 2])
        seconds = cost.predict(spec, found[0])
        assert seconds > floor
        if work.rows <= 16 and not work.wide:
            assert seconds < max(1.65 * floor, floor + 14e-6), (work.rows, found[0])


def test_measured_kernels_are_ranked_as_they_were_measured():
    """4096 x 4096, one row, on an H200: microseconds of four kernels, each behind another of its kind."""
    spec = on_meta(lambda: plans.projection(BF16, 1, 4096, 4096, strided=False))
    measured = {(2, 2048, 4): 8.53, (4, 512, 2): 9.73, (1, 1024, 2): 10.49}
    found = {key: cost.predict(spec, Choice("gemv", 1, 1, key[0], key[1], 4096, key[2])) * 1e6 for key in measured}
    assert all(0.75 * us < found[key] < 1.3 * us for key, us in measured.items())
    assert min(found, key=found.get) == (2, 2048, 4)


WORDS = ("qkv_8b", "out_8b", "gate_up_8b", "down_8b", "head_8b")


def test_a_program_over_words_that_reads_little_is_slow_as_it_was_measured():
    """A head of 128,256 rows of 4 KB, one a program, on an H200: 160.6 us, where memory takes 120. Gate and up, two such rows a program: 27
    with the kernel of the digits, where memory takes 26.3."""
    one = Choice("gemv", 1, 1, 1, 2048, 4096, 1, digits=2, apart=True)
    for name, measured in (("head_8b", 161.4), ("gate_up_8b", 27.4)):
        spec = on_meta(lambda name=name: quantised(lambda: SHAPES[name](1)))
        assert 0.92 < cost.predict(spec, one) * 1e6 / measured < 1.08
        best = cost.candidates(spec)[0]
        assert best.block_n * best.block_k * math.ceil(4096 / best.block_k) >= 8192 and best.digits == 2


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", WORDS)
def test_what_a_tuner_tries_of_words_differs_in_more_than_warps(name, rows):
    found = cost.candidates(on_meta(lambda: quantised(lambda: SHAPES[name](rows))))[:12]
    tiles = [(choice.block_n, choice.block_k, choice.split) for choice in found if choice.digits and choice.schedule == "gemv"]
    assert len(tiles) >= 8 and len({tile[:2] for tile in tiles}) == len(tiles) and len({tile[0] for tile in tiles}) >= 2


def test_registers_over_words_are_about_what_compiled_kernels_have():
    """Registers that Triton 3.6 gives a thread on sm_90, by columns, elements a step and warps."""
    for name, rows, compiled in (
        ("out_8b", 1, {(1, 2048, 1): 90, (1, 4096, 1): 114, (2, 2048, 1): 128, (2, 4096, 2): 79, (4, 4096, 4): 64, (4, 2048, 2): 128}),
        ("gate_up_8b", 1, {(1, 2048, 1): 128, (1, 4096, 2): 80, (2, 4096, 2): 120, (4, 4096, 4): 109}),
        ("out_8b", 4, {(1, 2048, 1): 218, (2, 4096, 4): 95, (2, 4096, 2): 170, (4, 4096, 4): 111, (2, 2048, 2): 168}),
        ("qkv_8b", 1, {(1, 2048, 1): 140, (1, 4096, 2): 92, (1, 4096, 4): 60, (2, 2048, 2): 128}),
    ):
        work = linear_work(on_meta(lambda name=name, rows=rows: quantised(lambda: SHAPES[name](rows))), rows, {})
        for (block_n, block_k, warps), used in compiled.items():
            choice = Choice("gemv", rows, rows, block_n, block_k, 4096, warps, digits=2, apart=True)
            assert abs(linear_cost.registers(work, choice) - used) <= 24, (name, choice)


@pytest.mark.parametrize("group", [0, 128], ids=["row", "groups"])
@pytest.mark.parametrize("rows", [64, 128, 512, 2048])
@pytest.mark.parametrize("name", ["qkv_8b", "gate_up_8b", "down_8b"])
def test_int8_weights_of_many_rows_are_in_registers_that_there_are(name, rows, group):
    """One with 504 bytes spilled a thread took gate and up at 512 rows to three times bf16's."""
    spec = on_meta(lambda: quantised(lambda: SHAPES[name](rows), group))
    work = linear_work(spec, rows, {})
    found = cost.candidates(spec)
    assert all(linear_cost.registers(work, choice) <= 232 for choice in found)
    assert all(choice.num_stages > 2 for choice in found[:4]), "what is copied while nothing is multiplied is waited for"
    if not group:
        assert found[0].digits == 2


def test_registers_beside_integers_are_about_what_compiled_kernels_have():
    """Registers that Triton 3.6 gives a thread on sm_90 for two digits; more than 255 are a spill."""
    for name, schedule, compiled in (
        ("down_8b", "tiled", {(128, 128, 128, 8, 1): 222, (64, 256, 128, 8, 1): 193, (64, 64, 256, 8, 1): 96}),
        ("gate_up_8b", "tiled", {(64, 128, 128, 8, 1): 209, (128, 64, 128, 8, 1): 233, (64, 64, 128, 4, 1): 227}),
        ("down_8b", "skinny", {(64, 128, 256, 8, 4): 168, (64, 128, 128, 4, 4): 254, (128, 128, 128, 8, 4): 242}),
        ("gate_up_8b", "skinny", {(64, 128, 128, 8, 1): 178, (64, 64, 256, 8, 1): 124, (128, 64, 128, 8, 1): 168}),
    ):
        work = linear_work(on_meta(lambda name=name: quantised(lambda: SHAPES[name](64))), 64, {})
        for (block_m, block_n, block_k, warps, split), used in compiled.items():
            choice = Choice(schedule, 64, block_m, block_n, block_k, 64, warps, 3, split, digits=2)
            assert -31 < linear_cost.registers(work, choice) - used < 57, (name, choice)
    work = linear_work(on_meta(lambda: quantised(lambda: SHAPES["gate_up_8b"](512))), 512, {})
    assert linear_cost.registers(work, Choice("tiled", None, 64, 128, 128, 64, 4, 4, digits=2)) > 255  # 504 bytes are spilled


def test_int8_weights_of_many_rows_take_as_long_as_measured():
    """Two digits in blocks of rows, on an H200: microseconds, and what choice was the fastest of those tried."""
    for rows, columns, inner, us, fastest in (
        (512, 4096, 4096, 23.9, (64, 128, 128, 4, 3)),
        (512, 4096, 14336, 79.6, (64, 128, 128, 4, 3)),
        (512, 6144, 4096, 37.0, (64, 128, 64, 4, 4)),
        (512, 28672, 4096, 171.9, (64, 128, 128, 4, 3)),
        (256, 28672, 4096, 99.7, (64, 128, 128, 4, 3)),
    ):
        spec = on_meta(lambda n=columns, k=inner, m=rows: quantised(lambda: plans.projection(BF16, m, k, n, strided=False)))
        best, *_ = found = cost.candidates(spec)
        assert best.schedule == "skinny" and best.digits == 2
        measured = next(
            c for c in found if (c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages) == fastest and c.schedule == "skinny"
        )
        assert 0.8 < cost.predict(spec, measured) * 1e6 / (us + 4) < 1.35, "4 us for the rows, which were digits already"
        assert cost.predict(spec, measured) < 1.15 * cost.predict(spec, best)


def test_sharing_a_sum_is_for_few_columns():
    for columns, shared in ((768, True), (128256, False)):
        best, *_ = cost.candidates(on_meta(lambda columns=columns: plans.projection(F16, 16, 6400, columns, strided=False)))
        assert (best.split > 1) == shared


def test_every_number_of_rows_has_candidates_of_its_own():
    spec = on_meta(lambda: plans.gate_up(BF16, 1, 4096, 14336, symbolic=True))
    for rows in (1, 4, 16, 64, None):
        found = cost.candidates(spec, rows)
        assert {choice.max_rows for choice in found} == {rows}
        assert rows is None or all(choice.block_m >= rows for choice in found)


def test_more_rows_never_cost_less():
    times = []
    for rows in (1, 4, 16, 64, 512, 4096):
        spec = on_meta(lambda rows=rows: plans.gate_up(torch.bfloat16, rows, hidden=4096, inter=14336))
        (choice,) = cost.choices(spec)
        times.append(cost.predict(spec, choice))
    # Whole waves of programs make steps of a few percent.
    assert all(later > 0.9 * earlier for earlier, later in itertools.pairwise(times)) and times[-1] > 20 * times[0]


def test_a_slower_device_takes_longer():
    spec = on_meta(lambda: plans.gate_up(torch.bfloat16, 512, hidden=4096, inter=14336))
    assert all(cost.predict(spec, c, A100) > cost.predict(spec, c, H200) for c in cost.choices(spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_ascend_and_are_powers_of_two(dtype):
    specs = [
        on_meta(lambda: plans.llama_qkv(dtype, 1, 1, symbolic=True, **LLAMA)),
        on_meta(lambda: plans.llama_qkv(dtype, 1, 1, symbolic=True, qk_norm=True, **LLAMA)),
        on_meta(lambda: plans.attention(dtype, d=80, symbolic=True, mask="bool")),
        on_meta(lambda: plans.post_norm(dtype, symbolic=True)),
    ]
    for spec in specs:
        found = cost.choices(spec)
        limits = [c.max_rows for c in found]
        assert limits[-1] is None and limits[:-1] == sorted(limits[:-1])
        for choice in found:
            blocks = (choice.block_m, choice.block_n, choice.block_k, choice.block_s, choice.num_warps)
            assert all(b & (b - 1) == 0 and b > 0 for b in blocks)
            assert choice.schedule in ("gemv", "row", "attention_decode") or choice.block_m >= (8 if choice.schedule == "skinny" else 16)


def test_known_rows_give_one_choice():
    for rows, schedule in ((1, "gemv"), (5, "skinny"), (64, "skinny"), (65, "tiled"), (700, "tiled")):
        (choice,) = cost.choices(on_meta(lambda rows=rows: plans.projection(BF16, rows, 4096, 4096, strided=False)))
        assert (choice.schedule, choice.max_rows) == (schedule, None)


def test_symbolic_sizes_are_assumed_and_said():
    spec = on_meta(lambda: plans.attention(torch.bfloat16, symbolic=True))
    s0, s1, s2 = plans.S0, plans.S1, plans.S2
    assert cost.assumptions(spec.plan, Choice("attention", 1, 16, 64)) == {s0: 4, s1: 1, s2: 512}
    assert cost.evaluate(s0 * s1 + sympy.Integer(1), {s0: 3, s1: 2}) == 7


def test_sizes_that_a_size_divides_are_assumed_large_enough():
    height, width = (sympy.Symbol(name, integer=True, positive=True) for name in ("s27", "s77"))
    windows = FloorDiv(width, 2) * FloorDiv(height, 2)
    rows = FloorDiv(64 * windows, FloorDiv(height, 4))  # at 1 the divisor is 0
    assumed = cost.assumptions(SimpleNamespace(rows=rows), Choice("row", 1, 16, 64))
    assert assumed[height] == 4 and cost.evaluate(rows, assumed) > 0
    assert cost.evaluate(rows, {height: 1, width: 8}) == 64 * 4 * 2


def test_devices_are_found_by_their_cuda_names():
    assert find_device("NVIDIA A100-SXM4-80GB sm_80") is A100
    assert find_device("NVIDIA H200 sm_90") is H200 and find_device("none") is H200
    for device in DEVICES.values():
        assert device.bandwidth > 1e12 and device.matrix[2] > device.matrix[4] and device.launch < 1e-5


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("NVIDIA L4 sm_89", 99), ("NVIDIA A10G sm_86", 99), ("Tesla T4 sm_75", 64), ("NVIDIA GeForce RTX 5090 sm_120", 99)],
)
def test_a_device_with_less_shared_memory_gets_choices_that_fit_it(name, kilobytes):
    """What was measured on an H200 is not taken: it asked for up to 192 KB."""
    device = find_device(name)
    assert device.shared == kilobytes * 1024 and f"sm_{device.capability}" in name
    for rows in (1, 8, 32):
        spec = on_meta(lambda rows=rows: plans.projection(BF16, rows, 4096, 4096, strided=False))
        work = linear_work(spec, rows, {})
        assert defaults.lookup(spec, None, name) is None
        assert all(shared_bytes(work, choice) <= device.shared for choice in cost.candidates(spec, None, device))


def test_other_names_are_told_by_their_capability():
    assert find_device("NVIDIA B200 sm_100") is H200 and find_device("NVIDIA GH200 480GB sm_90") is H200
    assert find_device("NVIDIA A800-SXM4-80GB sm_80") is A100 and find_device("sm_89") is SMALLER[89]


def test_shared_memory_of_branches_that_exclude_each_other_is_not_underestimated():
    """q, k and v of an encoder: a program takes one of three weights, and Triton gives each branch's tiles a place of their own."""

    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.k, self.v = nn.LayerNorm(256), nn.Linear(256, 192), nn.Linear(256, 192), nn.Linear(256, 192)

        def forward(self, x):
            y = self.norm(x)
            return self.q(y), self.k(y), self.v(y)

    with torch.device("meta"):
        model = Projections().half().eval()
        (region,) = dsi.explain(model, torch.empty(128, 256, dtype=torch.float16)).regions
    choice = Choice("tiled", None, 64, 64, 64, 64, 4, 3, apart=True)
    (kernel,) = generate(region.spec, choice)
    work = linear_work(region.spec, 128, assumptions(region.spec.plan, choice))
    tiles = (64 + 64) * 64 * 2 * 3
    used = resources(SimpleNamespace(spec=region.spec), kernel, 90)["SHARED"]
    assert tiles < used <= shared_bytes(work, choice) + SCRATCH
