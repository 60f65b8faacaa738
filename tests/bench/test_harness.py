"""The benchmark harness at toy sizes on the CPU: every command runs, says what it skips, and times nothing whose numbers are wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsi.codegen import cost, generate
from typer.testing import CliRunner

from bench import attention, comparators, compile_pool, decode, gpt_regions, linear, linear_forms, shapes, tables, timing
from bench.__main__ import app
from bench.comparators import Workload, compare
from bench.estimates import EAGER
from bench.report import Report, Settings
from bench.sides import SIDES, Side

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def said(output):
    """What a message in a box says; it is broken wherever a line is full."""
    return " ".join(output.replace("│", "").split())


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.fixture
def report():
    return Report("test", Settings(against=("eager",), blocks=2, small=True))


def adding(report, side, call, **more):
    """The row of a workload that doubles ones, with `call` in place of the side named "default"."""
    x = torch.ones(4)

    def compile_for(asked):
        return [lambda: call() if asked.name == "default" else x * 2] * 3

    report.settings.against = ("eager", side)
    work = Workload("twice", {}, torch.float32, compile_for, lambda: (x.double() * 2)[None], **more)
    compare(work, report)
    return report.rows[-1]["sides"]


# ----------------------------------------------------------------------------------------------------------------------- commands


def test_decode_compares_dsi_with_eager_and_keeps_what_it_measured(tmp_path):
    file = tmp_path / "out" / "decode.json"
    code, output = run("decode", "--small", "--cases", "gpt2", "--against", "eager,dsi", "--blocks", 2, "--json", file)
    assert code == 0, output
    (row,) = rows_of(file)
    assert (row["case"], row["layers"], row["batch"], row["cache"], row["live"]) == ("gpt2", 2, 1, 32, 22)
    for side in ("eager", "dsi"):
        found = row["sides"][side]
        assert found["problem"] == "" and found["error"] < 1e-5 and found["wall"] > 0 and found["host"] > 0
        assert found["device"] is None and found["method"] == ""  # there is none here
    assert "dsi" in output and "Summary" in output


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        (("decode", "--cases", "llama-3-8b,bert-large", "--batches", "1,3"), 3),  # an encoder runs at one batch
        (("prefill", "--batches", "2"), 1),
        (("regions",), 4),
        (("attention",), 2),
    ],
)
def test_every_command_runs_eager_at_toy_sizes(tmp_path, words, titles):
    file = tmp_path / "r.json"
    code, output = run(*words, "--small", "--against", "eager", "--blocks", 1, "--json", file)
    assert code == 0, output
    rows = rows_of(file)
    assert len(rows) == titles
    assert all(row["sides"]["eager"]["problem"] == "" and row["sides"]["eager"]["wall"] > 0 for row in rows), output
    assert max(map(len, output.splitlines())) <= 200


def test_linear_checks_generated_kernels_and_choices_given_to_it(tmp_path):
    """In a process of its own: the interpreter must be chosen before triton is imported."""
    file = tmp_path / "linear.json"
    words = ["--form", "norm-gated", "--choice", "block_n=8|64", "--sweep", "--most", "2", "--json", str(file)]
    command = [sys.executable, "-m", "bench", "linear", "--small", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = rows_of(file)
    assert [(row["n"], row["k"], row["m"]) for row in rows] == [(48, 32, 1), (32, 64, 5)]
    for row in rows:
        assert {8, 64} <= {choice["choice"]["block_n"] for choice in row["choices"]}
        assert {0, 1} <= {choice["rank"] for choice in row["choices"]} and row["choices"][0]["rank"] == 0
        assert all(choice["problem"] == "" and choice["error"] < 1e-5 for choice in row["choices"])


@pytest.mark.slow
def test_compile_times_cold_and_warm_processes(tmp_path):
    file = tmp_path / "compile.json"
    code, output = run("compile", "--small", "--against", "dsi", "--json", file)
    assert code == 0, output
    cold, warm = rows_of(file)
    assert (cold["caches"], warm["caches"]) == ("cold", "warm")
    assert warm["seconds"] < cold["seconds"] and {"lift", "fuse", "lower"} <= set(cold["parts"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("decode", "--against", "eager,defualt"), "defualt"),
        (("decode", "--cases", "gpt3"), "gpt3"),
        (("prefill", "--cases", "bert-large"), "bert-large"),
        (("decode", "--dtype", "fp8"), "fp8"),
        (("regions", "--widths", "1000"), "1000"),
        (("attention", "--decode", "1x2x3"), "1x2x3"),
        (("linear", "--shapes", "4096x4096"), "4096x4096"),
        (("linear", "--small", "--choice", "block_q=4"), "block_q"),
        (("linear", "--small", "--choice", "block_n=24"), "power of two"),
        (("linear", "--small", "--choice", "split=0"), "split must be 1"),
        (("linear", "--small", "--choice", "num_warps=many"), "num_warps cannot be 'many'"),
        (("linear", "--small", "--choice", "schedule=gemm"), "gemm"),
        (("linear", "--models", "gpt2", "--rows", "0"), "1 or more"),
        (("decode", "--cases", " , "), "(none)"),
        (("decode", "--batches", "0,1"), "1 or more"),
        (("decode", "--live", "600", "--cache", "512"), "a cache of 610"),
        (("decode", "--live", "-1"), "1 or more"),
        (("decode", "--limit", "-3"), "--limit"),
        (("decode", "--budget", "nan"), "--budget"),
        (("timeline", "--live", "600"), "a cache of 610"),
        (("bytes", "--live", "600"), "a cache of 610"),
        (("in-model", "--live", "600"), "a cache of 610"),
        (("compile", "--cache", "3"), "a cache of 11"),
        (("deepspeed", "--live", "600", "--room", "512"), "a cache of 610"),
        (("prefill", "--lengths", "512,0"), "1 or more"),
        (("regions", "--only", "qkv,mlp"), "unknown region mlp"),
        (("attention", "--decode", "1x4x3x16x32x9"), "no multiple of 3"),
        (("attention", "--decode", "1x4x2x16x32xlive"), "numbers of 1 or more"),
        (("attention", "--decode", "", "--prefill", ""), "no case is left"),
        (("generate", "--sides", ""), "unknown way (none)"),
        (("audit", "--device", "H300"), "H300"),
        (("audit", "--batches", "0"), "1 or more"),
    ],
)
def test_mistakes_are_named_before_anything_runs(words, named):
    code, output = run(*words)
    assert code == 2 and named in said(output)


def test_without_a_device_sizes_made_for_one_are_warned_of(capsys):
    hints = []
    for command, small in (("decode", False), ("decode", True), ("generate", False)):
        Report(command, Settings(small=small))
        hints.append("no CUDA device" in capsys.readouterr().out)
    assert hints == [True, False, False]


def test_an_audit_under_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, output = run("audit", "--cases", "gpt2")
    assert code == 2 and "compiles nothing" in said(output)


def test_lists_may_have_spaces(tmp_path):
    file = tmp_path / "r.json"
    code, output = run("decode", "--small", "--cases", "gpt2, bert-large", "--sides", " eager", "--blocks", 1, "--json", file)
    assert code == 0 and [row["case"] for row in rows_of(file)] == ["gpt2", "bert-large"], output


@pytest.mark.parametrize("command", ["decode", "memory", "linear", "repeat"])
def test_a_file_that_cannot_be_written_is_named_before_anything_runs(tmp_path, command):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        code, output = run(command, "--small", "--json", path)
        assert code == 2 and "cannot be written" in said(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', '{"format": 1, "devices": {"H200": [{"rows": 0}]}}'])
def test_a_table_of_defaults_that_cannot_be_added_to_is_named_before_anything_runs(tmp_path, content):
    file = tmp_path / "defaults.json"
    file.write_text(content)
    for command in ("linear", "in-model"):
        code, output = run(command, "--small", "--defaults", file)
        assert code == 2 and "no table of defaults" in said(output) and file.read_text() == content


def test_winners_of_a_gpu_without_a_name_in_the_table_are_kept_for_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "device_name", lambda: "NVIDIA L4 sm_89")
    for command in ("linear", "in-model"):
        code, output = run(command, "--small", "--defaults", tmp_path / "defaults.json")
        assert code == 2 and "winners are kept for H200, H100, A100, and this is NVIDIA L4 sm_89" in said(output)


def test_a_disk_that_is_full_loses_the_file_and_not_the_run(tmp_path, monkeypatch, capsys):
    report = Report("test", Settings(against=("eager",), blocks=1, small=True, json=tmp_path / "r.json"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    x = torch.ones(4)
    (outcome,) = compare(Workload("ones", {}, torch.float32, lambda side: [lambda: x * 1], lambda: x.double()[None]), report)
    printed = capsys.readouterr().out
    assert outcome.problem == "" and "r.json was not written" in printed and "No space left" in printed
    assert "ones, ms" in printed  # its table


def test_a_choice_for_fewer_rows_is_left_out(tmp_path):
    file = tmp_path / "linear.json"
    code, output = run("linear", "--small", "--shapes", "16x16x5", "--choice", "max_rows=4", "--json", file)
    assert code == 0, output
    own, given = rows_of(file)[0]["choices"]
    assert given["problem"] == "a kernel for at most 4 rows" and own["rank"] is not None


# --------------------------------------------------------------------------------------------------------------------- what holds


def test_a_side_with_wrong_numbers_is_not_timed(report):
    sides = adding(report, "default", lambda: torch.full((4,), 2.001))
    assert "wrong" in sides["default"]["problem"] and "wall" not in sides["default"]
    assert sides["eager"]["problem"] == "" and sides["eager"]["wall"] > 0


def test_a_side_that_gives_nan_is_not_timed(report):
    assert "wrong" in adding(report, "default", lambda: torch.full((4,), float("nan")))["default"]["problem"]


def test_a_side_that_fails_leaves_the_others(report):
    def fail():
        raise RuntimeError("no such kernel")

    sides = adding(report, "default", fail)
    assert "no such kernel" in sides["default"]["problem"] and sides["eager"]["wall"] > 0


def test_what_does_not_fit_the_budget_is_skipped_and_said(tmp_path, capsys):
    settings = Settings(("eager", "max-autotune"), 1, budget=timing.Budget(30.0), json=tmp_path / "r.json")
    report = Report("test", settings)
    comparators._measured.clear()
    x = torch.ones(4)
    compare(Workload("ones", {}, torch.float32, lambda side: [lambda: x * 1], lambda: x.double()[None]), report)
    assert report.skipped == ["ones: max-autotune"] and "max-autotune" not in report.rows[0]["sides"]
    assert "skipped" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["skipped"] == ["ones: max-autotune"]


def test_blocks_of_sides_take_turns_and_each_begins_prepared():
    log = []
    timers = [timing.Timer([lambda name=name: log.append(name)] * 2, lambda name=name: log.append(f"({name})")) for name in "ab"]
    timing.interleave(timers, 2)
    block = {name: [f"({name})", name, name] for name in "ab"}
    if not torch.cuda.is_available():
        assert log == [word for name in "ababba" for word in block[name]]
    assert all(len(timer.times.wall) == 2 for timer in timers)  # the first of each does not count


def test_a_rewound_cache_gives_the_same_step_again():
    model = shapes.build(shapes.SHAPES["llama-3-8b"].small(), 2, 32, torch.float32, "cpu")
    work = decode.decode(model, "toy", 2, 32, 7)
    calls = work.compile_for(SIDES["eager"])
    with torch.no_grad():
        first = comparators.run_checked(work, calls)
        second = comparators.run_checked(work, calls)
        assert torch.equal(first, second) and not torch.equal(first[0], first[1])
        assert timing.relative_error(first, work.reference()) < 1e-5


def test_a_block_must_fit_the_cache():
    model = shapes.build(shapes.SHAPES["gpt2"].small(), 1, 32, torch.float32, "cpu")
    with pytest.raises(ValueError, match="live <= 22"):
        decode.decode(model, "toy", 1, 32, 23)


def test_bytes_count_each_weight_once_and_no_table_of_rows():
    tied = shapes.build(shapes.SHAPES["llama-3.2-1b"].small(), 2, 32, torch.float32, "cpu")
    untied = shapes.build(shapes.SHAPES["llama-3-8b"].small(), 2, 32, torch.float32, "cpu")
    assert shapes.weight_bytes(tied) == shapes.weight_bytes(untied)
    everything = sum(p.numel() * 4 for p in untied.parameters())
    assert shapes.weight_bytes(untied) == everything - 199 * 64 * 4
    head, rest = 199 * 64, sum(p.numel() for p in untied.parameters() if p.dim() == 2) - 2 * 199 * 64
    assert shapes.weight_flops(untied, 5, 1) == 2 * (5 * rest + head)
    assert shapes.cache_bytes(untied, 3, 10) == 2 * 2 * 3 * 2 * 16 * 10 * 4


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2", 0.124), ("gpt2-xl", 1.56), ("llama-3.2-1b", 1.24), ("llama-7b", 6.74), ("llama-3-8b", 8.03)]
)
def test_shapes_have_the_sizes_of_the_models_they_are_named_for(name, billions):
    shape = shapes.SHAPES[name]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(shape.config(shape.layers, 1024))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.parameters(shape.layers) / 1e9 == pytest.approx(billions, rel=0.01)


def test_all_copies_of_a_region_share_what_was_compiled():
    from torch._dynamo.utils import counters

    side = Side("traced", "aot_eager", None, True, EAGER)
    for name in ("qkv", "attention", "mlp_in", "mlp_out"):
        torch._dynamo.reset()
        counters.clear()
        work = gpt_regions.workload(name, 64, 24, torch.float32, "cpu")
        with torch.no_grad():
            for call in work.compile_for(side):
                call()
        assert work.in_graph >= 2 and counters["stats"]["unique_graphs"] == 1, name


def test_attention_counts_what_is_live():
    short, full = (attention.workload(attention.Case(2, 4, 2, 16, 32, live), torch.float32, "cpu") for live in (8, 32))
    assert full.moved == 4 * short.moved
    with pytest.raises(ValueError, match="live"):
        attention.Case.parse("1x2x2x16x32x33")


def test_choices_are_combinations_and_values_keep_their_kind():
    assert linear.parse_choices("block_n=8|16,num_warps=4") == [{"block_n": 8, "num_warps": 4}, {"block_n": 16, "num_warps": 4}]
    assert linear.parse_choices("schedule=tiled,max_rows=None") == [{"schedule": "tiled", "max_rows": None}]


def test_models_linears_are_listed_once_for_every_number_of_rows():
    listed = linear.model_cases(["llama-3-8b", "gpt2"], [1, 128], None)
    assert len(listed) == len(set(listed)) == 5 + 5 + 4 + 4  # heads for one row a sequence only
    assert [case.m for case in listed] == sorted(case.m for case in listed)
    assert linear.Case("norm-qkv-rope", 6144, 4096, 1, torch.bfloat16) in listed
    assert linear.Case("norm-qkv-kn", 2304, 768, 128, torch.float16) in listed


def test_a_process_of_the_pool_says_what_went_wrong():
    """Specifications and kernels travel between processes; without a device nothing can be compiled there."""
    problem = linear.Problem("norm", 24, 16, 2, torch.float32, "cpu")
    (choice,) = cost.choices(problem.spec)
    with compile_pool.CompilePool("", workers=1) as pool:
        (future,) = pool.submit(problem.spec, [choice])
        found = future.result(120)
    assert [kernel.source for kernel in found.kernels] == [kernel.source for kernel in generate(problem.spec, choice)]
    assert found.problem or torch.cuda.is_available()


def test_a_form_must_be_one_region():
    def two(x, w):
        return torch.nn.functional.linear(torch.nn.functional.linear(x, w), w)

    with pytest.raises(ValueError, match="2 regions"):
        linear_forms.region_of(two, [torch.randn(1, 16), torch.randn(16, 16)])


@pytest.mark.parametrize("form", linear_forms.FORMS)
def test_every_form_is_one_region_with_its_inputs_in_place(form):
    problem = linear_forms.Problem(form, 192, 64, 2, torch.float32, "cpu")
    problem.fill()  # holds the region's body against the function
    changing = {number for number, place in enumerate(problem.order) if problem.letters[place] in "xr"}
    assert len(problem.sets) == 2 and problem.spec.constants == set(range(len(problem.order))) - changing
    weights = [window.weight for segment in problem.spec.plan.segments for window in segment.windows]
    assert set(weights) <= problem.spec.constants and problem.bound < 1e-5


@pytest.mark.parametrize("form", [form for form in linear_forms.FORMS if not form.endswith("kn")])
def test_every_form_with_int8_weights_has_its_inputs_in_place(form):
    problem = linear_forms.Problem(form, 192, 64, 1, torch.float32, "cpu", int8=True)
    problem.fill()  # holds the region's body against the function
    windows = [window for segment in problem.spec.plan.segments for window in segment.windows]
    assert all(problem.spec.inputs[window.weight].dtype == torch.int8 for window in windows)
    read = {number for window in windows for number in (window.weight, window.scale.input)}
    weights = {window.weight for window in windows}  # several windows may read parts of one
    assert read <= problem.spec.constants and problem.moved == sum(problem.spec.inputs[weight].sizes[0] for weight in weights) * 64


def test_int8_weights_stored_across_are_refused():
    with pytest.raises(ValueError, match="int8 weights are stored"):
        linear_forms.Problem("norm-qkv-kn", 192, 64, 1, torch.float32, "cpu", int8=True)


def test_the_fastest_is_sought_among_dsi_or_among_the_others(report):
    sides = adding(report, "default", lambda: torch.full((4,), 2.0))
    name, wall = tables.best_of(report.rows[-1], "wall", ours=False)
    assert wall == min(side["wall"] for side in sides.values()) == sides[name]["wall"]
    assert tables.best_of(report.rows[-1], "wall", ours=True) == ("-", None)
