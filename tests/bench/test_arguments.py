"""The modules of the bench that have command lines of their own name mistakes before anything runs, and delete nothing but their own."""

import argparse
import sys

import pytest

from bench import arguments, cpu_decode, demo, layer_check, regions


@pytest.mark.parametrize(
    ("main", "words", "named"),
    [
        (layer_check.main, ["--models", "gpt2,gtp2"], "unknown: gtp2"),
        (layer_check.main, ["--models", ""], "unknown: (none)"),
        (layer_check.main, ["--dtypes", "fp8"], "unknown: fp8"),
        (layer_check.main, ["--batches", "1,0"], "'0' is no number of 1 or more"),
        (layer_check.main, ["--device", "tpu"], "tpu"),
        (regions.main, ["--models", "GPT-5"], "unknown: GPT-5"),
        (demo.main, ["--tokens", "0"], "'0' is no number"),
        (demo.main, ["--rounds", "-1"], "--rounds"),
        (cpu_decode.main, ["--threads", "0"], "'0' is no number"),
        (cpu_decode.main, ["--cache", "64"], "a cache of 64 has no room for the 97 tokens"),
    ],
)
def test_mistakes_are_named(main, words, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and named in capsys.readouterr().err


def test_an_output_is_a_file_that_can_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    assert arguments.output(str(tmp_path / "new" / "r.json")) == tmp_path / "new" / "r.json"
    assert arguments.output(str(tmp_path / "file")) == tmp_path / "file" and (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new"]
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            arguments.output(str(path))


def test_a_demo_replaces_the_graphs_of_a_former_dump_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "graph_000").mkdir()
    for name in ("thesis.txt", "graph_000/report.txt"):
        (tmp_path / name).write_text("mine")

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(demo.models, "smollm2", stop)
    monkeypatch.setattr(sys, "argv", ["demo", "--dump", str(tmp_path)])
    with pytest.raises(InterruptedError):
        demo.main()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
