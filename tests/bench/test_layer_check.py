"""The layer check runs from a bare checkout, and fails where numbers are wrong."""

import subprocess
import sys
from pathlib import Path

import torch

from bench import layer_check

ROOT = Path(__file__).resolve().parent.parent.parent


def test_small_models_pass_on_the_cpu(tmp_path):
    assert (
        layer_check.main(
            [
                "--small",
                "--device",
                "cpu",
                "--models",
                "bert,llama",
                "--phases",
                "encode,decode",
                "--dtypes",
                "fp32",
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    assert (tmp_path / "r.json").read_text().count('"model"') == 2


def test_wrong_numbers_are_a_problem(monkeypatch):
    real = layer_check.path.backend()

    def wrong(gm, inputs, **settings):
        run = real(gm, inputs, **settings)
        return lambda *args: tuple(out * 1.001 if isinstance(out, torch.Tensor) and out.is_floating_point() else out for out in run(*args))

    monkeypatch.setattr(layer_check.path, "backend", lambda: wrong)
    assert layer_check.main(["--small", "--device", "cpu", "--models", "bert", "--dtypes", "fp32"]) == 1


def test_the_checkout_alone_is_enough():
    """Without an installation `dsi` is the checkout's, sub-packages included."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        "from bench.path import backend; f = backend(); import dsi.ir.ops; print(f.__module__, dsi.ir.ops.__file__)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["dsi.compiler.backend", str(ROOT / "ir" / "ops.py")], result.stderr
