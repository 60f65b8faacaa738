"""quantise_model: every linear in place, originals gone, tied heads, and who is next to an activation."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import zoo
from dsi.ir.errors import DsiError
from dsi.quantize.feeds import mlp_weights
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.quantize.modules import QuantisedEmbedding, QuantisedLinear
from torch import nn

import dsi

IDS = torch.tensor([[3, 50, 7, 120], [5, 5, 198, 4]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def nbytes(model: nn.Module) -> int:
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, QuantisedLinear)) or type(m).__name__ == "Conv1D"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_every_linear_is_replaced_and_the_model_computes_with_what_int8_stands_for(name):
    model, wanted = zoo.decoder(name), zoo.decoder(name)
    head, shared = wanted.get_output_embeddings(), wanted.config.tie_word_embeddings
    for module in linears(wanted).values():
        conv1d = not isinstance(module, nn.Linear)
        wide = quantise(module.weight, kn=conv1d).dequantise()
        module.weight = nn.Parameter(wide.t().contiguous() if conv1d else wide)
    assert head.weight is not wanted.get_input_embeddings().weight
    assert dsi.quantise_model(model) is model
    assert linears(model) and all(isinstance(m, QuantisedLinear) for m in linears(model).values())
    assert zoo.relative_error(logits(model), logits(wanted)) <= 1e-5
    assert isinstance(model.get_input_embeddings(), nn.Embedding) and shared == (name != "llama")


def test_the_originals_are_freed_one_by_one():
    model = zoo.decoder("llama")
    weights = [weakref.ref(m.weight) for m in linears(model).values()]
    fp, rest = nbytes(model), nbytes(model) - sum(m.weight.nbytes for m in linears(model).values())
    dsi.quantise_model(model)
    gc.collect()
    assert not any(w() is not None for w in weights)
    assert rest + 0.25 * (fp - rest) < nbytes(model) < rest + 0.32 * (fp - rest), "int8 and a scale for each 64 or 96 entries"


@pytest.mark.parametrize("tied, share", [("head", 1.25), ("both", 0.25), ("keep", 1.0)])
def test_a_tied_head(tied, share):
    model = zoo.decoder("llama_tied")
    before, table = logits(model), model.model.embed_tokens.weight.nbytes
    dsi.quantise_model(model, tied=tied)
    own = [model.model.embed_tokens, model.lm_head]
    size = sum({t.data_ptr(): t.nbytes for m in own for t in (*m.parameters(), *m.buffers())}.values())
    if tied == "both":
        assert isinstance(own[0], QuantisedEmbedding) and own[0].head is own[1]
    assert share <= size / table < share + 0.02
    assert 1e-4 < zoo.relative_error(logits(model), before) < 0.06
    model.to(torch.bfloat16)
    assert logits(model).dtype == torch.bfloat16 and model.lm_head.weight.dtype in (torch.int8, torch.bfloat16)


def test_casts_touch_neither_int8_nor_scales():
    module = QuantisedLinear.of(torch.randn(8, 32), torch.randn(8))
    scales = module.scales.clone()
    module.half().type(torch.float32).bfloat16()
    assert module.weight.dtype == torch.int8 and torch.equal(module.scales, scales) and module.bias.dtype == torch.bfloat16
    assert module.to("meta").scales.is_meta and module.scales.dtype == torch.float32
    assert not any(p.requires_grad for p in module.parameters())


def test_names_are_skipped_and_a_pattern_without_a_match_is_warned_of():
    model = zoo.decoder("llama")
    with pytest.warns(UserWarning, match=r"no linear is called 'lm_haed'"):
        dsi.quantise_model(model, skip=["*.down_proj", "model.layers.1.self_attn.q_proj.weight", "lm_haed"])
    kept = {name for name, m in linears(model).items() if isinstance(m, nn.Linear)}
    assert kept == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"}


def test_what_torch_compile_wraps_is_quantised_by_its_own_name_and_stays_compiled():
    plain, model = zoo.decoder("llama"), zoo.decoder("llama")
    calls = []

    def backend(gm, inputs):
        calls.append(gm)
        return gm

    model.lm_head = torch.compile(model.lm_head, backend=backend)
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    compiled = torch.compile(model, backend="eager")
    skip = ["model.layers.1.mlp.*"]
    assert dsi.quantise_model(compiled, skip=skip) is compiled
    expected = logits(dsi.quantise_model(plain, skip=skip))
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert torch.equal(logits(model), expected) and len(calls) == 1
    torch.testing.assert_close(logits(compiled), expected)


MLPS = {
    "llama": {"gate_proj", "up_proj", "down_proj"},
    "gpt2": {"mlp.c_fc", "mlp.c_proj"},
    "opt": {"fc1", "fc2"},
    "gemma2": {"gate_proj", "up_proj", "down_proj"},
    "gpt_neox": {"dense_h_to_4h", "dense_4h_to_h"},
    "bloom": {"dense_h_to_4h", "dense_4h_to_h"},
}


@pytest.mark.parametrize("name", MLPS)
def test_a_run_shows_which_linears_are_next_to_an_activation(name):
    model = zoo.decoder(name)
    found = mlp_weights(model, {"input_ids": IDS})
    layers = {n.removesuffix(".weight") for n, p in model.named_parameters() if id(p) in found} - {"lm_head", "model.embed_tokens"}
    wanted = {n for n in linears(model) if any(n.endswith(f".{end}") for end in MLPS[name])}
    assert layers == wanted and wanted, "Gemma 2 caps its logits by tanh, so its head counts too"


def test_flat_groups():
    model = zoo.decoder("llama")
    with pytest.warns(UserWarning, match="a scale a row instead of flat groups.*lm_head"):  # 199 rows
        dsi.quantise_model(model, groups=16, mlp_extra_grouping=True, example={"input_ids": IDS})
    forms = {name.rpartition(".")[2]: m.form.grouping for name, m in linears(model).items()}
    assert forms["q_proj"] == Grouping("flat", 16) and forms["up_proj"] == forms["down_proj"] == Grouping("flat", 32)
    assert forms["lm_head"] == Grouping() and logits(model).isfinite().all()


def test_a_model_that_nobody_knows_how_to_run_is_asked_for_an_example():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    with pytest.raises(DsiError, match="give example="):
        dsi.quantise_model(model, groups=4, mlp_extra_grouping=True)
    dsi.quantise_model(model, groups=4, mlp_extra_grouping=True, example={"input": torch.randn(2, 32)})
    assert [m.form.grouping.size for m in model if isinstance(m, QuantisedLinear)] == [8, 8, 4]


def test_layers_that_share_a_weight_share_its_int8():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    model[2] = model[0]
    dsi.quantise_model(model)
    assert model[2] is model[0] and model[1] is not model[0] and model[1].weight is model[0].weight


@pytest.mark.parametrize(
    "given, words",
    [
        ({"groups": 4, "format": Format(Grouping("inner", 32))}, "two ways to group"),
        ({"mlp_extra_grouping": True}, "which is not given"),
        ({"tied": "table"}, "tied is 'head', 'both' or 'keep'"),
        ({}, r"model\.layers\.1\.mlp\.down_proj\.weight holds nan"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_is(given, words):
    model = zoo.decoder("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("inf")
    with pytest.raises(DsiError, match=words):
        dsi.quantise_model(model, **given)
    assert all(type(m) is nn.Linear for m in linears(model).values())


def test_a_table_that_does_more_than_look_up_is_not_replaced():
    model = zoo.decoder("gemma2")  # its table scales what it looks up
    with pytest.raises(DsiError, match=r"model\.embed_tokens is a Gemma2TextScaledWordEmbedding"):
        dsi.quantise_model(model, tied="both")
    assert all(type(m) is nn.Linear for m in linears(model).values())


def test_torchs_own_layers_that_read_weights_past_their_modules():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        before = layer(x)
        dsi.quantise_model(layer)
        after = layer(x)
    assert isinstance(layer.linear1, QuantisedLinear) and type(layer.self_attn.out_proj) is not QuantisedLinear
    assert 1e-4 < zoo.relative_error(after, before) < 2e-2


def test_the_compiler_sees_int8_linears_and_fuses_them():
    model, plain = zoo.decoder("llama"), zoo.decoder("llama")
    report = dsi.explain(dsi.quantise_model(model), input_ids=IDS, use_cache=False, options={"check": True})
    wanted = dsi.explain(plain, input_ids=IDS, use_cache=False)
    assert [r.label.replace("linear_int8", "linear") for r in report.regions] == [r.label for r in wanted.regions]
    assert sum(r.label.count("linear_int8") for r in report.regions) == 9


def test_int8_activations_can_be_asked_for_in_either_place():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = dsi.quantise_model(zoo.decoder("llama"), activations="int8")
    two = dsi.quantise_model(zoo.decoder("llama"))
    run = torch.compile(two, backend="dsi", options={"activations": "int8", "executor": "reference"})
    with torch.no_grad():
        found = run(input_ids=IDS, use_cache=False).logits
    assert zoo.relative_error(found, logits(one)) < 1e-5 < 1e-3 < zoo.relative_error(found, logits(two))
