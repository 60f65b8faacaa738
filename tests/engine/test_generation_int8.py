"""Generation of models whose table of embeddings is the head's int8: the engine's own loop, and its checks of prompts."""

import pytest
import torch
import transformers
from dsi.engine.generation import Generator
from generating import REFERENCE, VOCABULARY
from zoo import decoder, hot

import dsi


def t5():
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    tokens = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return hot(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens)).eval())


@pytest.mark.parametrize("make", [t5, lambda: decoder("llama_tied"), lambda: decoder("opt")], ids=["t5", "llama", "opt"])
def test_the_loop_is_the_engines(make):
    model = dsi.quantise_model(make(), tied="both")
    ids = torch.tensor([[3, 50, 7, 12], [5, 5, 98, 4]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    ours = Generator(model, max_out_tokens=32, options=REFERENCE)
    assert torch.equal(ours.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert ours.why_not_ours == ""
    with pytest.raises(ValueError, match="vocabulary"):
        ours.generate(torch.tensor([[3, 5000]]), max_new_tokens=4, do_sample=False)
