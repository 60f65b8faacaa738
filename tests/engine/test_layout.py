"""`dsi.lay_out`: weights stored [K, N] lie by output afterwards, and nothing else changes."""

from __future__ import annotations

import torch
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
