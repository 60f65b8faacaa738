"""`dsi.lay_out`: weights stored [K, N] lie by output afterwards, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import dsi


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_head=3, n_layer=2, vocab_size=97, bos_token_id=0, eos_token_id=0)).eval()


def test_conv1d_weights_lie_by_output():
    model, other = gpt2(), gpt2()
    names = dsi.lay_out(model)
    assert len(names) == 2 * 4 and "transformer.h.0.attn.c_attn.weight" in names
    state = model.state_dict()
    for name, value in other.state_dict().items():
        assert torch.equal(state[name], value) and state[name].shape == value.shape
        assert (state[name].stride(0) == 1) == (name in names) or state[name].dim() < 2, name
    assert dsi.lay_out(model) == []  # once is enough
    ids = torch.arange(7)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, other(ids).logits)
        compiled = torch.compile(model, backend="dsi", options={"executor": "reference"})
        torch.testing.assert_close(compiled(ids).logits, other(ids).logits)


def test_other_models_stay_as_they_are():
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=53))
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    assert dsi.lay_out(model) == [] and before == {name: value.data_ptr() for name, value in model.named_parameters()}


class Own(nn.Module):
    """Products with weights that are stored both ways, as a parameter and as a buffer, and with one that is read both ways."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(24, 40) / 5)
        self.down = nn.Linear(40, 24)
        self.register_buffer("last", torch.randn(24, 56) / 5)
        self.turned = nn.Parameter(torch.randn(24, 56).t() / 5)
        self.shared = nn.Parameter(torch.randn(24, 40) / 5)

    def forward(self, x):
        x = x + self.down(torch.relu(x @ self.up))
        x = x + torch.relu(x @ self.shared) @ self.shared.t()
        return x @ self.last + nn.functional.linear(x, self.turned)


def test_the_graph_says_which_weights_of_a_model_of_ones_own_lie_across():
    torch.manual_seed(0)
    model, x = Own().eval(), torch.randn(3, 24)
    with torch.no_grad():
        expected = model(x)
    assert dsi.lay_out(model) == []  # no graph, nothing known
    (note,) = [note for note in dsi.explain(model, x).notes if "lay_out" in note]
    assert note.startswith("3 weights (up, …) are stored")
    assert sorted(dsi.lay_out(model, x)) == ["last", "turned", "up"]
    assert model.up.stride(0) == model.last.stride(0) == 1 and model.turned.is_contiguous() and model.shared.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert dsi.lay_out(model, x) == [] and not any("lay_out" in note for note in dsi.explain(model, x).notes)


def test_what_is_no_module_is_refused():
    with pytest.raises(dsi.DsiError, match=r"dsi.lay_out takes a torch.nn.Module, .* not int"):
        dsi.lay_out(5)
