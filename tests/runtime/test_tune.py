"""Trying choices: the fastest is taken and kept for all equal regions, within the budget, on data of the tuner's own."""

from __future__ import annotations

import dataclasses
import threading

import dsi.runtime.choices as known
import dsi.runtime.kernels as kernels
import pytest
import sympy
import torch
from dsi.codegen import cost
from dsi.codegen.devices import H200
from dsi.codegen.kernel import Choice
from dsi.ir import tile as t
from dsi.ir.errors import Refused
from dsi.runtime.cuda import tune_kernels
from dsi.runtime.kernels import kernels_for
from dsi.runtime.trial import Candidate, Subject, at_sizes, index_ranges, number, sample
from dsi.runtime.tune import tune
from lowered_graphs import D, Outer, decode_layer, layer_inputs

DEVICE = "none"  # as caches are keyed where there is no GPU
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No kernels and no winners from earlier tests."""
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path))
    for module, name, value in [(kernels, "_sets", {}), (kernels, "_outdated", set()), (known, "_winners", {})]:
        monkeypatch.setattr(module, name, value)


class Stand:
    """Trials without a device: `speed(subject, choice)` gives the seconds of a launch; what `fails` holds does not compile."""

    def __init__(self, speed=lambda subject, choice: 1e-6, fails=(), spills=()):
        self.speed, self.fails, self.spills = speed, fails, spills
        self.compiled, self.timed, self.threads = [], [], set()

    def compile(self, subject, choice):
        self.threads.add(threading.get_ident())
        self.compiled.append((subject, choice))
        if choice in self.fails:
            raise RuntimeError("out of resource: shared memory\nmore")
        return Candidate(choice, None, choice in self.spills)

    def time(self, subject, candidates):
        self.timed.append(subject)
        return [self.speed(subject, candidate.choice) for candidate in candidates]


def linear(rows=3, dynamic=(), name="project"):
    outer = Outer(dynamic)
    x, w = outer.input("x", torch.randn(rows, 256)), outer.input("w", torch.randn(512, 256))
    outer.finish(*outer.region(name, lambda x, w: (D.linear(x, w),), x, w))
    outer.plan()
    return outer


def ranked(outer, max_rows=None):
    return list(cost.candidates(outer.regions[0].spec, max_rows, H200))


def run(outer, trials, clock=lambda: 0.0, **options):
    context = outer.context(mode="max-autotune", **options)
    found = tune(outer.regions, context, trials, DEVICE, H200, clock)
    if found:
        kernels.renew(outer.regions, DEVICE)
    return context


def launched(outer, **options):
    """What the kernel of the first region is launched with."""
    (kernel,) = kernels_for(outer.regions[0], outer.context(**options)).variants
    return kernel.source, kernel.launches[0].constants, kernel.launches[0].num_warps, kernel.launches[0].num_stages


def test_the_fastest_choice_is_generated_and_the_report_says_what_it_won():
    outer = linear()
    before, (first, *_, other) = launched(outer), ranked(outer)[:6]
    context = run(outer, Stand(lambda subject, choice: 3e-6 if choice == other else 4e-6))
    assert launched(outer) != before
    assert launched(outer)[1].items() >= {"BLOCK_N": other.block_n}.items() and launched(outer)[2] == other.num_warps
    (note,) = context.report.notes
    assert "tuned 1 of 1 kernels" in note and "4.0 us before and 3.0 us after" in note
    lines = context.artifacts["tuning.txt"].splitlines()
    (marked,) = [line for line in lines if line.startswith("  *")]
    assert "3.00 us" in marked and f"block_n={other.block_n}" in marked
    assert other != first


def test_equal_regions_share_a_winner_and_another_process_has_it():
    other = ranked(linear())[3]
    trials = Stand(lambda subject, choice: 3e-6 if choice == other else 4e-6)
    first = linear()
    first.regions += linear(name="again").regions
    run(first, trials)
    assert len(trials.timed) == 1
    made = launched(first)
    for module, name in [(kernels, "_sets"), (known, "_winners")]:
        getattr(module, name).clear()
    later = linear(name="later")
    run(later, trials)
    assert len(trials.timed) == 1  # known from disk
    assert launched(later, mode="default") == made
    run(linear(name="uncached"), trials, cache=False)
    assert len(trials.timed) == 1  # of this process


def test_a_winner_counts_where_its_kernel_was_never_made():
    """Of a process that was ended after its trials, or while another stored what it had made without knowing of them."""
    outer = linear()
    before, other = launched(outer), ranked(outer)[3]  # made untuned, and stored
    known.write_winner(DEVICE, True, outer.regions[0].key, None, other)
    for module, name in [(kernels, "_sets"), (known, "_winners")]:
        getattr(module, name).clear()
    tuned = launched(linear(name="later"), mode="default")
    assert tuned != before and tuned[2] == other.num_warps and tuned[1].items() >= {"BLOCK_N": other.block_n}.items()


def test_without_a_cache_a_winner_serves_this_process_only(tmp_path):
    outer = linear()
    run(outer, Stand(), cache=False)
    assert not list(tmp_path.rglob("tuned"))
    assert known.winner(DEVICE, False, outer.regions[0].key, None) == ranked(outer)[0]


def test_the_choice_that_the_model_ranks_first_stays_unless_another_is_clearly_faster():
    outer = linear()
    first, second, third = ranked(outer)[:3]
    times = {first: 4e-6, second: 3.99e-6, third: 3.98e-6}
    run(outer, Stand(lambda subject, choice: times.get(choice, 5e-6)))
    assert known.winner(DEVICE, True, outer.regions[0].key, None) == first


def test_a_choice_that_does_not_compile_or_spills_is_skipped_and_noted():
    outer = linear()
    _, fails, spills, good = ranked(outer)[:4]
    times = {fails: 1e-6, spills: 1e-6, good: 2e-6}
    context = run(outer, Stand(lambda subject, choice: times.get(choice, 4e-6), [fails], [spills]))
    assert known.winner(DEVICE, True, outer.regions[0].key, None) == good
    text = context.artifacts["tuning.txt"]
    assert "skipped: out of resource: shared memory  " in text and "skipped: its values do not fit the registers" in text


def test_each_bucket_of_rows_is_tuned():
    outer = linear(dynamic=(3,))
    buckets = cost.buckets(outer.regions[0].spec.plan)
    assert len(buckets) > 2
    wanted = {bucket: ranked(outer, bucket)[2] for bucket in buckets}
    run(outer, Stand(lambda subject, choice: 1e-6 if choice == wanted[subject.max_rows] else 2e-6))
    assert {bucket: known.winner(DEVICE, True, outer.regions[0].key, bucket) for bucket in buckets} == wanted
    found = kernels_for(outer.regions[0], outer.context())
    assert [kernel.max_rows for kernel in found.variants] == list(buckets)
    assert [kernel.launches[0].num_warps for kernel in found.variants] == [wanted[bucket].num_warps for bucket in buckets]


def test_the_budget_is_kept_and_spent_on_all_regions_first():
    outer = linear()
    outer.regions += linear(rows=16, name="wide").regions
    now = iter(range(0, 1000, 5))
    trials = Stand()
    context = run(outer, trials, clock=lambda: float(next(now)), tuning=12.0)
    # Compiled: the first of both regions before the second of either. Then the seconds are spent.
    assert [subject.spec.name for subject, _ in trials.compiled[:2]] in (["project", "wide"], ["wide", "project"])
    assert len(trials.timed) < 2
    assert "the seconds for tuning were spent" in context.artifacts["tuning.txt"]
    assert "of 2 kernels" in context.report.notes[0]


def test_what_cannot_be_tried_keeps_its_choice():
    outer = linear()

    class NoRoom(Stand):
        def time(self, subject, candidates):
            raise torch.OutOfMemoryError("CUDA out of memory")

    before = launched(outer)
    context = run(outer, NoRoom())
    assert launched(outer) == before
    assert "CUDA out of memory" in context.report.notes and "tuned 0 of 1 kernels" in context.report.notes[0]


def test_what_no_data_is_known_for_is_not_compiled_and_the_report_says_why():
    outer, trials = linear(), Stand()
    spec = outer.regions[0].spec
    twice = t.Op("mul", (t.Load(2, (t.R,), torch.int64), t.Const(2, torch.int64)), torch.int64)
    ids = t.Tensor("ids", (sympy.Integer(3),), (sympy.Integer(1),), torch.int64)
    plan = dataclasses.replace(spec.plan, x=dataclasses.replace(spec.plan.x, coords=(twice, t.K)))
    outer.regions[0].spec = dataclasses.replace(spec, plan=plan, inputs=[*spec.inputs, ids])
    for _ in range(2):
        (note,) = run(outer, trials).report.notes
        assert note.startswith("project is not tuned: an index in it is computed") and not trials.compiled


def test_a_winner_of_another_format_is_ignored():
    outer = linear()
    key = outer.regions[0].key
    disk = kernels.DiskCache(DEVICE)
    disk.write("tuned", f"{key} any", {"schedule": "gemv", "gone": 3})
    assert known.winner(DEVICE, True, key, None) is None
    disk.write("tuned", f"{key} any", dataclasses.asdict(ranked(outer)[1]))
    assert known.winner(DEVICE, True, key, None) == ranked(outer)[1]


def test_without_a_device_nothing_is_tried_and_the_report_says_so():
    outer = linear()
    context = outer.context(mode="max-autotune")
    tune_kernels(context, CPU)
    assert context.report.notes == ["mode 'max-autotune': no kernel is tuned: there is no CUDA device to try kernels on"]


# ------------------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("dynamic", [(), (3, 7)])
def test_data_is_made_as_the_specification_states(dynamic):
    outer, _ = decode_layer(layer_inputs(3, 7, 29, 5), dynamic)
    outer.plan()
    generator = torch.Generator().manual_seed(0)
    for region in outer.regions:
        spec = region.spec
        assumed = Subject(region.key, spec, None).assumed
        inputs, outputs = sample(spec, assumed, CPU, generator)
        for tensor, value in zip([*spec.inputs, *spec.outputs], [*inputs, *outputs], strict=True):
            assert value.dtype == tensor.dtype
            assert list(value.shape) == [number(size, assumed) for size in tensor.sizes]
            assert list(value.stride()) == [number(stride, assumed) for stride in tensor.strides]
        assert all(value.isfinite().all() for value in inputs)
    qkv = outer.regions[0].spec
    inputs, outputs = sample(qkv, Subject("", qkv, None).assumed, CPU, generator)
    caches = [place for place, tensor in enumerate(qkv.inputs) if 29 in tensor.sizes]
    assert [next(n for n, value in enumerate(inputs) if value is output) for output in outputs[1:]] == caches
    ((place, values),) = index_ranges(qkv, {}).items()
    assert values == (0, 29) and inputs[place].max() < 29 and inputs[place].min() >= 14


def rows(*coords, dtype=torch.int64):
    """A row kernel that gathers from a table [50, 8] at an index computed from input 0."""
    table = t.Tensor("table", (sympy.Integer(50), sympy.Integer(8)), (sympy.Integer(8), sympy.Integer(1)), torch.float32)
    ids = t.Tensor("ids", (sympy.Integer(4),), (sympy.Integer(1),), dtype)
    out = t.Tensor("out", (sympy.Integer(4), sympy.Integer(8)), (sympy.Integer(8), sympy.Integer(1)), torch.float32)
    value = t.Load(1, (coords[0], t.C), torch.float32)
    plan = t.RowPlan(sympy.Integer(4), sympy.Integer(8), (t.Store(0, (t.R, t.C), value, torch.float32),))
    return t.KernelSpec("gather", plan, [ids, table], [out])


IDS = t.Load(0, (t.R,), torch.int64)


@pytest.mark.parametrize(
    "coord, values",
    [
        (IDS, (0, 50)),
        (t.Op("cast", (IDS,), torch.int32), (0, 50)),
        (t.Op("add", (IDS, t.Const(2, torch.int64)), torch.int64), (0, 48)),
        (t.Op("add", (t.Const(-3, torch.int64), IDS), torch.int64), (3, 53)),
        (t.Op("add", (IDS, t.Index(t.R)), torch.int64), (0, 47)),
        (t.Op("add", (t.Index(2 * t.R - 5), t.Op("cast", (IDS,), torch.int32)), torch.int64), (5, 49)),
    ],
)
def test_indices_stay_within_the_tensor_they_number(coord, values):
    assert index_ranges(rows(coord), {}) == {0: values}


@pytest.mark.parametrize(
    "coord",
    [
        t.Op("mul", (IDS, t.Const(2, torch.int64)), torch.int64),
        t.Op("add", (IDS, t.Const(50, torch.int64)), torch.int64),
        t.Op("add", (IDS, t.Index(17 * t.R)), torch.int64),  # up to 51, in a table of 50
        t.Op("add", (IDS, IDS), torch.int64),
    ],
)
def test_an_index_that_is_not_understood_is_not_guessed(coord):
    with pytest.raises(Refused, match="gather is not tuned"):
        index_ranges(rows(coord), {})


def test_a_kernel_at_given_sizes_has_numbers_for_all_of_them():
    outer = linear(dynamic=(3,))
    spec = outer.regions[0].spec
    (kernel,) = [kernel for kernel in kernels_for(outer.regions[0], outer.context()).variants if kernel.max_rows == 16]
    fixed = at_sizes(kernel, Subject("", spec, 16).assumed)
    assert all(size.is_Integer for launch in fixed.launches for size in launch.grid)
    assert [a.expr for launch in fixed.launches for a in launch.arguments if a.kind == "size"] == [16] * sum(
        a.kind == "size" for launch in kernel.launches for a in launch.arguments
    )
    assert isinstance(ranked(outer, 16)[0], Choice)
