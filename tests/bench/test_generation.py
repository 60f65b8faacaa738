"""`python -m bench generate` at toy sizes on the CPU: the engine's tokens are eager's, and what was measured is kept."""

import json
import types

from typer.testing import CliRunner

from bench import generation
from bench.__main__ import app
from bench.report import Settings


def test_the_engine_beside_eager(tmp_path):
    file = tmp_path / "generate.json"
    settings = Settings(blocks=2, small=True, json=file)
    generation.run(settings, ["llama-3-8b"], ["eager", "dsi"], 8, 9, 1, None, {"executor": "reference"})
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["case"], row["prompt"], row["new"], row["batch"]) == ("llama-3-8b", 9, 8, 1)
    for side in ("eager", "dsi"):
        found = row["sides"][side]
        assert found["problem"] == "" and found["tokens as eager"] == 8
        assert found["wall"] > 0 and found["first"] > 0 and found["later"] > 0
    assert row["sides"]["dsi"]["in transformers' loop because"] == ""
    assert row["end"] > 0, "an end is looked for"


def test_a_side_that_fails_is_named_and_the_others_are_timed(tmp_path, monkeypatch, capsys):
    def fails(*arguments, **how):
        raise RuntimeError("no such luck")

    made = generation._side
    monkeypatch.setattr(generation, "_side", lambda name, *rest: generation.Side(name, fails) if name == "static" else made(name, *rest))
    report = generation.run(Settings(blocks=1, small=True), ["gpt2"], ["eager", "static"], 4, 5, 2, None)
    (row,) = report.rows
    assert row["sides"]["static"]["problem"].startswith("RuntimeError: no such luck") and "wall" not in row["sides"]["static"]
    assert row["sides"]["eager"]["wall"] > 0 and row["sides"]["eager"]["first"] is None  # a streamer takes one row
    assert "no such luck" in capsys.readouterr().out


def test_words_of_the_command():
    result = CliRunner().invoke(app, ["generate", "--small", "--against", "eager", "--blocks", "1"])
    assert result.exit_code == 0 and "ms a token" in result.output and "gpt2 (toy), 2 layers" in result.output  # no real model
    assert CliRunner().invoke(app, ["generate", "--against", "eager,fast"]).exit_code != 0
    assert CliRunner().invoke(app, ["generate", "--cases", "bert-large"]).exit_code != 0


def test_transformers_own_compilation_is_asked_for():
    work = generation.workload("gpt2", Settings(small=True), 4, 5, 1, None)
    asked = {}
    work.model.generate = lambda *arguments, **how: asked.update(how)
    generation._side("static", work, None).generate(work.ids, max_new_tokens=4)
    assert asked["cache_implementation"] == "static" and asked["compile_config"]._compile_all_devices


def test_the_hosts_share_of_a_step_is_taken_where_nobody_looks():
    work = generation.workload("llama-3-8b", Settings(small=True), 8, 5, 1, None)
    side = generation._side("dsi", work, {"executor": "reference"})
    work.model.generation_config.eos_token_id = 7
    asked = []
    made = side.generate
    side.generate = lambda ids, **how: asked.append((how["max_new_tokens"], work.model.generation_config.eos_token_id)) or made(ids, **how)
    assert generation.host_step(side, work) > 0
    assert set(asked) == {(8, None), (2, None)} and work.model.generation_config.eos_token_id == 7
    assert not side.engine.loop._running and side.engine.loop.taken == 2
    work.new = 4
    assert generation.host_step(side, work) is None


def test_a_measurement_that_fails_leaves_the_row(monkeypatch):
    def fails(engine):
        raise RuntimeError("no counter")

    engine = types.SimpleNamespace(loop=None, why_not_ours="")
    monkeypatch.setattr(generation, "device_ms", fails)
    monkeypatch.setattr(generation, "_side", lambda name, work, options: generation.Side(name, work.model.generate, engine))
    report = generation.run(Settings(blocks=1, small=True), ["llama-3-8b"], ["dsi"], 5, 5, 1, None)
    (row,) = report.rows
    assert "no counter" in row["sides"]["dsi"]["problem"] and row["sides"]["dsi"]["wall"] > 0
