"""Bytes that a step reads: what the counter's words come to, and what is said where it is missing or counts nothing."""

from __future__ import annotations

import json
import subprocess

import pytest

from bench import bytes_read
from bench.report import Settings
from bench.timing import Budget

HEAD = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
SAID = "\n".join(
    [
        "==PROF== Connected to process 7",
        bytes_read.MARK + json.dumps({"title": "a model, b1", "must read": 4000}),
        HEAD,
        '"0","7","region_001_linear","Command line profiler metrics","dram__bytes_read.sum","byte","3,000"',
        '"1","7","region_002_attention","Command line profiler metrics","dram__bytes_read.sum","byte","1200"',
        '"1","7","region_002_attention","Command line profiler metrics","dram__bytes_write.sum","byte","900"',
    ]
)


@pytest.fixture
def settings(tmp_path):
    return Settings(("dsi-int8",), 1, None, True, "cpu", Budget(None), tmp_path / "bytes.json")


def counted(monkeypatch, settings, said, code=0):
    monkeypatch.setattr(bytes_read, "counter", lambda: "ncu")
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    (row,) = bytes_read.run(settings, ["gpt2"], [1], 2, 32, 20, 5.0).rows
    return row, commands[-1]  # the first asks git which commit it is


def test_what_is_read_is_held_against_what_must_be(monkeypatch, settings):
    row, command = counted(monkeypatch, settings, SAID)
    write = {"dram__bytes_write.sum": 900.0}
    assert row["kernels"] == [
        ("region_001_linear", {bytes_read.METRIC: 3000.0}),
        ("region_002_attention", {bytes_read.METRIC: 1200.0, **write}),
    ]
    assert row["bytes read"] == 4200 and row["over must"] == 1.05 and "problem" not in row
    assert command[0] == "ncu" and command[command.index("--child") + 1] == "gpt2" and "--small" in command


def test_other_metrics_are_asked_for_and_shown(monkeypatch, settings, capsys):
    monkeypatch.setattr(bytes_read, "counter", lambda: "ncu")
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, SAID, "")

    monkeypatch.setattr(subprocess, "run", run)
    bytes_read.run(settings, ["gpt2"], [1], 2, 32, 20, 5.0, ["dram__bytes_write.sum", "no__such.sum"])
    assert asked[-1][2] == "dram__bytes_read.sum,dram__bytes_write.sum,no__such.sum"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (shown,) = [line for line in lines if line[:1] == ["region_002_attention"]]
    assert shown[-2:] == ["900", "-"]  # nobody counted the other


def test_a_run_that_counted_nothing_is_a_problem(monkeypatch, settings):
    for said in ("==ERROR== no permission", SAID.splitlines()[1], "\n".join(SAID.splitlines()[2:])):
        row, _ = counted(monkeypatch, settings, said, 1)
        assert row["problem"] and "bytes read" not in row


def test_without_the_tool(monkeypatch, settings):
    monkeypatch.setattr(bytes_read, "counter", lambda: None)
    (row,) = bytes_read.run(settings, ["gpt2"], [1], 2, 32, 20, 5.0).rows
    assert "ncu" in row["problem"]


def test_the_step_that_is_counted_runs(settings, capsys):
    bytes_read.one_step(settings, "gpt2", 1, 1, 32, 20)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(bytes_read.MARK)]
    assert json.loads(line.removeprefix(bytes_read.MARK))["must read"] > 0
