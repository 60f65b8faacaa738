"""torch.compile with dtype="int8": what becomes int8, what does not, and that regions stay what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from dsi.compiler.backend import dsi as backend
from dsi.compiler.observe import collecting
from dsi.ir.context import Context
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.runtime.packs import Packed
from rounded import rounded
from torch import nn

import dsi


def compiled(model: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, Context]:
    """What `model` returns, compiled with int8 weights on the reference executor under all checks, and its one graph's context."""
    given = {"dtype": "int8", "executor": "reference", "check": True, **(options or {})}
    with collecting() as contexts, torch.no_grad():
        result = torch.compile(model, backend=lambda gm, inputs: backend(gm, inputs, options=given))(*args, **kwargs)
    (context,) = contexts
    return result, context


class Mlp(nn.Module):
    def __init__(self, width: int = 64, inner: int = 96, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.to(dtype)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


FAMILIES = ["llama_tied", "gpt2", "bloom", "gemma2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_compute_what_their_dequantised_weights_do_in_as_many_regions(name):
    ids = torch.randint(3, zoo.VOCAB, (2, 9))
    model = zoo.decoder(name)
    logits, context = compiled(model, input_ids=ids, use_cache=False)
    _, plain = compiled(model, input_ids=ids, use_cache=False, options={"dtype": None, "check": False})
    head = model.get_output_embeddings()
    table = head.weight.detach().clone()
    with torch.no_grad():
        expected = rounded(model)(input_ids=ids, use_cache=False).logits  # the head is a parameter of its own now; the table is as it was
    assert zoo.relative_error(logits.logits, expected) <= 1e-5
    assert zoo.relative_error(head.weight, table) > 1e-4, "nothing was rounded"
    assert [(r.kind, r.label.replace("linear_int8", "linear")) for r in context.report.regions] == [
        (r.kind, r.label) for r in plain.report.regions
    ]
    linears = sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in model.modules())
    assert context.report.hits["quantise.int8"] == len(context.report.quantised) == linears and not context.report.kept
    assert not any("quantize" in refusal.reason for refusal in context.report.unfused)


@pytest.mark.parametrize(
    "options, form", [({"group_size": 32}, Format(Grouping("inner", 32))), ({"quantize_groups": 4}, Format(Grouping("flat", 4)))]
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_groups(name, options, form):
    ids = torch.randint(3, zoo.VOCAB, (2, 9))
    model = zoo.decoder(name)
    keep = {"quantize_skip": "lm_head"}  # 199 x 64 are no 4 regular groups
    logits, context = compiled(model, input_ids=ids, use_cache=False, options={**options, **keep})
    with torch.no_grad():
        expected = rounded(model, form, ("lm_head",))(input_ids=ids, use_cache=False).logits
    assert zoo.relative_error(logits.logits, expected) <= 1e-5
    assert {w.format for w in context.report.quantised} == {str(form)}


def test_activations_in_int8():
    model, x = Mlp(), torch.randn(5, 64)
    result, context = compiled(model, x, options={"activations": "int8"})
    weights = {n: quantise(getattr(model, n).weight) for n in ("up", "down")}

    def linear(h: torch.Tensor, n: str) -> torch.Tensor:
        step = h.abs().amax(-1, keepdim=True) / 127
        return (torch.round(h / step).double() @ weights[n].dequantise(torch.float64).T * step).float() + getattr(model, n).bias

    with torch.no_grad():
        expected = x + linear(F.gelu(linear(model.norm(x), "up")), "down")
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert {r.plan.activations for r in context.report.regions} == {"int8"}
    _, context = compiled(nn.Sequential(model, nn.Linear(64, 96)), x, options={"activations": "int8"})
    assert [r.plan.activations for r in context.report.regions] == ["int8", "int8", ""], "the head's input stays"
    assert any("check compares no results" in note for note in context.report.notes)


def test_flat_groups_double_next_to_an_activation():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(4))

        def forward(self, x):
            h = self.first(x)
            return h + self.down(F.silu(self.gate(h)) * self.up(h))

    _, context = compiled(Layer(), torch.randn(5, 64), options={"quantize_groups": 4, "mlp_extra_grouping": True})
    assert {w.name: w.format for w in context.report.quantised} == {
        "first.weight": "int8, 4 flat groups",
        **dict.fromkeys(("gate.weight", "up.weight", "down.weight"), "int8, 8 flat groups"),
    }


def test_flat_groups_that_do_not_fit_become_rows_and_are_reported():
    _, context = compiled(Mlp(60, 96), torch.randn(5, 60), options={"quantize_groups": 32})
    assert [w.format for w in context.report.quantised] == ["int8, 32 flat groups", "int8, a scale a row"]
    assert any(note.startswith("down.weight has a scale a row instead: quantize_groups = 32") for note in context.report.notes)


def test_what_is_no_weight_is_kept():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(32, 32, dtype=torch.float64)
            self.sum, self.step = nn.Linear(32, 32), nn.Linear(32, 32)
            self.register_buffer("state", torch.zeros(32, 32))

        def forward(self, x, w):
            given = F.linear(x, w)  # an input of the call
            computed = F.linear(x, self.sum.weight + 1)
            self.state.add_(1)
            written = F.linear(x, self.state)
            return given + computed + written + self.wide(x.double()).float() + self.step(x)

    model = Odd()
    x, w = torch.randn(3, 32), torch.randn(32, 32)
    with torch.no_grad():
        expected = Odd.forward(model, x, w) - F.linear(x, torch.ones(32, 32)) * 0
        model.state.zero_()
    result, context = compiled(model, x, w, options={"check": False})
    assert [weight.name for weight in context.report.quantised] == ["step.weight"]
    reasons = sorted(refusal.reason for refusal in context.report.kept)
    assert len(reasons) == 4 and reasons[0] == "it is an input of the call, no weight of the model"
    assert reasons[1:3] == ["it is computed in the graph, no weight"] * 2 or "the graph writes to it" in reasons
    assert "its dtype is float64" in reasons
    assert (result - expected).norm() / expected.norm() < 1e-2


def test_a_weight_without_entries_is_kept():
    model = nn.Sequential(nn.Linear(0, 8), nn.Linear(8, 4)).eval()
    result, context = compiled(model, torch.randn(3, 0))
    assert [refusal.reason for refusal in context.report.kept] == ["it has no entries"] and result.shape == (3, 4)


@pytest.mark.parametrize("pattern", ["down", "down.weight", "d*", "*own.weight"])
def test_weights_are_skipped_by_name(pattern):
    _, context = compiled(Mlp(), torch.randn(5, 64), options={"quantize_skip": [pattern, "nothing.like.it"]})
    assert [w.name for w in context.report.quantised] == ["up.weight"]
    (kept,) = context.report.kept
    assert kept.node == "down.weight" and pattern in kept.reason
    assert context.report.notes == ["quantize_skip: 'nothing.like.it' is the name of no weight in this graph"]


@pytest.mark.parametrize("options, count", [({}, 1), ({"tied_head": "keep"}, 0), ({"quantize_skip": "lm_head"}, 0)])
def test_a_head_that_shares_its_weight_with_the_table(options, count):
    model = zoo.decoder("llama_tied")
    skip = ["model.layers.*", *([options["quantize_skip"]] if "quantize_skip" in options else [])]
    _, context = compiled(model, input_ids=torch.tensor([[3, 5]]), use_cache=False, options={**options, "quantize_skip": skip})
    assert len(context.report.quantised) == count and not any("no weight" in note for note in context.report.notes)


def test_the_report_says_what_became_int8():
    report = dsi.explain(Mlp(), torch.randn(5, 64), options={"dtype": "int8", "quantize_skip": ["down"]})
    text = str(report)
    assert "Weights in int8:" in text and "   1  [96, 64]: int8, a scale a row, 24,576 bytes become 6,528" in text
    assert "kept as it is: quantise: its name is skipped ('down') (down.weight at " in text
    assert "Weights in int8" not in str(dsi.explain(Mlp(), torch.randn(5, 64)))


def test_the_check_holds_the_graph_against_the_rounded_weights(monkeypatch):
    """A wrong int8 linear is found, though int8 itself is far from the model."""
    model, x = zoo.decoder("llama_tied"), torch.randint(3, zoo.VOCAB, (2, 9))
    compiled(model, input_ids=x, use_cache=False)
    torch._dynamo.reset()
    monkeypatch.setattr("dsi.runtime.packs.Packed.dequantised", lambda self, weight, form: None)
    with pytest.raises(dsi.DsiInternalError, match="is not what the uncompiled graph gives"):
        compiled(model, input_ids=x, use_cache=False)


class ReadInSeveralFormats(nn.Module):
    """One weight: as rows and as columns, with groups of an MLP and without, as a view, in a linear that is skipped, and as it is."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.left = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.left.weight = self.one.weight

    def forward(self, x):
        weight = self.one.weight
        mlp = self.two(F.gelu(self.one(x)))
        return mlp, F.linear(x, weight), x @ weight, torch.addmm(x[0], x, weight.t()), self.left(x), (weight * 2).sum()


@pytest.mark.parametrize("tracer", ["auto", "aot"])
def test_the_check_knows_in_which_format_each_linear_reads_a_weight(tracer, monkeypatch):
    options = {"quantize_groups": 64, "mlp_extra_grouping": True, "quantize_skip": ["left"], "tracer": tracer}
    model, x = ReadInSeveralFormats(), torch.randn(5, 64)
    _, context = compiled(model, x, options=options)
    assert len(context.report.quantised) == 3 and len(context.report.kept) == 1
    torch._dynamo.reset()
    right = Packed.dequantised
    monkeypatch.setattr(Packed, "dequantised", lambda self, weight, form: right(self, weight, (False, Grouping("flat", 64))))
    with pytest.raises(dsi.DsiInternalError, match="output 0 is not what"):
        compiled(model, x, options=options)


def test_results_are_not_compared_where_nobody_knows_what_reads_int8():
    def without_names(gm, inputs):
        for node in gm.graph.nodes:
            node.meta.pop("source_fn_stack", None)
        return backend(gm, inputs, options={"dtype": "int8", "executor": "reference", "check": True})

    with collecting() as contexts, torch.no_grad():
        torch.compile(Mlp(), backend=without_names)(torch.randn(5, 64))
    assert any("check compares no results: it is not known which operators" in note for note in contexts[0].report.notes)


def test_options_that_contradict_each_other_are_refused():
    for options, words in (
        ({"dtype": "int8", "group_size": 64, "quantize_groups": 8}, "two ways to group"),
        ({"dtype": "int8", "mlp_extra_grouping": True}, "doubles quantize_groups, which is not given"),
        ({"group_size": 64}, "group_size says how weights become int8"),
        ({"dtype": "int8", "group_size": 48}, "group_size"),
        ({"dtype": "int4"}, "dtype"),
    ):
        with pytest.raises(dsi.DsiError, match=words):
            dsi.Options.parse(options)
    assert dsi.Options.parse({"dtype": torch.int8}).dtype == "int8"
