"""What sides do to weights, how int8 sides are judged, and the engine's memory: at toy sizes on the CPU."""

import json
import sys

import pytest
import torch
from torch import nn

from bench import comparators, decode, engine_memory, shapes, tables, timing, weights
from bench.comparators import Workload, compare
from bench.report import Report, Settings
from bench.sides import SIDES


def model(name="llama-3-8b"):
    return shapes.build(shapes.SHAPES[name].small(), 2, 32, torch.float32, "cpu")


def test_the_recipe_computes_with_rounded_weights():
    plain = model()
    ids = torch.arange(3, 12)[None]
    exact = plain(ids).logits
    found = weights.prepared("recipe", plain)(ids).logits
    stands_for = weights.rounded(weights.prepared("laid out", plain))(ids).logits
    assert timing.relative_error(found, stands_for) < 1e-5 < 1e-3 < timing.relative_error(found, exact) < 0.1
    assert torch.equal(plain(ids).logits, exact), "the model itself stays as it is"


def test_rows_become_int8_within_half_a_step():
    weight = torch.randn(7, 50) * torch.logspace(-3, 2, 7)[:, None]
    weight[3] = 0
    values, scale = weights.rows_to_int8(weight)
    assert values.dtype == torch.int8 and int(values.abs().max()) == 127
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


def test_weights_of_another_kind_lie_by_output_in_the_copy_alone():
    plain = model("gpt2")
    laid = weights.prepared("laid out", plain)
    for one, strides in ((plain, (3 * 64, 1)), (laid, (1, 64))):
        assert one.transformer.h[0].attn.c_attn.weight.stride() == strides
    with pytest.raises(ValueError, match="function"):
        weights.prepared("recipe", lambda x: x)


def test_bytes_of_int8_weights():
    plain = model()
    linears = [module for module in plain.modules() if isinstance(module, nn.Linear)]
    wanted = sum(m.weight.numel() + 4 * m.weight.shape[0] for m in linears)
    norms = sum(p.nbytes for name, p in plain.named_parameters() if "norm" in name)
    assert shapes.int8_bytes(plain) == wanted + norms


def test_torchao_is_named_where_it_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    report = Report("test", Settings(against=("torchao",), blocks=1, small=True))
    compare(decode.decode(model(), "toy", 1, 32, 20), report)
    assert "torchao" in report.rows[0]["sides"]["torchao"]["problem"]


def test_int8_sides_are_judged_by_what_rounding_costs():
    """Numbers as far off as rounding makes them pass; others do not, and without such a reference only eager's own error is allowed."""
    exact, off = torch.ones(100).double(), torch.ones(100).double() * 1.01
    for more, passes in (({"rounded": lambda: off[None]}, True), ({}, False)):
        report = Report("test", Settings(against=("int8-recipe",), blocks=1, small=True))
        calls = {"eager": exact.float(), "int8-recipe": torch.full((100,), 1.012)}
        compare(Workload("w", {}, torch.float32, lambda side, calls=calls: [lambda: calls[side.name]], lambda: exact[None], **more), report)
        assert ("wrong" in report.rows[0]["sides"]["int8-recipe"]["problem"]) != passes


def test_a_workload_that_no_side_can_be_judged_for_leaves_the_next_one(tmp_path, capsys):
    def fail():
        raise torch.OutOfMemoryError("3 GB")

    settings = Settings(against=("eager",), blocks=1, small=True, json=tmp_path / "r.json")
    report = Report("test", settings)
    assert compare(Workload("w", {}, torch.float32, lambda side: [lambda: torch.ones(3)], fail), report) == []
    compare(Workload("x", {}, torch.float32, lambda side: [lambda: torch.ones(3)], lambda: torch.ones(1, 3)), report)
    tables.summary(report)
    first, second = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert "3 GB" in first["problem"] and first["sides"] == {} and second["sides"]["eager"]["wall"] > 0
    assert "3 GB" in capsys.readouterr().out


def test_a_device_that_failed_ends_the_run_and_keeps_what_is_known(monkeypatch):
    def failed(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timing, "interleave", failed)
    monkeypatch.setattr(comparators.timing, "synchronize", lambda: None)
    report = Report("test", Settings(against=("eager",), blocks=1, small=True))
    work = Workload("w", {}, torch.float32, lambda side: [lambda: torch.ones(3)], lambda: torch.ones(1, 3))
    compare(work, report)
    assert report.rows[0]["sides"]["eager"]["error"] == 0
    monkeypatch.setattr(comparators.timing, "synchronize", failed)
    with pytest.raises(RuntimeError, match="illegal"):
        compare(work, report)
    assert len(report.rows) == 2


def test_int8_is_no_plain_best_and_has_a_table_of_its_own(capsys):
    sides = {"dsi": (2.0, False), "dsi-int8": (1.0, True), "reduce-overhead": (3.0, False), "torchao": (1.5, True)}
    named = {name: {"device": ms, "wall": ms, "int8": int8, "roofline share": 0.5} for name, (ms, int8) in sides.items()}
    row = {"title": "w", "roofline ms": 0.5, "sides": named}
    assert all(name == "dsi" or SIDES[name].int8 == int8 for name, (_, int8) in sides.items())
    assert tables.best_of(row, "device", ours=True) == ("dsi", 2.0)
    assert tables.best_of(row, "device", ours=False) == ("reduce-overhead", 3.0)
    report = Report("test", Settings(small=True))
    report.rows.append(row)
    tables.summary(report)
    printed = capsys.readouterr().out.split("int8 weights")[1]
    assert printed.split()[-7:] == ["w", "1.0000", "0.50", "2.00", "3.00", "-", "1.50"]


def test_bytes_of_engines(tmp_path):
    settings = Settings(small=True, json=tmp_path / "m.json")
    report = engine_memory.run(settings, ["llama-3-8b"], 1, {"executor": "reference"})
    (row,) = json.loads((tmp_path / "m.json").read_text())["rows"]
    plain, int8 = (row["forms"][form] for form in ("plain", "int8"))
    assert plain["weights"] == plain["built"] and row["ratio"] == int8["weights"] / plain["weights"] < 0.55
    assert engine_memory.good(report)
    report.rows[0]["ratio"] = None
    assert not engine_memory.good(report)
