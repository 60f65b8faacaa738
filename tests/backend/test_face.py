"""What `import dsi` and the command line give."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dsi
from dsi.__main__ import app

runner = CliRunner()


def test_public_names():
    for name in dsi.__all__:
        assert getattr(dsi, name) is not None
    assert dir(dsi) == sorted(dsi.__all__)
    with pytest.raises(AttributeError, match=r"explian.*public names"):
        _ = dsi.explian


def test_version_is_the_distributions():
    from importlib.metadata import version

    assert dsi.__version__ == version("dsi")


def test_importing_dsi_is_light():
    program = "import dsi, sys; print(sorted(m for m in ('torch', 'transformers', 'pydantic', 'sympy') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_importing_the_backend_imports_no_transformers():
    program = "import dsi.compiler.backend, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120).stdout == "False\n"


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x, *, twice=False):
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        if twice:
            torch._dynamo.graph_break()
            x = self.down(self.up(x))
        return x


def test_explain():
    model = Mlp().eval()
    report = dsi.explain(model, torch.randn(3, 6), options={"executor": "reference"}, twice=True)
    assert report.hits["lift.linear"] == 4 and report.hits["layer_norm"] == 1
    assert len(report.graphs) == 2
    assert [region.kind for region in report.regions] == ["linear"] * 4
    assert "rope" in report.misses and "lift.linear" not in report.misses
    assert [note.split(",")[0].partition(":")[0] for note in report.notes] == ["a graph ends at test_face.py"]
    text = str(report)
    for words in ("2 graphs, 4 regions", "lift.linear", "Rules that did not fire", "4  linear"):
        assert words in text, text


def test_explain_leaves_what_was_compiled_before():
    model = Mlp().eval()
    compiled = torch.compile(model, backend="dsi", options={"executor": "reference"})
    x = torch.randn(3, 6)
    from dsi.compiler.observe import collecting

    with torch.no_grad(), collecting() as contexts:
        compiled(x)
        dsi.explain(model, x, options={"executor": "reference"})
        count = len(contexts)
        torch.testing.assert_close(compiled(x), model(x))
        assert len(contexts) == count


def test_explain_of_more_models_than_dynamo_recompiles_for():
    """One forward function, many kinds of models: Dynamo would stop compiling it at its limit, and the last explanations would be empty."""

    class Wrapped(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x):
            return self.inner(x)

    for width in range(1, torch._dynamo.config.recompile_limit + 4):
        report = dsi.explain(Wrapped(width).eval(), torch.randn(3, width), options={"executor": "reference"})
        assert report.hits["lift.linear"] == 1, f"model number {width}"


def test_explain_of_nothing_compiled():
    assert "0 graphs, 0 regions" in str(dsi.explain(lambda: 3))


def test_explain_says_why_it_stepped_aside():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = dsi.explain(Mlp().eval(), torch.randn(3, 6))
    assert any("autocast is on" in note for note in report.notes) and "autocast is on" in str(report)


def test_an_option_that_is_wrong():
    with pytest.raises(Exception, match="did you mean 'dump'"):
        dsi.explain(Mlp(), torch.randn(3, 6), options={"dunp": "x"})


def test_a_rule_that_is_no_rule():
    with pytest.raises(Exception, match=r"is not a rule: a rule is a subclass of dsi.Rule"):
        dsi.explain(Mlp(), torch.randn(3, 6), options={"rules": [int]})


class HalvedGelu(dsi.Rule):
    """gelu(x)   ->   0.5 x (1 + erf(x / sqrt(2)))"""

    dims = {"x": "... D"}

    def pattern(self, op, x):
        return op.gelu(x)

    def rewrite(self, dsi, m):
        aten = torch.ops.aten
        half = dsi.call(aten.mul.Tensor, m.x, 0.5)
        return dsi.call(
            aten.mul.Tensor, half, dsi.call(aten.add.Tensor, dsi.call(aten.erf.default, dsi.call(aten.mul.Tensor, m.x, 0.5**0.5)), 1.0)
        )


def test_a_users_rule_by_option_and_by_registration():
    model, x = Mlp().eval(), torch.randn(3, 6)
    options = {"executor": "reference", "check": True}
    assert dsi.explain(model, x, options={**options, "rules": [HalvedGelu]}).hits["halved_gelu"] == 1
    assert not dsi.explain(model, x, options=options).hits["halved_gelu"]
    assert dsi.register(HalvedGelu) is HalvedGelu
    try:
        dsi.register(HalvedGelu)  # twice is once
        assert dsi.explain(model, x, options=options).hits["halved_gelu"] == 1
        assert dsi.explain(model, x, options={**options, "rules": [HalvedGelu]}).hits["halved_gelu"] == 1
        other = type("HalvedGelu", (HalvedGelu,), {"pattern": lambda self, op, x: op.tanh(x)})
        with pytest.raises(dsi.DsiError, match="another rule is registered as 'halved_gelu'"):
            dsi.register(other)
    finally:
        dsi.unregister(HalvedGelu)
    assert not dsi.explain(model, x, options=options).hits["halved_gelu"]
    with pytest.raises(dsi.DsiError, match="is not registered"):
        dsi.unregister(HalvedGelu)
    with pytest.raises(dsi.DsiError, match="is not a rule"):
        dsi.register(int)


class Negated(dsi.Rule):
    """cos(x)   ->   cos(-x): right, and met again in what it makes"""

    dims = {"x": "..."}
    stage = "normalise"

    def pattern(self, op, x):
        return op.cos(x)

    def rewrite(self, dsi, m):
        return self.cosine(dsi, dsi.call(torch.ops.aten.neg.default, m.x))

    def cosine(self, dsi, x):
        return dsi.call(torch.ops.aten.cos.default, x)


class Tripled(Negated):
    """cos(x)   ->   cos(x) + cos(x) - cos(x): three times as many each round"""

    def rewrite(self, dsi, m):
        twice = dsi.call(torch.ops.aten.add.Tensor, self.cosine(dsi, m.x), self.cosine(dsi, m.x))
        return dsi.call(torch.ops.aten.sub.Tensor, twice, self.cosine(dsi, m.x))


@pytest.mark.parametrize("rule, words", [(Negated, "after 100 rounds: negated"), (Tripled, "do not end; tripled alone")])
def test_a_rule_that_feeds_on_what_it_makes_ends(rule, words):
    with torch.no_grad(), pytest.raises(Exception, match=words):
        torch.compile(torch.cos, backend="dsi", options={"rules": [rule]})(torch.randn(3, 5))


# -------------------------------------------------------------------------------------------------------------------- command line


def test_command_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.strip() == dsi.__version__


def test_command_explain(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(
        "import torch\n"
        "def example():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU()).eval(), (torch.randn(3, 5),), {}\n"
    )
    result = runner.invoke(app, ["explain", str(file), "--dump", str(tmp_path / "dump")])
    assert result.exit_code == 0, result.output
    assert "1 graph" in result.output and "lift.linear" in result.output
    assert (tmp_path / "dump" / "graph_000" / "rules.txt").exists()


def test_command_explain_of_a_configuration(tmp_path):
    zoo = pytest.importorskip("zoo")
    zoo.decoder_configs()["llama"].save_pretrained(tmp_path)
    result = runner.invoke(app, ["explain", str(tmp_path / "config.json"), "--batch", "2", "--length", "5"])
    assert result.exit_code == 0, result.output
    assert "lift.attention" in result.output


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "there is no Python file"),
        ("x = 1\n", "has no function example()"),
        ("def example():\n    return 3\n", "returned int"),
    ],
)
def test_command_explain_of_a_wrong_file(tmp_path, text, words):
    file = Path(tmp_path) / "wrong.py"
    if text is not None:
        file.write_text(text)
    result = runner.invoke(app, ["explain", str(file)])
    assert result.exit_code == 1 and words in result.output
    assert "Traceback" not in result.output


def test_command_explain_of_something_else(tmp_path):
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 1 and "neither a Python file, nor a config.json" in result.output
