"""A kernel that the device cannot hold runs with fewer steps in flight, then gives way to the references, once and for all; the report
says so."""

from __future__ import annotations

import pytest
import torch
from dsi.codegen.kernel import Kernel, Launch, LibraryCall
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.runtime import fallback
from dsi.runtime.fallback import FallingBack, fewer_stages
from dsi.runtime.kernels import KernelSet
from triton.runtime.errors import OutOfResources


def kernel(*stages: int, max_rows: int | None = None) -> Kernel:
    launches = tuple(Launch(f"k{n}", (), {}, (1,), 4, count) for n, count in enumerate(stages))
    return Kernel("k", "", "", (*launches, LibraryCall("product", ())), max_rows, "tiled")


class Stub:
    """A generated kernel of two variants, the second of which runs, that fits with `fits` stages at most."""

    calls: list[int]

    def __init__(self, found: KernelSet, fits: int, calls: list[int]):
        self.found, self.fits, self.calls = found, fits, calls

    def allocate(self, size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    def chosen(self, sizes):
        return self.found.variants[1]

    def __call__(self, inputs, outputs, sizes):
        stages = max(launch.num_stages for launch in self.chosen(sizes).launches[:-1])
        self.calls.append(stages)
        if stages > self.fits:
            raise OutOfResources(300_000, 232_448, "shared memory")
        outputs[0].copy_(inputs[0] + stages)

    def describe(self):
        return "generated"


class Named:
    name, key, kernels = "region_7", "", ()


@pytest.fixture
def guarded(monkeypatch):
    """`guarded(stages, fits)`: the region's kernel in the guard's hands, the context, what ran, and the numbers of stages tried."""

    def make(stages: int, fits: int):
        ran: list[str] = []
        calls: list[int] = []

        class Reference:
            def __init__(self, region):
                self.region = region

            def __call__(self, inputs, outputs, sizes):
                ran.append(self.region.name)
                outputs[0].copy_(inputs[0] - 1)

            def describe(self):
                return "by references"

        monkeypatch.setattr(fallback, "ReferenceKernel", Reference)
        context = Context(Options())
        found = KernelSet((kernel(9, max_rows=1), kernel(1, stages)), 1, {})
        return FallingBack(Stub(found, fits, calls), Named(), context, lambda found: Stub(found, fits, calls)), context, ran, calls

    return make


def test_fewer_steps_in_flight_come_first(guarded):
    run, context, ran, calls = guarded(4, 2)
    x, out = torch.ones(3), torch.empty(3)
    for _ in range(2):
        run([x], [out], ())
    assert calls == [4, 3, 2, 2] and not ran and torch.equal(out, x + 2)
    assert not context.report.unfused and run.describe() == "generated"
    assert [note.split(":")[0] for note in context.report.notes] == ["region_7"] * 2 and "shared memory" in context.report.notes[0]


def test_references_take_over(guarded, caplog):
    run, context, ran, calls = guarded(2, 0)
    x, out = torch.ones(3), torch.empty(3)
    for _ in range(2):
        run([x], [out], ())
    assert ran == ["region_7"] * 2 and calls == [2, 1] and torch.equal(out, x - 1)
    (refusal,) = context.report.unfused
    assert "shared memory" in refusal.reason and refusal.node == "region_7" and "region_7" in caplog.text
    assert run.describe() == "by references"


def test_only_launches_with_most_stages_lose_one():
    smaller = fewer_stages(kernel(1, 4, 3))
    assert [launch.num_stages for launch in smaller.launches[:-1]] == [1, 3, 3]
    assert fewer_stages(kernel(1, 1)) is None and fewer_stages(kernel()) is None


def test_another_kernel_can_be_put_in_its_place(guarded):
    """What is tried in a program is made for that place, and nothing falls back behind its back."""
    run, context, ran, calls = guarded(2, 9)
    x, out = torch.ones(3), torch.empty(3)
    other = run.remade([kernel(9, max_rows=1), kernel(1, 5)])
    assert run.kernel.chosen(()).launches[1].num_stages == 2
    run.use(other)
    run([x], [out], ())
    assert calls == [5] and torch.equal(out, x + 5)
    run.use(run.remade([kernel(9, max_rows=1), kernel(1, 10)]))
    with pytest.raises(OutOfResources):
        run([x], [out], ())
    assert calls == [5, 10] and not ran and not context.report.unfused
