"""A program whose kernels take less than a call costs the host is given kernels of one launch; one that keeps the device busy is not."""

from __future__ import annotations

import contextlib
import dataclasses

import dsi.runtime.kernels as kernels
import pytest
import torch
from dsi.codegen import cost
from dsi.codegen.devices import H200
from dsi.codegen.few_launches import DEARER, host_bound, in_one_launch
from dsi.compiler.observe import collecting
from dsi.runtime import cuda
from dsi.runtime.cuda import generated_kernels, launches_spared, waits_for_the_host
from dsi.runtime.kernels import keep, kernels_for
from dsi.runtime.program import build
from lowered_graphs import D, Outer

import dsi


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_sets", {})


def normed(rows: int = 1, width: int = 1600, layers: int = 1, after=None, dynamic: tuple[int, ...] = ()):
    """Layers that are norm and projection, from `width` to three times that and, summed, back; `after` makes the result of their last."""
    outer = Outer(dynamic)
    half = {"dtype": torch.float16, "device": "meta"}
    x = outer.input("x", torch.empty(rows, width, **half))
    norm, bias = (outer.input(name, torch.empty(width, **half)) for name in ("norm", "bias"))
    w = outer.input("w", torch.empty(3 * width, width, **half))
    out = []
    for number in range(layers):
        (y,) = outer.region(f"l{number}", lambda x, n, b, w: (D.linear(D.layer_norm(x, n, b, eps=1e-5), w),), x, norm, bias, w)
        out.append(y)
    if after is not None:
        out[-1] = after(outer, out[-1])
    outer.plan()
    for region in outer.regions:  # as lowering states it
        region.spec = dataclasses.replace(region.spec, constants=frozenset({1, 2, 3}), library=True)
    return outer, outer.finish(*out)


def test_a_short_program_has_kernels_of_one_launch_and_a_long_one_the_fastest():
    outer, gm = normed()
    context = outer.context()
    assert waits_for_the_host(gm, H200)
    fastest = build(gm, outer.fakes, generated_kernels(context, "meta"))
    fewest = build(gm, outer.fakes, generated_kernels(context, "meta", few=True))
    assert (fastest.launches, fewest.launches) == ([2], [1])
    assert (launches_spared(fastest), launches_spared(fewest)) == (0, 1)
    outer, gm = normed(layers=4)  # the same kernel, four times
    assert not waits_for_the_host(gm, H200)


def test_both_are_kept_on_disk_and_one_does_not_take_the_others_place():
    (region,) = (outer := normed()[0]).regions
    made = [kernels_for(region, outer.context(), few) for few in (False, True)]
    kernels._sets.clear()
    assert [kernels_for(region, outer.context(), few) for few in (False, True)] == made
    assert [len(found.variants[0].launches) for found in made] == [2, 1]
    keep(region, outer.context(), made[1])  # as where one that was too large was made smaller
    assert kernels_for(region, outer.context()) == made[0]
    kernels.renew([region], "none")
    assert [kernels_for(region, outer.context(), few) for few in (False, True)] == made


def test_the_one_launch_is_near_the_fastest_or_there_is_none():
    specs = {size: normed(*size)[0].regions[0].spec for size in ((1, 1600), (16, 768))}
    best = {size: cost.choices(spec)[0] for size, spec in specs.items()}
    others = {size: in_one_launch(spec, best[size], H200) for size, spec in specs.items()}
    assert others[1, 1600].deferred and best[1, 1600].apart
    assert others[16, 768] is None and best[16, 768].apart  # its rows inside of the product would cost more than a launch
    for size, other in others.items():
        if other is not None:
            assert cost.predict(specs[size], other) <= cost.predict(specs[size], best[size]) + DEARER


@pytest.mark.parametrize(
    "made",
    [
        lambda: normed(1, 12288),
        lambda: normed(7, 1600, dynamic=(7,)),
        lambda: normed(after=lambda outer, y: outer.call(torch.ops.aten.cumsum.default, y, -1)),
    ],
    ids=["large weights", "rows that are not known", "an operator that is not ours"],
)
def test_what_is_long_or_not_known_keeps_the_fastest(made):
    assert not waits_for_the_host(made()[1], H200)


def test_views_of_results_take_no_time_and_a_region_without_a_kernel_takes_nobody_knows_how_long():
    outer, gm = normed(after=lambda outer, y: outer.call(torch.ops.aten.view.default, y, [3, 1600]))
    assert waits_for_the_host(gm, H200)
    assert not host_bound([outer.regions[0].spec, None], H200)
    assert not host_bound([], H200)


@pytest.fixture
def device(monkeypatch):
    """A GPU that is not there: programs are made for it, of tensors without memory."""
    made = cuda.generated_kernels
    monkeypatch.setattr(cuda, "generated_kernels", lambda context, device, *more: made(context, "meta", *more))
    monkeypatch.setattr(cuda, "compile_ahead", lambda *given: None)
    monkeypatch.setattr(cuda, "why_not_graphed", lambda *given: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


def test_what_is_launched_kernel_by_kernel_has_few_launches_and_what_is_recorded_the_fastest(device):
    outer, gm = normed(layers=3)
    context = outer.context()
    call = cuda.compile_cuda(gm, outer.fakes, context)
    assert call.program.launches == [1, 1, 1] and call.graphs is None
    assert [note for note in context.report.notes if "where a call is not recorded: 3" in note]
    context = outer.context(mode="reduce-overhead")
    call = cuda.compile_cuda(gm, outer.fakes, context)  # one launch of the host's for all of them
    assert call.program.launches == [2, 2, 2] and call.graphs is not None and context.report.notes == []
    outer, gm = normed(layers=1)
    context = outer.context(mode="reduce-overhead")
    call = cuda.compile_cuda(gm, outer.fakes, context)
    assert call.program.launches == [1] and call.graphs is None
    (why, spared) = context.report.notes
    assert "every kernel is launched by itself" in why and "where a call is not recorded: 1" in spared


@pytest.mark.gpu
def test_a_norm_and_a_projection_alone_are_one_launch_on_a_gpu():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.LayerNorm(1600), torch.nn.Linear(1600, 4800)).half().cuda().eval()
    x = torch.randn(1, 1, 1600, dtype=torch.float16, device="cuda")
    with torch.no_grad(), collecting() as contexts:
        compiled = torch.compile(module, backend="dsi", options={"cache": False})
        out = compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(x)
    torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
    assert sum(event.count for event in profile.key_averages() if "aunchKernel" in event.key) == 1
    assert "where a call is not recorded: 1" in " ".join(contexts[0].report.notes)


def test_explain_says_what_is_spared_on_a_gpu():
    with torch.device("meta"):
        norm, project = torch.nn.LayerNorm(1600).half(), torch.nn.Linear(1600, 4800).half()
    half = {"dtype": torch.float16, "device": "meta"}

    def once(x):
        return project(norm(x))

    def often(x):
        return tuple(project(norm(x + number)) for number in range(4))

    said = [" ".join(dsi.explain(f, torch.empty(1, 1, 1600, **half)).notes) for f in (once, often)]
    assert "where a call is not recorded: 1" in said[0] and "spared" not in said[1]
