"""Whole tiny models through generated kernels: every region's kernel runs under Triton's interpreter on CPU tensors, launched by the
program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("generated_model.py")


@pytest.mark.parametrize("family, sizes", [("llama", "static"), ("gpt2", "static"), ("llama", "dynamic")])
def test_a_model_runs_by_its_generated_kernels(family, sizes, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "DSI_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", SCRIPT, family, sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["errors"]) == (6 if sizes == "dynamic" else 3)
    assert max(result["errors"]) < 5e-6
    assert not any(result["unfused"]), result["unfused"]
    # Every region is one step that launches a kernel: no member runs by itself.
    for steps, keys, symbols in zip(result["steps"], result["keys"], result["symbols"], strict=True):
        launching = [step.split("# ")[1] for step in steps if "# " in step]
        assert len(launching) == len(keys)
        assert all("reference of" not in text and "rows" in text for text in launching)
        assert not any(step.startswith("[region") for step in steps)
        assert bool(symbols) == (sizes == "dynamic")
        # Equal regions run one kernel: the second layer adds none.
        assert len({text.split("[")[0] for text in launching}) == len(set(keys)) < len(keys)
    # The sources lie on disk as text, each under its digest.
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".py", ".json"}
