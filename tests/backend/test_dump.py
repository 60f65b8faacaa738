"""The debug dump, the log and torch's trace: a planted miscompile is found with nothing else."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler import registry
from dsi.compiler.bisect import find_rewrite
from dsi.passes.pipeline import PIPELINE, Stage
from dsi.patterns.rule import Rule
from torch import nn


class Layers(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.5
        return x


class SlightlyWrong(Rule):
    """tanh(x)   ->   tanh(1.25 x), as a rule with a wrong constant would have it"""

    def pattern(self, op, x):
        return op.tanh(x)

    def rewrite(self, dsi, m):
        return dsi.call(torch.ops.aten.tanh.default, dsi.call(torch.ops.aten.mul.Tensor, m.x, 1.25))


def compile_into(folder, model, **options):
    return torch.compile(model, backend="dsi", options={"dump": folder, "executor": "reference", **options})


@torch.no_grad()
def test_the_files_of_a_graph(tmp_path):
    model = Layers()
    compile_into(tmp_path, model)(torch.randn(3, 5))
    graph = tmp_path / "graph_000"
    names = {p.name for p in graph.iterdir()}
    stages = ["00_dynamo", "01_lift", "02_shard", "02b_aot", "03_normalise", "04_recognise", "05_quantise", "06_fuse", "07_lower"]
    assert {f"{stage}.py" for stage in stages} | {"rules.txt", "regions.json", "report.txt", "01_lift.diff", "06_fuse.diff"} <= names
    assert "02_shard.diff" not in names  # nothing changed
    for stage in stages:
        compile((graph / f"{stage}.py").read_text(), stage, "exec")  # it is Python


@torch.no_grad()
def test_every_node_has_its_value_and_the_models_line(tmp_path):
    compile_into(tmp_path, Layers())(torch.randn(3, 5))
    for stage in ("00_dynamo", "01_lift", "02b_aot", "04_recognise"):
        text = (tmp_path / "graph_000" / f"{stage}.py").read_text()
        nodes = [line for line in text.splitlines() if re.match(r"    \w+ = ", line)]
        assert nodes
        for line in nodes:
            assert re.search(r"# float32\[3, 5\]  test_dump.py:\d+: x = torch.tanh\(layer\(x\)\) \* 0.5$", line), line


@torch.no_grad()
def test_a_diff_shows_what_a_stage_changed(tmp_path):
    compile_into(tmp_path, Layers(1))(torch.randn(3, 5))
    diff = (tmp_path / "graph_000" / "01_lift.diff").read_text()
    assert re.search(r"^-\s+\w+ = torch._C._nn.linear\(", diff, re.MULTILINE)
    assert re.search(r"^\+\s+\w+ = torch.ops.dsi.linear.default\(", diff, re.MULTILINE)


@torch.no_grad()
def test_rules_and_regions(tmp_path):
    compile_into(tmp_path, Layers())(torch.randn(3, 5))
    rules = (tmp_path / "graph_000" / "rules.txt").read_text()
    assert re.search(r"^\s+3  lift.linear$", rules, re.MULTILINE)
    assert re.search(r"^\s+1  lift.linear: linear at test_dump.py:\d+ \(passes/lift.py:\d+\)$", rules, re.MULTILINE)
    assert re.search(r"^  rope: .+\(rope.py:\d+\).+", rules, re.MULTILINE)  # a nearest miss, with the place of the rule
    regions = json.loads((tmp_path / "graph_000" / "regions.json").read_text())
    assert [region["kind"] for region in regions] == ["linear"] * 3
    assert any(member["target"] == "torch.ops.dsi.linear.default" and member["role"] == "anchor" for member in regions[0]["members"])
    assert all(member["source"].startswith("test_dump.py:") for member in regions[0]["members"])


@torch.no_grad()
def test_each_graph_has_a_folder_and_none_is_written_over(tmp_path):
    def function(x):
        y = F.linear(x, x)
        torch._dynamo.graph_break()
        return F.linear(y, x.t())

    for _ in range(2):
        torch._dynamo.reset()
        compile_into(tmp_path, function)(torch.randn(3, 5))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"graph_{i:03d}" for i in range(4)]


@torch.no_grad()
def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"the debug dump cannot be written into '.*file.*' \(option dump or DSI_DUMP\)"):
            compile_into(place, Layers())(torch.randn(3, 5))


@torch.no_grad()
def test_a_dump_that_cannot_go_on_stops_nothing_else(tmp_path):
    def block(gm, context):
        (tmp_path / "graph_000" / "rules.txt").mkdir()

    model, x = Layers().eval(), torch.randn(3, 5)
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="the debug dump in .*graph_000 ends here"):
        patch.setattr("dsi.compiler.backend.PIPELINE", (Stage("block", "dynamo", block), *PIPELINE))
        patch.setattr("dsi.compiler.observe.PIPELINE", (Stage("block", "dynamo", block), *PIPELINE))
        torch.testing.assert_close(compile_into(tmp_path, model)(x), model(x))


def test_a_graph_that_is_stepped_aside_from_says_why(tmp_path):
    compile_into(tmp_path, Layers())(torch.randn(3, 5))
    assert "an output wants gradients" in (tmp_path / "graph_000" / "report.txt").read_text()
    assert not (tmp_path / "graph_000" / "01_lift.py").exists()


@torch.no_grad()
def test_a_planted_miscompile_is_located(tmp_path):
    """By fuel bisection and the dump alone: which rewrite, of which rule, in which file and line, at which line of the model."""
    registry._verified.add(SlightlyWrong)  # as if verification had not found it out
    model = Layers(4)
    x = torch.randn(3, 5)
    wanted = model(x)

    def right(fuel):
        got = compile_into(tmp_path / f"fuel_{fuel}", model, fuel=fuel, rules=[SlightlyWrong])(x)
        return torch.allclose(got, wanted, atol=1e-5)

    culprit = find_rewrite(right)
    rule_line = SlightlyWrong.pattern.__code__.co_firstlineno
    model_line = Layers.forward.__code__.co_firstlineno + 2
    assert culprit is not None and len(culprit.rewrites) == 1
    assert "slightly_wrong" in str(culprit) and f"test_dump.py:{rule_line}" in str(culprit) and f"test_dump.py:{model_line}" in str(culprit)
    # The dump of that very run: the last rewrite of the list is the culprit, and the diff shows what it did.
    graph = tmp_path / f"fuel_{culprit.number}" / "graph_000"
    last = (graph / "rules.txt").read_text().splitlines()[-1]
    assert last.split()[0] == str(culprit.number) and culprit.rewrites[0] in last
    diff = (graph / "04_recognise.diff").read_text()
    assert re.search(r"^\+.*aten.mul.Tensor\(.*1\.25\)", diff, re.MULTILINE)
    before = (tmp_path / f"fuel_{culprit.number - 1}" / "graph_000" / "04_recognise.py").read_text()
    assert "1.25" not in before


@torch.no_grad()
def test_bisection_of_a_right_model_and_of_a_model_wrong_by_itself():
    model = Layers(1)
    x = torch.randn(3, 5)

    def run(fuel):
        return torch.compile(model, backend="dsi", options={"fuel": fuel, "executor": "reference"})(x)

    assert find_rewrite(lambda fuel: torch.allclose(run(fuel), model(x), atol=1e-5)) is None
    with pytest.raises(ValueError, match="not in a rule"):
        find_rewrite(lambda fuel: run(fuel) is None)


@pytest.mark.parametrize("fuel", [0, 1, 2, 5, 8])
@torch.no_grad()
def test_any_amount_of_fuel_gives_a_right_graph(fuel):
    zoo = pytest.importorskip("zoo")
    model = zoo.decoder("llama")
    ids = torch.randint(3, zoo.VOCAB, (2, 5))
    options = {"fuel": fuel * 7, "check": True, "executor": "reference"}
    got = torch.compile(model, backend="dsi", options=options)(input_ids=ids, use_cache=False).logits
    assert zoo.relative_error(got, model(input_ids=ids, use_cache=False).logits) < 1e-5


# ------------------------------------------------------------------------------------------------------------------- log and trace


@torch.no_grad()
def test_the_log(caplog):
    with caplog.at_level(logging.DEBUG, logger="dsi"):
        torch.compile(Layers(), backend="dsi", options={"executor": "reference"})(torch.randn(3, 5))
    text = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("dsi"))
    assert "lift: " in text and "lift.linear: linear at test_dump.py" in text and "nearest miss of rope" in text


def test_torch_logs_and_the_structured_trace(tmp_path):
    """TORCH_LOGS="+dsi" and TORCH_TRACE, as a user sets them: for a process."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "m = torch.nn.Linear(5, 5)\n"
        "with torch.no_grad(): torch.compile(m, backend='dsi', options={'executor': 'reference'})(torch.randn(3, 5))\n"
    )
    env = {**os.environ, "TORCH_LOGS": "+dsi", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "lift.linear: " in done.stderr and "04" not in done.stdout
    trace = "".join(p.read_text() for p in tmp_path.glob("*.log"))
    for name in ("dsi_00_dynamo", "dsi_01_lift", "dsi_02b_aot", "dsi_04_recognise", "dsi_rules", "dsi_report"):
        assert f'"name": "{name}"' in trace
    assert "torch.ops.dsi.linear.default" in trace
