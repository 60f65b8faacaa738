"""The run of all benchmarks, the picture of their results, DeepSpeed's side where it is not installed, the parts of a compilation."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from bench import compile_time, estimates, everything, plot, rows
from bench.__main__ import app
from bench.estimates import Size
from bench.everything import Everything
from bench.rows import Row
from bench.sides import SIDES, sides_of


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def side(share, device=1.0):
    return {"device": device, "wall": 2 * device, "roofline share": share, "problem": "", "kernels": {}}


def content(**rows):
    shared = {"layers": 8, "batch": 1, "live": 502, "cache": 512, "roofline ms": 0.5}
    listed = [{"title": name, "case": name, **shared, "sides": sides} for name, sides in rows.items()]
    return {"machine": {"device": "a <chip>"}, "rows": listed, "skipped": []}


# --------------------------------------------------------------------------------------------------------------------------- all


@pytest.fixture
def ran(monkeypatch):
    """Commands that `all` would have run, with what each leaves and how it ends, by the first word after `bench`."""
    commands, ends = [], {}

    def run_within(command, limit, log):
        commands.append((command, limit))
        state, left = ends.get(command[3], (("ok", ""), content(gpt2={"dsi": side(0.8), "eager": side(0.1, 8.0)})))
        if left is not None:
            file = command[command.index("--json") + 1]
            with open(file, "w") as out:
                json.dump(left, out)
        return state

    monkeypatch.setattr(everything, "run_within", run_within)
    return commands, ends


def test_one_that_fails_loses_no_other(ran, tmp_path, capsys):
    commands, ends = ran
    ends["prefill"] = (("failed", "exit status 1: no such kernel"), None)
    listed = [Row("a", ("prefill",), 10, "dsi", (Size(4),)), Row("b", ("decode",), 10, "dsi", (Size(4),)), Row("c", ("repeat",), 10)]
    assert not Everything(1000, tmp_path, "quick", small=False).run(listed)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [state["state"] for state in found["states"]] == ["failed", "ok", "ok"]
    assert [run["row"] for run in found["runs"]] == ["b", "c"] and found["runs"][0]["machine"]["device"] == "a <chip>"
    assert (tmp_path / "roofline.svg").exists()
    printed = capsys.readouterr().out
    assert "no such kernel" in printed and "8.00 x" in printed and "roofline 0.50" in printed
    assert [("--sides" in command) for command, _ in commands] == [True, True, False]
    assert commands[0][0][commands[0][0].index("--sides") + 1] == rows.SETS["quick"]


def test_rows_have_sides_of_their_own(ran, tmp_path):
    commands, _ = ran
    Everything(1000, tmp_path, "own", small=False).run([Row("b", ("decode",), 10, "dsi,torchao", (Size(4),))])
    ((command, _),) = commands
    assert command[command.index("--sides") + 1] == "dsi,torchao"


def test_a_row_of_which_a_part_failed_is_incomplete(ran, tmp_path):
    _, ends = ran
    broken = {"title": "b512", "sides": {}, "problem": "OutOfMemoryError: 3 GB"}
    ends["decode"] = (("ok", ""), {"machine": {}, "rows": [broken], "skipped": ["b1024"]})
    assert not Everything(1000, tmp_path, "own", small=False).run([Row("b", ("decode",), 10, "dsi", (Size(4),))])
    (state,) = json.loads((tmp_path / "results.json").read_text())["states"]
    assert state["state"] == "incomplete" and "b512: OutOfMemoryError" in state["why"] and "b1024" in state["why"]


FAKE = """
import json, os, subprocess, sys, time
kind, file = sys.argv[1], sys.argv[sys.argv.index("--json") + 1]
row = {"title": kind, "device": "chip", "sides": {"dsi": {"wall": 1.0, "roofline share": 0.5, "kernels": {}}}}
if kind != "early":
    with open(file, "w") as out:
        json.dump({"machine": {}, "rows": [row], "skipped": []}, out)
print("begun", flush=True)
if kind in ("abort", "early"):
    os.abort()
if kind == "hang":
    subprocess.run(["sleep", "60"])
if kind == "fault":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def test_rows_that_abort_hang_or_fault_leave_the_others_and_what_they_had(tmp_path):
    """In real processes: the compiler's abort, a row past its time with a child, a device that failed."""
    run_ = Everything(60, tmp_path, "own", small=False)
    run_.program = [sys.executable, "-c", FAKE]
    kinds = ("early", "abort", "hang", "fault", "fine")
    begun = time.monotonic()
    assert not run_.run([Row(kind, (kind,), 0.8 if kind == "hang" else 5.0) for kind in kinds])
    assert time.monotonic() - begun < 40
    found = json.loads((tmp_path / "results.json").read_text())
    states = {state["row"]: state for state in found["states"]}
    assert [states[kind]["state"] for kind in kinds] == ["failed", "failed", "stopped", "failed", "ok"]
    assert "illegal memory access" in states["fault"]["why"]
    assert [part["row"] for part in found["runs"]] == ["abort", "hang", "fault", "fine"]
    assert (tmp_path / "roofline.svg").exists()


def test_a_run_that_is_told_to_end_ends_its_row_and_keeps_what_it_had(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom bench.everything import Everything\nfrom bench.rows import Row\n"
        "run = Everything(60, Path(sys.argv[1]), 'own', small=False)\nrun.program = [sys.executable, '-c', sys.argv[2]]\n"
        "run.run([Row('fine', ('fine',), 5.0), Row('hang', ('hang',), 30.0), Row('late', ('fine',), 5.0)])"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), FAKE], cwd=everything.ROOT)
    log = tmp_path / "log.txt"
    while not (log.exists() and len(log.read_text().split(" hang --json")) == 2 and "\nbegun" in log.read_text().split(" hang --json")[1]):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) != 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [state["state"] for state in found["states"]] == ["ok", "stopped"] and [part["row"] for part in found["runs"]] == [
        "fine",
        "hang",
    ]


def test_what_is_left_when_the_time_is_over_is_named(tmp_path):
    run_ = Everything(0.5, tmp_path, "own", small=False)
    run_.program = [sys.executable, "-c", FAKE]
    assert not run_.run([Row("fine", ("fine",), 5.0), Row("late", ("fine",), 5.0)])
    found = json.loads((tmp_path / "results.json").read_text())
    assert [state["state"] for state in found["states"]] == ["skipped", "skipped"] and found["runs"] == []


def test_what_does_not_fit_the_time_is_skipped(ran, tmp_path):
    commands, _ = ran
    listed = [Row("long", ("decode",), 500), Row("short", ("decode",), 20)]  # neither has sides
    assert not Everything(100, tmp_path, "quick", small=False).run(listed)
    states = json.loads((tmp_path / "results.json").read_text())["states"]
    assert [state["state"] for state in states] == ["skipped", "ok"]
    ((command, limit),) = commands
    assert limit == pytest.approx(20 * everything.PATIENCE, abs=1) and float(command[command.index("--budget") + 1]) < limit


def test_sides_that_compile_long_are_counted_in_every_workload():
    sizes = (Size(4, 1), Size(4, 512))
    row, rest = Row("8b", ("decode",), 60, "dsi", sizes), 2 * (estimates.REFERENCE + estimates.timing(2))
    seconds = {side: sum(SIDES[side].seconds(size) for size in sizes) for side in ("dsi", "max-autotune")}
    assert row.expected() == pytest.approx(60 + seconds["dsi"] + 2 * (estimates.REFERENCE + estimates.timing(1)))
    assert row.expected("max-autotune,dsi") == pytest.approx(60 + sum(seconds.values()) + rest)
    assert Row("repeat", ("repeat",), 60).expected("max-autotune") == 60


def test_a_command_is_stopped_with_what_it_started(tmp_path):
    log = tmp_path / "log.txt"
    start = time.monotonic()
    words = [sys.executable, "-c", "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"]
    state, why = everything.run_within(words, 1.0, log)
    assert (state, why) == ("stopped", "after 1 s") and time.monotonic() - start < 20
    assert everything.run_within([sys.executable, "-c", "raise SystemExit('no chip')"], 60, log) == ("failed", "exit status 1: no chip")
    assert everything.run_within([sys.executable, "-c", ""], 60, log) == ("ok", "")
    assert log.read_text().count("$ ") == 3 and "begun" in log.read_text()


def test_every_row_is_a_command_that_is_understood(tmp_path):
    from typer.main import get_command

    group = get_command(app)
    for row in rows.ROWS:
        command = group.commands[row.words[0]]
        more = ["--json", str(tmp_path / "x"), "--budget", "5", "--small"]
        more += ["--sides", row.sides, "--limit", "9"] if row.sizes else []
        command.make_context(row.words[0], [*row.words[1:], *more])  # raises where an option is unknown
        assert not row.sides or sides_of(row.sides)
    names = [row.name for row in rows.ROWS]
    assert len(names) == len(set(names))


def test_the_rows_that_are_asked_for_are_listed():
    code, output = run("all", "--list", "--rows", "8b-1, gpt2")
    assert code == 0 and [line.split()[0] for line in output.splitlines()] == ["row", "8b-1", "gpt2"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    code, output = run("all", "--small", "--out", tmp_path / "file", "--seconds", 5)
    assert code == 2 and "cannot be written" in " ".join(output.replace("│", "").split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rows", "gpt5"), "gpt5"),
        (("--sides", "fastest"), "fastest"),
        (("--seconds", "nan"), "--seconds"),
        (("--seconds", "-5"), "--seconds"),
    ],
)
def test_mistakes_are_named(words, named):
    code, output = run("all", *words)
    assert code == 2 and named in output


@pytest.mark.slow
def test_all_at_toy_sizes(tmp_path):
    code, output = run("all", "--small", "--rows", "gpt2,attention", "--sides", "eager", "--out", tmp_path)
    assert code == 0, output
    assert [run["row"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]] == ["gpt2", "attention"]


# ------------------------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_has_a_bar_a_side(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(content(gpt2={"dsi": side(0.52), "reduce-overhead": side(0.1), "default": side(None)})))
    two.write_text(json.dumps({"runs": [content(gpt2={"max-autotune": side(0.3)}, xl={"dsi": side(0.7)})]}))
    code, output = run("plot", one, two, "--out", tmp_path / "p.svg")
    assert code == 0, output
    text = (tmp_path / "p.svg").read_text()
    assert text.count("<title>") == 4 and "gpt2, 8 layers, b1, 502 of 512 tokens: dsi 0.52" in text
    assert "a &lt;chip&gt;" in text and "default" not in text
    assert text.index(": dsi 0.52") < text.index(": max-autotune 0.30")


def test_a_picture_of_some_sides_has_rows_of_a_model_together(tmp_path):
    file = tmp_path / "d.json"
    rows = [content(gpt2={"dsi": side(0.5), "default": side(0.1)}), content(bert={"dsi": side(0.4)}), content(gpt2={"dsi": side(0.6)})]
    for batch, part in zip((16, 1, 2), rows, strict=True):
        part["rows"][0]["batch"] = batch
    file.write_text(json.dumps({"runs": rows}))
    code, output = run("plot", file, "--sides", "dsi", "--out", tmp_path / "p.svg")
    assert code == 0, output
    text = (tmp_path / "p.svg").read_text()
    places = [text.index(part) for part in ("bert, 8 layers, b1,", "gpt2, 8 layers, b2,", "gpt2, 8 layers, b16,")]
    assert places == sorted(places) and "default" not in text
    code, output = run("plot", file, "--sides", "dsi,egaer")
    assert code == 2 and "'egaer'" in output and "default" in output


def test_no_two_sides_share_a_colour():
    sides = ["dsi", *(f"dsi-{number}" for number in range(7)), *(f"other-{number}" for number in range(7))]
    assert len(set(plot.colours_of(sides).values())) == len(sides)


def test_nothing_to_draw_is_said(tmp_path):
    empty = tmp_path / "e.json"
    empty.write_text(json.dumps(content(gpt2={"dsi": side(None)})))
    for words, named in (((empty,), "no row has a share"), ((tmp_path / "none.json",), "none.json")):
        code, output = run("plot", *words)
        # A message in a box is broken wherever its line is full.
        assert code == 2 and "".join(named.split()) in "".join(output.replace("│", "").split())
    with pytest.raises(ValueError, match="ends in"):
        plot.draw([_drawn(tmp_path)], tmp_path / "p.pdf")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"rows": 3}', '{"rows": ["a"]}', '{"runs": 3}', '{"rows": [{"sides": {"dsi": 3}}]}', '{"machine": 1}', "\x00{"]
    + [json.dumps({"rows": [{"sides": {"dsi": {"roofline share": share}}}]}) for share in ("a", [1], -1, float("inf"), float("nan"))],
)
def test_what_is_no_result_is_named(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no result of a benchmark: "):
        plot.draw([_drawn(tmp_path), file], tmp_path / "p.svg")
    assert not (tmp_path / "p.svg").exists()


def test_a_picture_makes_its_folder_or_says_that_it_cannot(tmp_path):
    plot.draw([_drawn(tmp_path)], tmp_path / "new" / "p.svg")
    assert (tmp_path / "new" / "p.svg").exists()
    (tmp_path / "p.svg").mkdir()
    with pytest.raises(ValueError, match=r"p\.svg cannot be written"):
        plot.draw([_drawn(tmp_path)], tmp_path / "p.svg")


def _drawn(folder):
    file = folder / "d.json"
    file.write_text(json.dumps(content(gpt2={"dsi": side(0.5)})))
    return file


def test_a_png_by_matplotlib(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ValueError, match="matplotlib"):
            plot.draw([_drawn(tmp_path)], tmp_path / "p.png")
        return
    plot.draw([_drawn(tmp_path)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------------- DeepSpeed, compilation


def test_deepspeeds_layers_are_left_out_where_it_is_not_installed(tmp_path):
    file = tmp_path / "d.json"
    code, output = run("deepspeed", "--small", "--sides", "eager,deepspeed", "--blocks", 1, "--json", file)
    assert code == 0, output
    found = json.loads(file.read_text())
    (row,) = found["rows"]
    assert row["sides"]["eager"]["problem"] == "" and row["sides"]["eager"]["error"] < 1e-5
    if importlib.util.find_spec("deepspeed") is None:
        assert "deepspeed" not in row["sides"] and "not installed" in found["skipped"][0]


def test_parts_of_a_compilation_add_up():
    own = {"guard": 0.1, "lift": 0.2, "fuse": 0.5, "kernels": 1.0, "after aot": 2.0}
    parts = compile_time.parts_of(10.0, {"compile": 9.0, "backend": 4.0}, own)
    assert sum(parts.values()) == pytest.approx(10.0)
    assert parts["Dynamo"] == 5.0 and parts["AOTAutograd"] == pytest.approx(1.7) and parts["dsi, the rest"] == pytest.approx(0.5)
    assert sum(compile_time.parts_of(10.0, {"compile": 9.0, "backend": 4.0}, {}).values()) == pytest.approx(10.0)
