"""DeepSpeed's layers beside others: they write over their input and count tokens themselves, and their numbers are right all the same."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from bench import deepspeed_side
from bench.comparators import compare
from bench.decode import Cache
from bench.deepspeed_side import Layers, Sizes, workload
from bench.report import Report, Settings

SIZES = Sizes(width=64, heads=4, layers=2, room=32, live=20)


def sides(*names):
    """The sides of a row of layers in float32, by name."""
    report = Report("deepspeed", Settings(against=names, blocks=1, small=True))
    compare(workload(report.settings, SIZES), report)
    (row,) = report.rows
    return row["sides"]


def test_layers_that_write_over_their_input_are_right_and_so_is_what_runs_after_them(monkeypatch):
    def in_place(model, sizes, dtype):
        whole, own = Layers(model), Cache(model, 1, sizes.room, 0)
        count = 0

        def layer(x):
            nonlocal count
            if x.shape[1] > 1:
                own.rewind()
                count = 0
            position = torch.arange(count, count + x.shape[1])
            count += x.shape[1]
            return x.copy_(whole(x, position, own.cache)), None

        return [layer]

    monkeypatch.setattr(deepspeed_side, "deepspeed_layers", in_place)
    found = sides("deepspeed", "eager")
    for side in found.values():
        assert side["problem"] == "" and side["error"] < 1e-5 and side["wall"] > 0


def test_layers_that_cannot_run_leave_the_other_sides_as_they_are(monkeypatch):
    def fails(x):
        raise RuntimeError("no workspace")

    monkeypatch.setattr(deepspeed_side, "deepspeed_layers", lambda *_: [fails])
    found = sides("deepspeed", "eager")
    assert "no workspace" in found["deepspeed"]["problem"] and "wall" not in found["deepspeed"]
    assert found["eager"]["problem"] == "" and found["eager"]["wall"] > 0


@pytest.mark.parametrize("live", [1, 23])
def test_a_block_that_does_not_fit_the_cache_is_refused(live):
    with pytest.raises(ValueError, match=f"1 < live <= 22; {live} tokens of 32"):
        workload(Settings(small=True), dataclasses.replace(SIZES, live=live))


@pytest.mark.deepspeed
def test_deepspeeds_own_layers_get_gpt2s_weights(monkeypatch):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    if torch.cuda.is_available():
        pytest.skip("its operators in torch are for CPUs")
    from deepspeed.ops.transformer.inference.op_binding import base, mlp_gemm

    monkeypatch.setattr(base.BaseOp, "inference_module", object())  # no extension: every operator falls back on torch
    # Its kernel has the GELU by tanh, as GPT-2; its fallback does not.
    tanh = functools.partial(functional.gelu, approximate="tanh")
    monkeypatch.setattr(mlp_gemm, "F", SimpleNamespace(layer_norm=functional.layer_norm, gelu=tanh))
    found = sides("deepspeed", "eager")
    assert found["deepspeed"]["problem"] == "" and found["deepspeed"]["error"] < 1e-5
