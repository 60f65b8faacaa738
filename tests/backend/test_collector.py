"""Python's garbage collector while a graph is compiled: off, and afterwards as it was."""

import gc
import threading

import pytest
import torch
from dsi.compiler import backend
from dsi.compiler.collector import FROZEN, no_collections
from dsi.engine.generation.progress import compiling


@pytest.fixture(autouse=True)
def collector():
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def churn() -> list[int]:
    """Makes garbage; the generations that were collected meanwhile."""
    seen: list[int] = []

    def note(phase, info):
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(5000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 5000
    return seen


def test_nothing_is_collected_within():
    assert churn()  # so that this test can fail
    with no_collections():
        assert churn() == []
    assert gc.isenabled()
    assert churn()


def test_what_is_made_within_is_old_afterwards():
    with no_collections():
        with no_collections():
            made = [[number] for number in range(5000)]
        assert gc.get_count()[0] < 1000, "Dynamo, around the inner block, would look at all of it"
        more = [[number] for number in range(5000)]
    assert gc.get_count()[0] < 1000, "the next allocation would begin with a collection of everything"
    assert sum(item is made or item is more for item in gc.get_objects(generation=2)) == 2


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with no_collections(), no_collections():
        pass
    assert not gc.isenabled()


def test_an_error_turns_it_on_again():
    with pytest.raises(ValueError), no_collections(), no_collections():
        raise ValueError
    assert gc.isenabled()


def test_the_last_of_several_threads_turns_it_on():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with no_collections():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with no_collections():
        thread.start()
        entered.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_the_program_has_frozen_stays_frozen():
    kept = [[number] for number in range(2 * FROZEN)]
    assert any(item is kept for item in gc.get_objects())  # so that this test can fail: what is frozen is in no generation
    gc.freeze()
    with no_collections():
        pass
    assert gc.get_freeze_count() >= len(kept), "a few of the process's other frozen objects may end at any time: no exact count"
    assert not any(item is kept for item in gc.get_objects())


@torch.no_grad()
def test_a_compilation_collects_nothing(monkeypatch):
    states = []

    def look(gm, inputs, **kwargs):
        assert gc.isenabled()
        compiled = backend.dsi(gm, inputs, **kwargs)
        assert gc.isenabled()
        return compiled

    compile_graph = backend.compile_graph

    def noting(*args, **kwargs):
        states.append(gc.isenabled())
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_graph", noting)
    torch.compile(torch.nn.Linear(3, 4), backend=look, options={"executor": "reference"})(torch.randn(2, 3))
    assert states == [False]


@pytest.mark.parametrize("new", [True, False])
def test_an_engines_first_call_collects_nothing_in_dynamos_part_either(new):
    with compiling("forward", new):
        assert gc.isenabled() is not new
    assert gc.isenabled()
