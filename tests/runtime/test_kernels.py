"""Kernels of regions: shared by equal ones, kept on disk, refused with a reason, shown in the dump of a CPU run."""

from __future__ import annotations

import contextlib

import dsi.codegen
import dsi.runtime.kernels as kernels
import pytest
import torch
from dsi.codegen.kernel import Kernel, digest_of
from dsi.compiler.observe import collecting
from dsi.ir.errors import Refusal, refuse
from dsi.runtime import ahead, inductor_api
from dsi.runtime.ahead import compile_ahead, sizes_now
from dsi.runtime.cpu import compile_cpu
from dsi.runtime.cuda import compile_interpreted, generated_kernels, why_not_graphed
from dsi.runtime.kernels import KernelSet, kernels_for, print_kernels
from dsi.runtime.launch import GeneratedKernel
from dsi.runtime.program import build
from dsi.runtime.sizes import Sizes
from lowered_graphs import D, Outer, decode_layer, layer_inputs


def planned(*sizes: int, dynamic: tuple[int, ...] = ()):
    outer, gm = decode_layer(layer_inputs(*sizes), dynamic)
    outer.plan()
    return outer, gm


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No kernels from earlier tests, neither in this process nor on disk."""
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_sets", {})


@pytest.fixture
def generated(monkeypatch):
    """The names of the specifications that kernels were generated for."""
    names = []
    original = dsi.codegen.generate

    def generate(spec, **options):
        names.append(spec.name)
        return original(spec, **options)

    monkeypatch.setattr(dsi.codegen, "generate", generate)
    return names


def test_equal_regions_are_generated_once(generated):
    outer, _ = planned(2, 1, 32, 5)
    context = outer.context()
    project, again = outer.regions[2], planned(2, 1, 32, 5)[0].regions[2]
    first, second = kernels_for(project, context), kernels_for(again, context)
    assert isinstance(first, KernelSet) and first is second
    assert generated == ["project"]
    assert project.kernels == again.kernels == list(first.variants)


def test_another_process_reads_them_from_disk(generated):
    outer, _ = planned(3, 7, 29, 5, dynamic=(3, 7))
    context = outer.context()
    made = [kernels_for(region, context) for region in outer.regions]
    assert generated
    generated.clear()
    kernels._sets.clear()
    assert [kernels_for(region, context) for region in outer.regions] == made
    assert generated == []


def test_without_a_cache_they_are_generated_anew(generated):
    outer, _ = planned(2, 1, 32, 5)
    for _ in range(2):
        kernels_for(outer.regions[2], outer.context(cache=False))
        kernels._sets.clear()
    assert generated == ["project", "project"]


def test_a_damaged_source_is_generated_anew(generated, tmp_path):
    outer, _ = planned(2, 1, 32, 5)
    made = kernels_for(outer.regions[2], outer.context())
    (path,) = tmp_path.rglob("*.py")
    path.write_text("damaged")
    kernels._sets.clear()
    with pytest.warns(UserWarning, match="ignoring the cache"):
        assert kernels_for(outer.regions[2], outer.context()) == made
    assert generated == ["project", "project"]
    assert path.read_text() == made.variants[0].source


def test_a_region_without_a_plan_runs_by_references_and_the_report_says_so():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    context = outer.context()
    program = build(gm, outer.fakes, generated_kernels(context, "cpu"))
    assert {refusal.node for refusal in context.report.unfused} == {region.name for region in outer.regions}
    assert all("no plan" in refusal.reason for refusal in context.report.unfused)
    assert sum(step.text.startswith("[") for step in program.steps) == len(program.steps)


@pytest.mark.parametrize("error", [refuse("complex numbers have no kernel"), NotImplementedError("complex numbers have no kernel")])
def test_a_refusal_of_code_generation_is_reported_not_raised(monkeypatch, error):
    def generate(spec, **options):
        raise error

    monkeypatch.setattr(dsi.codegen, "generate", generate)
    outer, gm = planned(2, 1, 32, 5)
    context = outer.context()
    build(gm, outer.fakes, generated_kernels(context, "cpu"))
    assert Refusal("complex numbers have no kernel", node="attend") in context.report.unfused


def test_a_region_with_an_input_elsewhere_runs_by_references():
    outer, gm = planned(2, 1, 32, 5)
    context = outer.context()
    build(gm, outer.fakes, generated_kernels(context, "cuda"))
    assert all("cannot be read by a kernel" in refusal.reason for refusal in context.report.unfused)
    assert len(context.report.unfused) == len(outer.regions)


def test_a_region_on_another_gpu_runs_by_references():
    outer = Outer()
    nodes = [outer.input("x", torch.zeros(2, 16)), outer.input("w", torch.zeros(8, 16))]
    outer.region("project", lambda x, w: (D.linear(x, w),), *nodes)
    outer.plan()
    (region,) = outer.regions
    context = outer.context()
    with outer.mode:
        values = [torch.empty(2, 16, device="cuda:1"), torch.empty(8, 16, device="cuda:1")]
        region.outputs[0].meta["val"] = torch.empty(2, 8, device="cuda:1")
    assert generated_kernels(context, "cuda:0")(region, values, Sizes(())) is None
    assert "arg0_1 on cuda:1" in context.report.unfused[0].reason and "on cuda:0" in context.report.unfused[0].reason
    assert generated_kernels(context, "cuda:1")(region, values, Sizes(())) is not None


def test_inputs_of_which_a_recorded_graph_would_keep_the_value():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    assert "x, which is on the cpu" in why_not_graphed(gm, outer.fakes)
    with outer.mode:
        fakes = [torch.empty(value.shape, device="cuda:0") for value in outer.fakes]
        assert not why_not_graphed(gm, fakes)
        fakes[3] = torch.empty((), device="cuda:1")
        assert "on several" in why_not_graphed(gm, fakes)
        fakes[3] = torch.empty(())
    assert "pos, which is on the cpu" in why_not_graphed(gm, fakes)


@pytest.fixture
def no_inductor(monkeypatch):
    monkeypatch.setattr(inductor_api, "compile_graph", lambda gm, inputs, patches, written: gm.forward)


def test_a_dump_on_the_cpu_shows_the_kernels_that_a_gpu_would_run(tmp_path, no_inductor):
    outer, gm = planned(2, 1, 32, 5)
    context = outer.context(dump=tmp_path / "dump")
    compile_cpu(gm, outer.fakes, context)
    assert all(region.kernels for region in outer.regions)
    shown = {text for path, text in context.artifacts.items() if path.startswith("kernels/")}
    assert shown == {kernel.source for region in outer.regions for kernel in region.kernels}
    assert context.report.seconds["kernels"] > 0


def test_without_a_dump_the_cpu_generates_none(generated, no_inductor):
    outer, gm = planned(2, 1, 32, 5)
    compile_cpu(gm, outer.fakes, outer.context())
    assert generated == []


def test_equal_regions_with_symbols_of_other_names_bind_their_own(generated):
    """Two graphs name the same size differently; the kernels of the first serve the second."""
    runs = []
    for other in (False, True):
        outer = Outer(dynamic=(7,))
        nodes = [outer.input("other" if other else "x", torch.randn(7, 8)), outer.input("w", torch.randn(8, 8))]
        (y,) = outer.region("linear", lambda x, w: (D.linear(x, w),), *nodes)
        outer.finish(y)
        outer.plan()
        found = kernels_for(outer.regions[0], outer.context())
        values = [node.meta["val"] for node in nodes]
        runs.append((list(kernels.symbol_values(found, values).values()), [values[0].shape[0].node.expr]))
    assert generated == ["linear"] * len(found.variants)
    assert runs[0][0] == runs[0][1] and runs[1][0] == runs[1][1] and runs[0] != runs[1]


def test_a_size_is_read_off_a_multiple_of_it():
    outer = Outer(dynamic=(7,))
    x = outer.input("x", torch.randn(7, 2, 8))
    rows = outer.call(torch.ops.aten.view.default, x, [-1, 8])
    w = outer.input("w", torch.randn(8, 8))
    outer.finish(*outer.region("linear", lambda x, w: (D.linear(x, w),), rows, w))
    outer.plan()
    found = kernels_for(outer.regions[0], outer.context())
    assert kernels.symbol_values(found, [rows.meta["val"], w.meta["val"]]) == {str(s): s for s in [x.meta["val"].shape[0].node.expr]}


def test_a_dump_says_what_has_no_kernel(tmp_path):
    outer, _ = decode_layer(layer_inputs(2, 1, 32, 5))
    context = outer.context()
    print_kernels(context)
    assert len(context.report.unfused) == len(outer.regions)


# ----------------------------------------------------------------------------------------------------------------- launching

SOURCE = """
LOG = []


class entry:
    def __class_getitem__(cls, grid):
        def launch(*arguments, **constants):
            LOG.append((grid, arguments, constants))
            if len(arguments) == 2:
                arguments[1].copy_(arguments[0] * 2)

        return launch
"""


def fake_set(found: KernelSet, **changes) -> KernelSet:
    """The kernels of a region with their text replaced by one that notes its launches."""
    import dataclasses

    variants = []
    for kernel in found.variants:
        source = SOURCE + f"# {kernel.name} {kernel.max_rows}\n"
        launches = tuple(dataclasses.replace(launch, entry="entry") for launch in kernel.launches)
        variants.append(Kernel(kernel.name, source, digest_of(source), launches, kernel.max_rows, kernel.schedule))
    return dataclasses.replace(found, variants=tuple(variants), **changes)


def test_the_variant_is_picked_by_the_number_of_rows():
    outer = Outer(dynamic=(7,))
    nodes = [outer.input("x", torch.randn(7, 8)), outer.input("w", torch.randn(8, 8))]
    (y,) = outer.region("linear", lambda x, w: (D.linear(x, w),), *nodes)
    gm = outer.finish(y)
    region = outer.regions[0]
    outer.plan()
    found = kernels_for(region, outer.context())
    limits = [kernel.max_rows for kernel in found.variants]
    assert limits[-1] is None and limits[:-1] == sorted(limits[:-1]) and len(limits) > 1
    disk = kernels.DiskCache("test")
    runner = GeneratedKernel(fake_set(found), [node.meta["val"] for node in nodes], Sizes(outer.fakes), disk)
    program = build(gm, outer.fakes, lambda *_: runner)
    for rows in (1, 2, limits[0], limits[0] + 1, 1000):
        program([torch.ones(rows, 8), torch.ones(8, 8)])
        (variant,) = [variant for variant in runner._variants if kernels.load(variant.kernel, disk).LOG]
        assert variant.max_rows == next(limit for limit in limits if limit is None or rows <= limit)
        ((grid, _, constants),) = kernels.load(variant.kernel, disk).LOG
        kernels.load(variant.kernel, disk).LOG.clear()
        assert all(type(size) is int and size > 0 for size in grid)
        assert constants["num_warps"] == variant.kernel.launches[0].num_warps


def test_a_tensor_in_another_layout_than_its_fake_is_laid_out_anew():
    """An operator that is not ours may return other strides than it promised; a kernel that believed the promise would read the wrong
    elements.
    """
    outer = Outer()
    x = outer.input("x", torch.randn(4, 6))
    liar = outer.call(torch.ops.aten.mul.Tensor, x, 1.0)
    (y,) = outer.region("double", lambda a: (a * 2.0,), liar, kind="row")
    gm = outer.finish(y)
    liar.target, liar.args = (lambda a: a.t().contiguous().t()), (x,)
    region = outer.regions[0]
    outer.plan()
    found = fake_set(kernels_for(region, outer.context()))
    disk = kernels.DiskCache("test")
    program = build(gm, outer.fakes, lambda *_: GeneratedKernel(found, [liar.meta["val"]], Sizes(outer.fakes), disk))
    real = torch.randn(4, 6)
    assert torch.equal(program([real])[0], real * 2)
    ((_, arguments, _),) = kernels.load(found.variants[0], disk).LOG
    assert arguments[0].stride() == (6, 1) and torch.equal(arguments[0], real)


def test_and_so_is_what_a_region_without_a_kernel_gives():
    """Its operators run by themselves, and promise no more than others."""
    outer = Outer()
    x = outer.input("x", torch.randn(4, 6))
    (made,) = outer.region("first", lambda a: (a * 1.0,), x, kind="row")
    (y,) = outer.region("double", lambda a: (a * 2.0,), made, kind="row")
    gm = outer.finish(y)
    outer.plan()
    first, second = outer.regions
    (member,) = (node for node in first.body.graph.nodes if node.op == "call_function")
    member.target, member.args = (lambda a: a.t().contiguous().t()), member.args[:1]
    found = fake_set(kernels_for(second, outer.context()))
    disk = kernels.DiskCache("test")

    def of(region, values, sizes, overlaps):
        return None if region is first else GeneratedKernel(found, values, Sizes(outer.fakes), disk)

    real = torch.randn(4, 6)
    assert torch.equal(build(gm, outer.fakes, of)([real])[0], real * 2)
    assert kernels.load(found.variants[0], disk).LOG[-1][1][0].stride() == (6, 1)


# ------------------------------------------------------------------------------------------------------------- compiled ahead


class Compiles:
    """Stands in for a generated kernel: notes what it is compiled for."""

    def __init__(self, found, overlaps=False):
        self.found, self.overlaps, self.given = found, overlaps, []

    def compile(self, inputs, outputs, sizes):
        self.given.append((inputs, outputs, sizes))
        if self.found == "broken":
            raise RuntimeError("out of resource")


def test_each_kernel_is_compiled_once_ahead_of_the_first_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "start_driver", lambda: None)
    outer, _ = decode_layer(layer_inputs(3, 7, 29, 5), (3, 7))
    sizes = Sizes(outer.fakes)
    now = sizes_now(sizes, outer.fakes)
    assert sorted(now) == [3, 7]
    project, again, early = Compiles("shared"), Compiles("shared"), Compiles("shared", overlaps=True)
    compile_ahead([(outer.regions[2], project), (outer.regions[4], again), (outer.regions[4], early)], now, torch.device("cuda"))
    assert [len(kernel.given) for kernel in (project, again, early)] == [1, 0, 1]
    assert project.given == [([torch.float32] * 3, [torch.float32], now)]


def test_what_cannot_be_compiled_ahead_fails_at_its_launch_not_before(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "start_driver", lambda: None)
    outer, _ = decode_layer(layer_inputs(2, 1, 32, 5))
    broken = Compiles("broken")
    compile_ahead([(outer.regions[2], broken)], (), torch.device("cuda"))
    assert broken.given


def test_sizes_that_depend_on_values_run_by_references(monkeypatch):
    """No input has such a size, so no kernel can be launched with it, nor a graph of launches recorded."""
    reasons = []

    def compiled(gm, inputs, context):
        reasons.append(why_not_graphed(gm, [0 for _ in inputs]))  # of no device at all
        return compile_interpreted(gm, inputs, context)

    def function(x, mask):
        rows = x[mask]
        return torch.tanh(rows).relu() + 1, rows.shape[0]

    monkeypatch.setattr("dsi.runtime.cpu.compile_cpu", compiled)
    x = torch.randn(6, 8)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), collecting() as contexts:
        run = torch.compile(function, backend="dsi", fullgraph=True)
        for mask in (x[:, 0] > 0, x[:, 0] > 100, x[:, 0] < 100):
            torch.testing.assert_close(run(x, mask), function(x, mask))
    assert len(contexts) == 1 and "depends on values" in reasons[0]
    assert any("is a size that depends on values" in str(refusal) for refusal in contexts[0].report.unfused)
