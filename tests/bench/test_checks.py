"""Repeating, the memory checker, time limits, memory: what they find, and that they fail where something is wrong."""

import json
import stat
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from bench import limits, memory, repeat, sanitize
from bench.__main__ import app
from bench.report import Report, Settings


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


# -------------------------------------------------------------------------------------------------------------------------- repeating


def test_steps_that_repeat(tmp_path):
    file = tmp_path / "r.json"
    code, output = run("repeat", "--small", "--cases", "gpt2", "--batches", 1, "--sides", "eager", "--runs", 3, "--json", file)
    assert code == 0, output
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["differing"], row["runs"]) == (0, 3)


@pytest.mark.parametrize("what", ["logits", "cache"])
def test_a_step_that_does_not_repeat_is_found(monkeypatch, what):
    real = repeat.decoded

    def unsteady(model, cache, batch):
        turns = iter(range(1000))

        def call_for(side):
            call = real(model, cache, batch)(side)

            def step():
                logits = call()
                if next(turns) == 6:
                    (logits if what == "logits" else cache.cache.layers[-1].values).view(torch.int32).bitwise_xor_(1)
                return logits

            return step

        return call_for

    monkeypatch.setattr(repeat, "decoded", unsteady)
    code, output = run("repeat", "--small", "--cases", "gpt2", "--batches", 1, "--sides", "eager", "--runs", 8)
    assert code == 1 and "8 runs differ" in output and " 0 of 8" not in output


def test_bits_are_compared_and_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert not repeat.other_bits(nan, nan.clone()) and repeat.other_bits(zero, -zero)
    assert repeat.other_bits(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16))


# ------------------------------------------------------------------------------------------------------------------ the memory checker

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
DIRTY = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 2 bytes\n=========     at kernel+0x10\n"
    "========= ERROR SUMMARY: 3 errors\n"
)


@pytest.fixture
def checker(monkeypatch, tmp_path):
    """A stand-in for compute-sanitizer on the PATH: it runs the command and says `words`; the command is a process that has run well."""

    def install(words):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f'#!/bin/sh\nshift 2\n"$@"\ncat <<END\n{words}END\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        text = "import os; print('ran: {\"kernels\": [\"k\"]}', os.environ.get('PYTORCH_NO_CUDA_MEMORY_CACHING', ''))"
        monkeypatch.setattr(sanitize, "child_command", lambda *_: [sys.executable, "-c", text.replace(", os.environ", "); (os.environ")])

    return install


def test_a_clean_layer_and_one_with_errors(checker, tmp_path):
    checker(CLEAN)
    file = tmp_path / "s.json"
    assert run("sanitize", "--small", "--cases", "gpt2", "--json", file)[0] == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["errors"] == 0 and row["kernels"] == ["k"] and "problem" not in row
    checker(DIRTY)
    code, output = run("sanitize", "--small", "--cases", "gpt2", "--json", file)
    assert code == 1 and "3 errors" in output and "Invalid __global__ read" in output


def test_without_the_checker_nothing_is_called_clean(monkeypatch):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    code, output = run("sanitize", "--small", "--cases", "gpt2")
    assert code == 1 and "compute-sanitizer" in output
    assert "problem" in sanitize.verdict("the program ended")


def test_the_layer_that_is_checked(monkeypatch, capsys):
    real = sanitize.path.backend()
    monkeypatch.setattr(
        sanitize.path, "backend", lambda: lambda gm, inputs, options: real(gm, inputs, options={**options, "executor": "reference"})
    )
    sanitize.one_layer(Settings(small=True), "llama-3.2-1b", 2)
    found = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(sanitize.MARK))
    assert found["error from eager"] < 1e-5


# ------------------------------------------------------------------------------------------------------------------- time and memory


def test_what_takes_too_long_is_broken_off():
    with pytest.raises(limits.Expired, match=r"waiting took more than 0\.05 s"), limits.at_most(0.05, "waiting"):
        time.sleep(5)
    with limits.at_most(None, "waiting"), limits.at_most(30, "waiting"):
        pass


def test_the_limit_is_found_behind_a_compilers_error():
    def compiled():
        with limits.at_most(0.01, "compiling"):
            try:
                time.sleep(5)
            except limits.Expired as error:
                raise RuntimeError("backend failed") from error

    with pytest.raises(RuntimeError) as caught:
        compiled()
    assert isinstance(limits.expired(caught.value), limits.Expired) and limits.expired(ValueError()) is None


def test_peak_memory_is_a_share_of_what_is_needed():
    assert memory.Memory(105, 200).as_json(100) == {"peak bytes": 105, "compiling bytes": 200, "peak share": 1.05}
    assert memory.held(torch.nn.Linear(2, 2)) == 0  # not on a CUDA device


@pytest.mark.gpu
def test_memory_of_a_side_holds_what_it_keeps_and_what_it_makes():
    weights = torch.empty(1 << 20, device="cuda")
    meter = memory.Meter(memory.held(weights, weights[:5]))
    kept = torch.empty(1 << 18, device="cuda")
    torch.empty(1 << 22, device="cuda")
    meter.compiled()
    torch.empty(1 << 19, device="cuda")
    found = meter.done()
    assert found.peak == 4 * ((1 << 20) + (1 << 18) + (1 << 19)) and found.compiling == 4 * ((1 << 20) + (1 << 18) + (1 << 22))
    assert kept is not None


def test_a_side_that_compiles_too_long_is_left_out(capsys):
    from bench.comparators import Workload, compare

    x = torch.ones(4)

    def compile_for(side):
        return [lambda: time.sleep(5) or x if side.name == "default" else x * 1] * 2

    report = Report("test", Settings(("eager", "default"), 1, small=True, limit=0.05))
    compare(Workload("ones", {}, torch.float32, compile_for, lambda: x.double()[None]), report)
    sides = report.rows[0]["sides"]
    assert "took more than 0.05 s" in sides["default"]["problem"] and "wall" not in sides["default"] and sides["eager"]["wall"] > 0
