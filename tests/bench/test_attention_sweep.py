"""`python -m bench.attention_sweep` at toy sizes, its kernels under the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_choices_of_attention_side_by_side(tmp_path):
    file = tmp_path / "attention.json"
    words = ["--small", "--dtype", "fp32", "--most", "1", "--form", "", "--choice", "split=1|4,block_n=16,prefetch=0", "--json", str(file)]
    command = [sys.executable, "-m", "bench.attention_sweep", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["case"] == "masked 2x4x2x16x32x9" and {1, 4} <= {choice["choice"]["split"] for choice in row["choices"]}
    assert all(choice["problem"] == "" and choice["error"] < 1e-5 for choice in row["choices"])
