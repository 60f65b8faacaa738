"""Rules, hints and operators that users bring: verified before use, explained when they fire and when they do not."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dsi

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import peaknet  # noqa: E402

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_registered():
    from dsi.compiler import observe, registry

    before, said = dict(registry._rules), set(observe._said)
    observe._said.clear()
    yield
    registry._rules.clear()
    registry._rules.update(before)
    observe._said.clear()
    observe._said.update(said)


# ----------------------------------------------------------------------------------------------------------------- the worked example


def test_the_example_runs_as_written(capsys):
    peaknet.main()
    said = capsys.readouterr().out
    assert "aten.amax.default stays an ATen operator" in said.split("Largest difference")[0]
    assert float(re.search(r"Largest difference to eager: (\S+)", said).group(1)) < 1e-5
    assert re.search(r"5  peak_norm_rule", said) and re.search(r"2  squared_relu_gate", said)


def test_the_rules_take_every_norm_and_gate():
    report = dsi.explain(peaknet.PeakNet(layers=3).eval(), torch.zeros(2, 5, dtype=torch.long), options={"rules": peaknet.RULES})
    assert report.hits["peak_norm_rule"] == 7 and report.hits["squared_relu_gate"] == 3
    assert report.unfused == [] and "7  peaknet::peak_norm" in str(report)
    assert [r.label for r in report.regions].count("2 linear + gated") == 3


@torch.no_grad()
def test_the_example_computes_what_eager_does_in_half_precision():
    model, ids = peaknet.PeakNet().eval().bfloat16(), torch.randint(0, 211, (3, 7))
    compiled = torch.compile(model, backend="dsi", options={"rules": peaknet.RULES})
    exact = peaknet.PeakNet().eval().double()
    exact.load_state_dict(model.state_dict())
    scale = exact(ids).abs().max()
    error, own = ((f(ids).double() - exact(ids)).abs().max() / scale for f in (compiled, model))
    assert error < max(2 * own, 1e-2)


def test_the_page_shows_the_kernel_of_an_own_operator():
    model = peaknet.PeakNet().eval()
    text = dsi.explain(model, torch.zeros(1, 5, dtype=torch.long), options={"rules": peaknet.RULES}).html()
    section = next(s for s in re.findall(r'<article class="detail".*?</article>', text, re.DOTALL) if "peaknet.peak_norm" in s)
    for words in ("peak_norm_kernel", "peak_norm_reference", "chip custom", "peaknet.py:"):
        assert words in section, words


def test_the_kernel_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = [sys.executable, str(HERE / "interpreted_peaknet.py")]
    result = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert re.search(r"peak_norm_rule\s+48 samples equal", result.stdout) and "refused:" in result.stdout


@pytest.mark.gpu
def test_the_kernel_on_a_device():
    result = subprocess.run([sys.executable, str(HERE / "cuda_peaknet.py")], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr


# --------------------------------------------------------------------------------------------------------------- verified before use


class DoubledTanh(dsi.Rule):
    """tanh(x) + tanh(x), wrongly"""

    dims = {"x": "... D"}

    def pattern(self, op, x):
        return op.tanh(x) * 2

    def rewrite(self, dsi, m):
        return dsi.aten.mul(dsi.aten.tanh(m.x), 2.01)


def test_a_wrong_rule_is_refused_with_its_numbers():
    with pytest.raises(dsi.VerificationError, match=r"rule doubled_tanh is wrong: in float64 pattern and replacement differ by 0\.\d+ of"):
        dsi.register(DoubledTanh)
    with pytest.raises(dsi.DsiError, match="is not registered"):
        dsi.unregister(DoubledTanh)
    with pytest.raises(Exception, match=r"doubled_tanh is wrong.*seed \d+"):
        dsi.explain(nn.Tanh(), torch.randn(3, 4), options={"rules": [DoubledTanh]})


def test_verification_leaves_random_numbers_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    dsi.register(peaknet.SquaredReluGate)
    torch.testing.assert_close(torch.rand(4), wanted, rtol=0, atol=0)


class ReciprocalPeak(dsi.Rule):
    """x * reciprocal(max |x| + eps): another spelling than the model's"""

    dims = {"x": "... D"}
    literals = {"eps": (1e-3,)}

    def pattern(self, op, x, eps):
        return op.reciprocal(op.amax(op.call(aten.abs.default, x), [-1], True) + eps) * x

    def rewrite(self, dsi, m):
        return dsi.aten.div(m.x, dsi.aten.add(dsi.aten.amax(dsi.call(aten.abs.default, m.x), [-1], True), m.eps))


def test_a_rule_that_never_fires_says_where_it_came_nearest():
    model = peaknet.PeakNorm(8).eval()
    line = peaknet.PeakNorm.forward.__code__.co_firstlineno + 1
    rule = ReciprocalPeak.pattern.__code__.co_firstlineno
    words = rf"fired nowhere.*reciprocal_peak \(test_rules_by_users.py:{rule}\).*expected, div.*found.*at peaknet.py:{line}"
    with pytest.warns(UserWarning, match=words):
        dsi.explain(model, torch.randn(3, 8), options={"rules": [ReciprocalPeak]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsi.explain(model, torch.randn(3, 8), options={"rules": [ReciprocalPeak]})  # once is enough


def test_a_rule_that_fires_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsi.explain(peaknet.PeakNorm(8).eval(), torch.randn(3, 8), options={"rules": [peaknet.PeakNormRule]})


# -------------------------------------------------------------------------------------------------------------------- region hints


class EndAfterLinear(dsi.Rule):
    """A region ends at every linear without a bias."""

    dims = {"x": "... K", "w": "N K"}

    def pattern(self, op, x, w):
        return op.dsi.linear(x, w)

    def rewrite(self, dsi, m):
        return dsi.cut


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def test_a_hint_ends_a_region():
    model, x = Mlp().eval(), torch.randn(3, 6)
    assert [r.label for r in dsi.explain(model, x).regions] == ["linear + gelu_erf", "linear"]
    report = dsi.explain(model, x, options={"rules": [EndAfterLinear], "check": True})
    assert [r.label for r in report.regions] == ["linear", "gelu_erf + linear"]
    assert report.hits["end_after_linear"] == 1


class EndInsideGelu(dsi.Rule):
    """A region ends in the middle of a gate that dsi's own rules would take whole."""

    dims = {"gate": "... N"}

    def pattern(self, op, gate):
        return op.silu(gate)

    def rewrite(self, dsi, m):
        return dsi.cut


def test_a_hint_stays_with_the_value_that_replaces_its_own():
    class Gate(nn.Module):
        def forward(self, x, y):
            return nn.functional.silu(x) * y

    x = torch.randn(3, 8), torch.randn(3, 8)
    report = dsi.explain(Gate(), *x, options={"rules": [EndInsideGelu], "check": True})
    assert report.hits["end_inside_gelu"] == 1 and report.hits["silu"] == 1 and not report.hits["gated"]
    assert "a region is to end at the intermediate value" in str(report.misses["gated"])
    assert len(report.regions) == 2


# -------------------------------------------------------------------------------------------------------------------- own operators


def double(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def test_what_an_own_operator_may_be():
    op = dsi.custom_op("users_tests::double", double)
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0)) and str(op) == "users_tests::double"
    with pytest.raises(dsi.DsiError, match=r"'users_tests::double' is taken"):
        dsi.custom_op("users_tests::double", double)
    with pytest.raises(dsi.DsiError, match="is taken"):
        dsi.custom_op("dsi::double", double)
    with pytest.raises(dsi.DsiError, match="'namespace::name'"):
        dsi.custom_op("double", double)
    with pytest.raises(dsi.DsiError, match="must be annotated"):
        dsi.custom_op("users_tests::bare", lambda x: x)
    with pytest.raises(dsi.DsiError, match=r"parameters \['x'\] are not the reference's \['x', 'by'\]"):
        dsi.custom_op("users_tests::other", double, kernel=lambda x: x)


def the_same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), x + 1


def test_results_have_memory_of_their_own():
    same = dsi.custom_op("users_tests::the_same", the_same)
    x = torch.randn(3, 5)
    assert same(x).data_ptr() != x.data_ptr() and torch.equal(same(x), x)
    first, second = dsi.custom_op("users_tests::turned", turned)(x)
    assert first.is_contiguous() and torch.equal(first, x.t()) and torch.equal(second, x + 1)
    first.zero_()
    assert x.abs().sum() > 0


@torch.no_grad()
def test_on_a_cpu_the_reference_is_compiled_with_the_graph(monkeypatch):
    from dsi.runtime import cpu

    expanded = []
    monkeypatch.setattr(cpu, "deduplicate", lambda gm: expanded.append(gm))
    model, ids = peaknet.PeakNet(layers=1).eval(), torch.randint(0, 211, (2, 5))
    compiled = torch.compile(model, backend="dsi", options={"rules": peaknet.RULES})
    torch.testing.assert_close(compiled(ids), model(ids))
    names = [str(node.target) for node in expanded[0].graph.nodes]
    assert any("amax" in name for name in names) and not any("peak_norm" in name for name in names)


@torch.no_grad()
@pytest.mark.parametrize("executor", ["auto", "reference"])
def test_an_own_operator_that_the_model_calls_itself(executor):
    name = f"users_tests::scaled_{executor}"

    def scaled(x: Tensor, by: float) -> Tensor:
        return (x * by).sin()

    op = dsi.custom_op(name, scaled)

    def model(x, w):
        return op(torch.nn.functional.linear(x, w), 0.5) @ w

    x, w = torch.randn(3, 4), torch.randn(5, 4)
    compiled = torch.compile(model, backend="dsi", options={"executor": executor}, fullgraph=True)
    torch.testing.assert_close(compiled(x, w), model(x, w))
    assert dsi.explain(model, x, w).graphs[0].custom == {name: 1}
