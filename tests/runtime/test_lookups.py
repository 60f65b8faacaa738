"""What Triton looks up once a process is found out by a thread, and found again by whoever asks after that."""

import threading

import pytest
import torch
from dsi.compiler.execute import begin
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.runtime import lookups
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(lookups, "_thread", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_the_key_of_tritons_cache_is_known_afterwards():
    key = lookups._found("triton_key", "triton.runtime.cache", "triton.compiler.compiler")
    key.cache_clear()
    lookups.begin(torch.device("cuda", 0))
    lookups.wait()
    assert key.cache_info().currsize == 1


def test_one_thread_a_process(monkeypatch):
    looked = []
    monkeypatch.setattr(lookups, "_key", lambda device: lambda: looked.append(device))
    for _ in range(3):
        lookups.begin(torch.device("cuda", 0))
        lookups.wait()
    assert looked == [torch.device("cuda", 0)]


def test_who_waits_while_the_thread_starts(monkeypatch):
    class Starting(threading.Thread):
        def start(self):
            lookups.wait()  # as another thread may just then
            super().start()

    monkeypatch.setattr(threading, "Thread", Starting)
    lookups.begin(torch.device("cuda", 0))
    lookups.wait()
    assert lookups._thread is not None and not lookups._thread.is_alive()


def test_a_thread_that_cannot_start_stops_nothing(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    lookups.begin(torch.device("cuda", 0))
    lookups.wait()
    assert lookups._thread is None


def test_what_fails_in_the_thread_stops_nothing_else(monkeypatch, caplog):
    looked = []
    monkeypatch.setattr(lookups, "_key", lambda device: lambda: 1 // 0)
    monkeypatch.setattr(lookups, "_version", lambda device: lambda: looked.append("version"))
    with caplog.at_level("DEBUG", logger="dsi.runtime"):
        lookups.begin(torch.device("cuda", 0))
        lookups.wait()
    assert looked == ["version"] and "division" in caplog.text


def test_a_triton_that_has_none_of_it_is_left_to_itself(monkeypatch, caplog):
    def lacks(name, *modules):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(lookups, "_found", lacks)
    with caplog.at_level("DEBUG", logger="dsi.runtime"):
        lookups.begin(torch.device("cuda", 0))
        lookups.wait()
    assert [record.args[0].msg for record in caplog.records] == ["no triton_key", "no GPUTarget", "no library_dirs"]


def test_a_function_that_a_triton_lacks_is_named():
    with pytest.raises(ImportError, match="no such_function"):
        lookups._found("such_function", "triton.runtime.cache")


@pytest.mark.parametrize(
    ("device", "options", "begins"), [("cuda", {}, True), ("cuda", {"executor": "reference"}, False), ("cpu", {}, False)]
)
def test_it_begins_for_graphs_that_kernels_will_run(monkeypatch, device, options, begins):
    begun = []
    monkeypatch.setattr(lookups, "begin", begun.append)
    with FakeTensorMode():
        inputs = [3, torch.empty(2, 2), torch.empty(2, 2, device=device)]
    begin(inputs, Context(Options.parse(options, None)))
    assert [place.type for place in begun] == ["cuda"] * begins
