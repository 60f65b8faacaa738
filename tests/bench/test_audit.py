"""What kernels are made of, read off PTX; and the kernels of a small model compiled for a device that is not there."""

import json

import pytest
from typer.testing import CliRunner

from bench import audit, ptx, shapes
from bench.__main__ import app
from bench.audit import Found
from bench.report import Settings

TEXT = """
$L__BB0_1:
 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
$L__BB0_2:
 ld.global.L1::evict_first.v2.b32 {%r1, %r2}, [%rd1 + 16];
 @%p1 ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
 cp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, %r6;
 st.shared.v2.b32 [ %r1 ], {%r1, %r2};
 wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1}, %rd4, %rd5;
 @%p2 bra $L__BB0_2;
 @%p3 bra $L__BB0_1;
 @%p4 bra $L__BB0_3;
$L__BB0_3:
 ret;
"""


def test_loads_of_the_inner_loop_are_counted_by_width():
    (loop,) = ptx.loops(TEXT)
    assert loop.loads == {8: 1, 2: 1, 16: 1} and loop.widest == 16 and loop.bytes == 26
    assert (loop.exchanges, loop.products, loop.again) == (1, 1, True)
    (whole,) = ptx.loops(" ld.global.b32 %r1, [%rd1];\n ret;")
    assert whole.loads == {4: 1} and not whole.again


class Device:
    processors, shared = 132, 227 * 1024


@pytest.mark.parametrize(
    ("found", "schedule", "said"),
    [
        (Found("k", 200, 4, registers=64, loop=ptx.Loop({16: 4})), "gemv", []),
        (Found("k", 100, 4, loop=ptx.Loop({16: 4})), "skinny", ["few programs"]),
        (Found("k", 200, 4, spills=8, shared=228 * 1024, loop=ptx.Loop({4: 1})), "tiled", ["spills", "shared memory", "loads of 4 bytes"]),
        (Found("k", 200, 4, loop=ptx.Loop({16: 4}, exchanges=2)), "gemv", ["2 exchanges in the loop"]),
        (Found("k", 1, 4, loop=ptx.Loop({4: 4})), "row", []),
        (Found("k", 0, 1, problem="it aborted"), "row", ["it aborted"]),
    ],
)
def test_what_is_odd(found, schedule, said):
    assert found.odd(Device, schedule) == said


def test_programs_that_a_processor_holds():
    assert Found("k", 1, 4, registers=255).resident(Device) == 2
    assert Found("k", 1, 4, registers=32, shared=100 * 1024).resident(Device) == 2
    assert Found("k", 1, 16, registers=32).resident(Device) == 4


def test_a_compiler_that_aborts_is_a_finding(monkeypatch):
    import os
    import types

    kernel = types.SimpleNamespace(name="k")
    monkeypatch.setattr(audit, "compiled", lambda *_: os.abort())
    (found,) = audit.looked_at(None, kernel, 90)
    assert "ended its process" in found.problem and "-6" in found.problem
    monkeypatch.setattr(audit, "compiled", lambda *_: 1 / 0)
    (found,) = audit.looked_at(None, kernel, 90)
    assert "ZeroDivisionError" in found.problem


def test_kernels_of_a_small_model(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "gpt2", shapes.Shape("gpt2", 1, 64, 2, 128, 199, "fp16"))
    file = tmp_path / "a.json"
    result = CliRunner().invoke(app, ["audit", "--cases", "gpt2", "--cache", "32", "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["schedule"] for row in rows} >= {"gemv", "attention_decode", "row"}
    assert all(row["registers"] > 0 and row["programs"] > 0 and not row["spills"] for row in rows)
    assert all(row["loop"]["loads"] for row in rows if row["schedule"] == "gemv")


def test_int8_weights_need_no_values():
    regions = audit.regions_of(audit.Model("smollm2-135m", 1, cache=32, int8=True))
    assert any("linear_int8" in region.label for region, _ in regions)


def test_a_kernel_that_does_not_fit_fails_the_audit(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "gpt2", shapes.Shape("gpt2", 1, 64, 2, 128, 199, "fp16"))
    monkeypatch.setattr(audit, "compiled", lambda spec, kernel, capability: [Found(kernel.name, 200, 4, shared=300 * 1024)])
    report = audit.run(Settings(), [audit.Model("gpt2", cache=32)], "H200")
    assert not audit.good(report)
