"""Scratch memory: zeroed once, kept where kernels leave it zeroed, never shared by calls that may be under way at once."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import sympy
import torch
from dsi.codegen.kernel import Workspace
from dsi.runtime import workspaces
from dsi.runtime.workspaces import ScratchMemory, allocator, recording, together

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """Where launches go: `now.stream`, and whether they are being recorded."""

    class Now:
        stream, capturing = 1, False

    monkeypatch.setattr(workspaces, "stream_of", lambda device: Now.stream)
    monkeypatch.setattr(workspaces, "is_capturing", lambda device: Now.capturing)
    return Now


def counters(size=4) -> ScratchMemory:
    return ScratchMemory(Workspace(sympy.Integer(size), "int32", zeroed=True), (size,), CPU)


def test_counters_are_kept_for_each_stream_and_size(now):
    memory = ScratchMemory(Workspace(sympy.Symbol("n"), "int32", zeroed=True), lambda n: (n,), CPU)
    first = memory((4,))
    assert first.dtype == torch.int32 and first.tolist() == [0] * 4
    assert memory((4,)) is first
    assert memory((5,)) is not first
    now.stream = 2
    assert memory((4,)) is not first
    now.stream = 1
    assert memory((4,)) is first


def test_two_threads_have_counters_of_their_own(now):
    memory, found = counters(), []
    thread = threading.Thread(target=lambda: found.append(memory(())))
    thread.start()
    thread.join()
    assert memory(()) is not found[0]


def test_what_lasts_is_found_by_one_look_and_is_what_each_memory_keeps(now):
    each = [counters(), ScratchMemory(Workspace(sympy.Integer(8), "float32"), (8,), CPU)]
    find = together(each)
    first = find(())
    assert find(()) is first and all(one is memory(()) for one, memory in zip(first, each, strict=True))
    now.stream = 2
    assert all(one is not other and one is memory(()) for one, other, memory in zip(find(()), first, each, strict=True))
    now.stream, now.capturing = 1, True
    assert all(one is not other for one, other in zip(find(()), first, strict=True))
    with recording(1) as used:
        assert all(one is other for one, other in zip(find(()), first, strict=True))
        assert len(used) == 2
    now.capturing = False
    large = together([*each, ScratchMemory(Workspace(sympy.Integer(1 << 20), "float32"), (1 << 20,), CPU)])
    assert large(())[2] is not large(())[2] and large(())[:2] == first


@pytest.mark.parametrize("size, sizes", [((1 << 20,), ()), (lambda n: (n,), (8,))], ids=["large", "of several sizes"])
def test_partial_sums_are_of_each_call(now, size, sizes):
    memory = ScratchMemory(Workspace(sympy.Symbol("n"), "float32"), size, CPU)
    first, second = memory(sizes), memory(sizes)
    assert first.shape == second.shape and first.dtype == torch.float32 and first.data_ptr() != second.data_ptr()


def test_few_partial_sums_stay_where_they_are(now):
    memory, found = ScratchMemory(Workspace(sympy.Integer(8), "float32"), (8,), CPU), []
    first = memory(())
    assert memory(()) is first and first.shape == (8,)
    now.stream = 2
    assert memory(()) is not first
    now.stream, now.capturing = 1, True
    assert memory(()) is not first and memory(()) is not memory(())  # somebody else's capture, which may be replayed beside our calls
    with recording(1) as used:
        assert memory(()) is first and used == [first]
    now.capturing = False
    thread = threading.Thread(target=lambda: found.append(memory(())))
    thread.start()
    thread.join()
    assert found[0] is not first


def test_a_recording_uses_what_the_stream_of_its_replays_has(now):
    """What is allocated while recording would be zeroed by no one before the first replay."""
    memory = counters()
    kept = memory(())
    now.stream, now.capturing = 9, True  # recording happens on a stream of its own
    with recording(1) as used:
        assert memory(()) is kept
    assert used == [kept]  # so that it lives as long as the graph


def test_what_is_zeroed_within_a_recording_is_not_kept(now):
    memory = counters()
    now.capturing = True
    first = memory(())
    assert memory(()) is not first  # the filling is part of the recording: each replay does it again
    with recording(1) as used:
        assert memory(()) is not first
    assert used == []
    now.capturing = False
    kept = memory(())
    assert kept is not first and memory(()) is kept


def test_somebody_elses_recording_does_not_use_ours(now):
    """Its replays may run beside our launches."""
    memory = counters()
    kept = memory(())
    now.capturing = True
    assert memory(()) is not kept


@pytest.fixture
def capture(now, monkeypatch):
    """`capture(number)` begins somebody's capture, `capture(None)` ends it; the driver tells which one it is."""
    monkeypatch.setattr(workspaces, "may_be_captured", lambda device: True)
    monkeypatch.setattr(workspaces, "done", lambda filled: filled)

    def begin(number):
        now.capturing = number is not None
        monkeypatch.setattr(workspaces, "capture_of", lambda device: (number, now.stream))

    return begin


def test_somebody_elses_recording_gets_one_made_before(capture, now):
    """One fill a launch less in each replay; the launches of a stream share it, since they follow each other."""
    memory = counters()
    kept = memory(())
    capture(7)
    first = memory(())
    assert first is not kept and first.tolist() == [0] * 4
    assert memory(()) is first
    now.stream = 2
    assert memory(()) is not first  # a stream of the capture beside the first one
    capture(None)
    now.stream = 1
    assert memory(()) is kept  # and there is a spare one again
    capture(8)
    assert memory(()) is not first and memory(()) is memory(())


def test_each_of_several_captures_gets_one_made_in_a_call_before_it(capture):
    memory = counters()
    find, given = together([memory]), []
    for number in (7, 8):
        find(())
        spare = memory._spare[(4,)]
        capture(number)
        given.append(find(())[0])
        assert given[-1] is spare
        capture(None)
    assert given[0] is not given[1]


def test_a_recording_without_a_call_before_fills_its_own(capture):
    memory = counters()
    capture(7)
    assert memory(()) is not memory(())


def test_what_a_recording_was_given_outlives_the_kernel(capture):
    memory = counters()
    memory(())
    capture(7)
    there = weakref.ref(memory(()))
    del memory
    gc.collect()
    assert there() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captures_have_numbers_of_their_own():
    device, numbers, x = torch.device("cuda", torch.cuda.current_device()), [], torch.ones(4, device="cuda")
    assert workspaces.capture_of(device) is None
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
            numbers += [workspaces.capture_of(device), workspaces.capture_of(device)]
    assert None not in numbers and numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_what_is_asked_in_each_launch_is_what_is_asked_otherwise(now, monkeypatch):
    place, capturing = workspaces.watches(CPU)
    now.stream, now.capturing = 5, True
    assert (place(), capturing()) == (5, True)
    monkeypatch.undo()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    second = torch.device("cuda", 1)
    place, capturing = workspaces.watches(second)
    assert place() == workspaces.stream_of(second) == (1, 71)
    assert capturing()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counters_of_streams_and_captures_on_a_device():
    device = torch.device("cuda", torch.cuda.current_device())
    memory = ScratchMemory(Workspace(sympy.Integer(4), "int32", zeroed=True), (4,), device)
    kept, graph = memory(()), torch.cuda.CUDAGraph()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert memory(()) is not kept
    with torch.cuda.graph(graph):
        assert memory(()) is not kept
    assert memory(()) is kept


@pytest.mark.parametrize("size, stride", [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((0, 4), (4, 1)), ((), ())])
def test_outputs_have_the_layout_that_was_asked_for(size, stride):
    made = allocator(CPU)(size, stride, torch.bfloat16)
    assert (tuple(made.shape), made.stride(), made.dtype, made.device) == (size, stride, torch.bfloat16, CPU)
