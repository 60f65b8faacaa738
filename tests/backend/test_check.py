"""DSI_CHECK: what a stage or rule does wrong is found, by the specification or beside the uncompiled graph."""

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler import backend as backend_module
from dsi.compiler.check import clone_inputs
from dsi.ir.errors import DsiInternalError
from dsi.ir.tolerances import TOLERANCES, disagreement, error_against
from dsi.passes.pipeline import PIPELINE, Stage
from torch import nn

aten = torch.ops.aten


def plant(monkeypatch, run):
    """Put one more stage first at the ATen level."""
    first = next(i for i, stage in enumerate(PIPELINE) if stage.level == "aten")
    stages = (*PIPELINE[:first], Stage("planted", "aten", run, "aten"), *PIPELINE[first:])
    monkeypatch.setattr(backend_module, "PIPELINE", stages)
    monkeypatch.setattr("dsi.compiler.observe.PIPELINE", stages)


def run(function, *args, check=True):
    with torch.no_grad():
        return torch.compile(function, backend="dsi", options={"check": check, "executor": "reference"})(*args)


def scale_cos(factor):
    """A stage that multiplies a cosine: shapes stay right, numbers do not."""

    def stage(gm, context):
        for node in gm.graph.find_nodes(op="call_function", target=aten.cos.default):
            with gm.graph.inserting_after(node):
                wrong = gm.graph.call_function(aten.mul.Tensor, (node, factor))
            wrong.meta.update(node.meta)
            node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)
        gm.recompile()

    return stage


def test_wrong_numbers_raise(monkeypatch):
    plant(monkeypatch, scale_cos(1.01))
    with pytest.raises(DsiInternalError, match=r"output 0 is not what the uncompiled graph gives: relative error 1.0e-02"):
        run(lambda x, w: F.linear(x, w).cos(), torch.randn(3, 5), torch.randn(7, 5))


def test_without_check_they_do_not(monkeypatch):
    plant(monkeypatch, scale_cos(1.01))
    run(lambda x, w: F.linear(x, w).cos(), torch.randn(3, 5), torch.randn(7, 5), check=False)


def test_a_wrong_write_to_an_input_raises(monkeypatch):
    plant(monkeypatch, scale_cos(2.0))

    def function(state, x):
        state.add_(x.cos())
        return x + 1

    with pytest.raises(DsiInternalError, match="after the call, the input l_state_ is not"):
        run(function, torch.randn(3, 5), torch.randn(3, 5))


def test_the_reference_does_not_see_what_the_compiled_graph_wrote():
    """Both run on the state before the call, once."""

    def function(state, view, x):
        state.add_(x)
        return state * 2, view + 1

    state, twin = torch.zeros(4, 5), torch.zeros(4, 5)
    for step in (1, 2):
        got = run(function, state, state[1:], torch.ones(4, 5))
        wanted = function(twin, twin[1:], torch.ones(4, 5))
        assert all(map(torch.equal, got, wanted)) and torch.equal(state, torch.full((4, 5), float(step)))


def test_a_stage_that_leaves_a_wrong_value_raises(monkeypatch):
    def stage(gm, context):
        for node in gm.graph.find_nodes(op="call_function", target=aten.cos.default):
            node.meta["val"] = node.meta["val"].new_empty(3, 8)

    plant(monkeypatch, stage)
    with pytest.raises(Exception, match=r"cos.*shape \(3, 8\) against \(3, 5\)"):
        run(torch.cos, torch.randn(3, 5))


def test_models_pass_the_check():
    zoo = pytest.importorskip("zoo")
    import transformers

    model = zoo.decoder("qwen3")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    twin = transformers.StaticCache(config=model.config, max_cache_len=16)
    ids = torch.randint(3, zoo.VOCAB, (2, 7))
    compiled = torch.compile(model, backend="dsi", options={"check": True, "executor": "reference"})
    with torch.no_grad():
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
            got, wanted = compiled(input_ids=part, past_key_values=cache), model(input_ids=part, past_key_values=twin)
            assert zoo.relative_error(got.logits, wanted.logits) < 1e-5


# ------------------------------------------------------------------------------------------------------------------- its own parts


def test_clones_alias_as_the_originals_do():
    base = torch.arange(12.0).view(3, 4)
    one, two, three = clone_inputs([base, base.t()[1:], torch.ones(2)])
    assert torch.equal(one, base) and two.stride() == base.t()[1:].stride()
    two.zero_()
    assert not one[:, 1:].any() and base[:, 1:].all() and three.all()


def test_clones_of_what_is_no_tensor():
    assert clone_inputs([3, None, 2.5]) == [3, None, 2.5]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tolerances(dtype):
    value = torch.randn(40, 30, dtype=torch.float64).to(dtype)
    assert disagreement(value, value.clone()) == ""
    assert "relative error" in disagreement(value * (1 + 10 * TOLERANCES[dtype].relative), value)
    one_wrong = value.clone()
    one_wrong[3, 4] = -value[3, 4] + 1
    assert disagreement(one_wrong, value)


def test_special_values():
    inf = float("inf")
    masked = torch.tensor([1.0, -inf, float("nan")])
    assert disagreement(masked.clone(), masked) == ""
    assert "inf" in disagreement(torch.tensor([1.0, -inf, 0.0]), masked)
    assert "inf" in disagreement(torch.tensor([1.0, inf, float("nan")]), masked)
    assert "inf" in disagreement(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]))
    assert error_against(torch.zeros(0), torch.zeros(0)) == (0.0, 0.0)
    assert disagreement(torch.zeros(3), torch.zeros(3)) == ""
    assert disagreement(torch.full((3,), 1e-9), torch.zeros(3))
    assert "values differ" in disagreement(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert "float32[3] against" in disagreement(torch.zeros(3), torch.zeros(3, 1))


def test_parameters_are_shared_with_the_reference_graph():
    model = nn.Linear(5, 5)
    compiled = torch.compile(model, backend="dsi", options={"check": True, "executor": "reference"})
    x = torch.randn(3, 5)
    with torch.no_grad():
        compiled(x)
        model.weight.mul_(2)
        assert torch.equal(compiled(x), model(x))


# ----------------------------------------------------------------------------------------------------------------- no false alarms


class WidensItsResult(nn.Module):
    """Half precision within, float32 at the end, as the logits and the loss of many models."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        state = torch.zeros(x.shape)  # float32, and written to
        state[:] = x * 1.7
        return (x * 1.7).float().log_softmax(-1), state, x.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_results_are_held_to_the_precision_that_they_were_computed_in(dtype):
    """Inductor rounds to half precision less often than eager PyTorch does; that is no fault."""
    model = WidensItsResult().eval().to(dtype)
    compiled = torch.compile(model, backend="dsi", options={"check": True})
    with torch.no_grad():
        compiled(torch.randn(3, 5, 32).to(dtype))


def test_a_few_choices_between_near_ties_are_a_warning(monkeypatch):
    """Index 0 or 1 of two values that rounding alone tells apart."""
    plant(monkeypatch, scale_cos(1 + 1e-6))
    x = torch.zeros(40, 2)
    x[:, 0] = 1.0
    near = torch.cos(torch.zeros(40)) - 1.0
    near[3] = 5e-7

    def choose(x, near):
        return torch.stack([x.cos()[:, 1] - 1.0, near], -1).argmax(-1)

    with pytest.warns(UserWarning, match="in 1 of 40 places; floats that nearly tie"):
        run(choose, x, torch.where(near > 0, near, torch.tensor(1.0)))
    with pytest.raises(DsiInternalError, match="int64 values differ"):
        run(choose, x, torch.full((40,), 5e-7))


def test_integers_that_no_float_leads_to_are_exact(monkeypatch):
    def stage(gm, context):
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.args = (node.args[0], 2)
        gm.recompile()

    plant(monkeypatch, stage)
    with pytest.raises(DsiInternalError, match="int64 values differ"):
        run(lambda i, x: (i + 1, x.cos()), torch.arange(100), torch.randn(3))


def test_assertions_of_the_model_pass_and_still_assert():
    """An assertion has an effect and no value."""

    def function(ids, table):
        return F.one_hot(ids, 5).to(table.dtype) @ table

    table = torch.randn(5, 3)
    assert torch.equal(run(function, torch.tensor([1, 4]), table), table[[1, 4]])
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        run(function, torch.tensor([1, 5]), table)
