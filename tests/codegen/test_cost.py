"""The cost model and the choices made by it."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from dsi.codegen import Choice, cost
from dsi.codegen.devices import A100, DEVICES, H200, find_device

from . import plans


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


def test_one_row_is_bound_by_memory():
    spec = on_meta(lambda: plans.gate_up(torch.bfloat16, 1, hidden=4096, inter=14336))
    (choice,) = cost.choices(spec)
    floor = float(cost.traffic(spec)) / H200.bandwidth
    assert choice.schedule == "gemv" and floor < cost.predict(spec, choice) < 1.3 * floor


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
            assert choice.schedule == "gemv" or choice.schedule == "row" or choice.block_m >= 16


def test_known_rows_give_one_choice():
    for rows, schedule in ((1, "gemv"), (4, "gemv"), (5, "tiled"), (700, "tiled")):
        (choice,) = cost.choices(on_meta(lambda rows=rows: plans.projection(torch.bfloat16, rows, strided=False)))
        assert (choice.schedule, choice.max_rows) == (schedule, None)


def test_symbolic_sizes_are_assumed_and_said():
    spec = on_meta(lambda: plans.attention(torch.bfloat16, symbolic=True))
    s0, s1, s2 = plans.S0, plans.S1, plans.S2
    assert cost.assumptions(spec.plan, Choice("attention", 1, 16, 64)) == {s0: 4, s1: 1, s2: 512}
    assert cost.evaluate(s0 * s1 + sympy.Integer(1), {s0: 3, s1: 2}) == 7


def test_devices_are_found_by_their_cuda_names():
    assert find_device("NVIDIA A100-SXM4-80GB sm_80") is A100
    assert find_device("NVIDIA H200 sm_90") is H200 and find_device("none") is H200
    for device in DEVICES.values():
        assert device.bandwidth > 1e12 and device.matrix[2] > device.matrix[4] and device.launch < 1e-5
