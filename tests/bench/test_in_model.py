"""`python -m bench in-model`: choices change places in a compiled step, wrong ones are left out, what makes the step faster is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsi.codegen import attention_defaults, defaults
from typer.testing import CliRunner

from bench.__main__ import app
from bench.in_model import by_turns, faster
from bench.model_step import Poisoned, time_by_group
from bench.timeline import Slot

ROOT = Path(__file__).resolve().parents[2]


def ran(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_what_makes_the_step_faster_is_kept_and_what_is_wrong_is_named(tmp_path):
    output = ran("tests/bench/in_model_toy.py", tmp_path)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["problem"] == ""
    trials = {(trial["group"].split(" ")[0], trial["choice"]["num_warps"]): trial for trial in row["choices"]}
    for kind in ("linear", "attention"):
        kept, wrong, slow = (trials[kind, warps] for warps in (8, 16, 2))
        assert kept["kept"] and kept["problem"] == "" and kept["error"] < 1e-5
        assert kept["step us after"] == kept["step us before"] - 10  # in both layers at once
        # Half of it was not computed: what memory held of an earlier step must not stand in for it.
        assert wrong["problem"].startswith("wrong") and wrong["step us after"] is None and not wrong["kept"]
        assert slow["problem"] == "" and not slow["kept"]
    # The second group is tried beside what won in the first.
    assert row["step us after"] == row["step us"] - 20
    assert "wrong" in output
    # Both winners lie in tables such as those that ship, without a time where there was none alone: what they cost the step is another.
    (linear,) = defaults.read(tmp_path / "table.json")["H200"]
    assert (linear.columns, linear.inner, linear.rows, linear.us, linear.choice["num_warps"]) == (64, 96, 1, None, 8)
    (attention,) = attention_defaults.read(tmp_path / "attention_table.json")["H200"]
    assert (attention.heads, attention.keys, attention.us, attention.choice["num_warps"]) == (2, 32, None, 8)


def test_without_a_device_choices_are_checked_and_none_is_kept(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--small", "--layers", "1", "--batches", "3", "--sides", "dsi-int8", "--groups", "linear_int8 + add 64x96", "--most", "1"]
    output = ran("-m", "bench", "in-model", *words, "--choice", "64x96: block_n=2|4", "--choice", "attention: split=4", "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert row["problem"] == "" and "nothing is timed without a device" in output
    problems = {trial["choice"]["block_n"]: trial["problem"] for trial in row["choices"]}
    assert problems[2] == problems[4] == ""
    assert not any(trial["choice"]["split"] == 4 for trial in row["choices"])  # that was asked for elsewhere
    assert not any(trial["kept"] for trial in row["choices"])


def test_sides_whose_kernels_are_not_ours_are_refused():
    done = CliRunner().invoke(app, ["in-model", "--small", "--sides", "dsi,reduce-overhead,dsi-max-autotune"])
    assert done.exit_code != 0 and "not in reduce-overhead, dsi-max-autotune" in " ".join(done.output.replace("│", " ").split())


def timed(*values):
    left = list(values)
    return lambda: left.pop(0)


def test_a_step_is_faster_only_where_it_is_in_every_turn_and_by_more_than_noise():
    assert faster(by_turns(timed(100, 101, 100), timed(99, 99, 98), 3))
    assert not faster(by_turns(timed(100, 101, 100), timed(99, 102, 98), 3))  # not in the second turn
    assert not faster(by_turns(timed(100, 100, 100), timed(99.8, 99.8, 99.8), 3))
    assert by_turns(timed(100), timed(102), 3) == [(100, 102)]  # hopeless: no further turn is spent on it


def test_a_groups_time_is_that_of_its_kernels_wherever_others_stand_between():
    slots = [Slot("qkv", 3.0, 1.0), Slot("copy", 9.0, 1.0), Slot("out", 2.0, 1.0), Slot("qkv", 4.0, 1.0), Slot("out", 5.0, 1.0)]
    launches = [(0, "qkv"), (1, "out"), (0, "qkv"), (1, "out")]
    assert time_by_group(slots, launches) == {0: 7.0, 1: 7.0}
    with pytest.raises(ValueError, match="out is not where"):
        time_by_group(slots[:-1], launches)


def test_what_a_kernel_leaves_out_is_nan_unless_it_began_as_an_input():
    class Half:
        def __call__(self, inputs, outputs, sizes):
            for output in outputs:
                output[:1] = 1.0

    class Region:
        in_place, outputs, inputs = {1: 0}, (), ()

    memory, cache = torch.zeros(2), torch.zeros(2)
    Poisoned(Half(), Region())([cache], [memory, cache], ())
    assert memory[0] == 1 and memory[1].isnan() and cache.tolist() == [1, 0]
