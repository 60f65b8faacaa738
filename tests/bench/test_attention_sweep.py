"""`python -m bench.attention_sweep` at toy sizes, its kernels under the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from dsi.codegen import Choice, attention_defaults

from bench.attention import Case
from bench.linear import Candidate

ROOT = Path(__file__).resolve().parents[2]


def test_choices_of_attention_side_by_side(tmp_path):
    file = tmp_path / "attention.json"
    words = ["--small", "--dtype", "fp32", "--most", "1", "--form", "", "--choice", "split=1|4,block_n=16,prefetch=0", "--json", str(file)]
    words += ["--choice", "split=2,block_n=16,block_s=32,live=|parts|seen|dealt,early=True"]
    command = [sys.executable, "-m", "bench.attention_sweep", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["case"] == "masked 2x4x2x16x32x9" and {1, 4} <= {choice["choice"]["split"] for choice in row["choices"]}
    assert {choice["choice"]["live"] for choice in row["choices"]} == {"", "parts", "seen", "dealt"}
    assert all(choice["problem"] == "" and choice["error"] < 1e-5 for choice in row["choices"])


def test_what_wins_over_all_live_lengths_is_kept(tmp_path, monkeypatch):
    """The one that is fastest at one length alone is not it, nor the one that is wrong at one."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the command chooses the interpreter for its whole process
    from bench.attention_sweep import Problem, Tried, keep

    file, found = tmp_path / "defaults.json", []
    choices = [Choice("attention_decode", None, 1, block_n, split=split) for block_n, split in ((64, 8), (128, 4), (256, 2))]
    for live, times in ((32, (2.0, 3.0, 1.0)), (500, (9.0, 3.0, None))):
        problem = Problem(Case(1, 4, 4, 16, 512, live), "masked", torch.float32, "cpu")
        pairs = zip(choices, times, strict=True)
        found.append(Tried(problem, [Candidate(choice, None, us=us, problem="" if us else "wrong") for choice, us in pairs]))
    keep(found, "NVIDIA H200", file)
    keep(found, "NVIDIA H200", file)
    (entry,) = attention_defaults.read(file)["H200"]
    assert (entry.keys, entry.heads, entry.us, entry.choice) == (512, 4, 3.0, {
        "schedule": "attention_decode", "block_m": 1, "block_n": 128, "split": 4,
    })  # fmt: skip
