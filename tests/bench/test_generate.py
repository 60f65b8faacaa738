"""The generation loop is transformers' greedy search with a static cache, step by step."""

import pytest
import torch
import zoo

from bench.generate import Generation, greedy, largest_error


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "opt"])
def test_greedy_gives_the_tokens_of_generate(name):
    model = zoo.decoder(name)
    prompt = torch.randint(3, zoo.VOCAB, (1, 7), generator=torch.Generator().manual_seed(3))
    made = greedy(model, prompt, new_tokens=11, cache_length=20)
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=11, do_sample=False)
    assert made.tokens == theirs[0, 7:].tolist()
    assert len(made.logits) == len(made.tokens) == len(made.seconds) + 1


def test_largest_error_looks_no_further_than_the_first_different_token():
    a, b, far = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.1]), torch.tensor([9.0, 9.0])
    ours, reference = Generation([1, 2, 3], [a, b, far]), Generation([1, 4, 3], [a, a, a])
    assert largest_error(ours, reference) == pytest.approx(0.1)
    assert largest_error(Generation([1], [far]), reference) > 1
