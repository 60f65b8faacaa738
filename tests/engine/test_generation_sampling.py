"""Logits processors over buffers of fixed size, beside transformers' own on the sequence itself; and the sizes that lengths become."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers.generation.logits_process as theirs
from dsi.engine.generation.buckets import cache_bucket, prompt_bucket
from dsi.engine.generation.decoder import NotOurs
from dsi.engine.generation.sampling import recipe
from dsi.engine.generation.state import State
from hypothesis import given
from hypothesis import strategies as st

ROWS, SLOTS, VOCABULARY = 3, 24, 31
ENDS = torch.tensor([2, 7])

PROCESSORS = {
    "temperature": [theirs.TemperatureLogitsWarper(0.7)],
    "top_k": [theirs.TopKLogitsWarper(5)],
    "top_k of all": [theirs.TopKLogitsWarper(500)],
    "top_p": [theirs.TopPLogitsWarper(0.6)],
    "top_p keeps two": [theirs.TopPLogitsWarper(0.01, min_tokens_to_keep=2)],
    "min_p": [theirs.MinPLogitsWarper(0.2)],
    "typical": [theirs.TypicalLogitsWarper(0.5)],
    "epsilon": [theirs.EpsilonLogitsWarper(0.05)],
    "repetition": [theirs.RepetitionPenaltyLogitsProcessor(1.7)],
    "repetition rewarded": [theirs.RepetitionPenaltyLogitsProcessor(0.4)],
    "repetition behind the prompt": [theirs.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=6)],
    "least": [theirs.MinLengthLogitsProcessor(9, ENDS)],
    "least new": [theirs.MinNewTokensLengthLogitsProcessor(6, 3, ENDS)],
    "suppressed": [theirs.SuppressTokensLogitsProcessor([1, 4])],
    "suppressed at first": [theirs.SuppressTokensAtBeginLogitsProcessor([1, 4], 6)],
    "forced first": [theirs.ForcedBOSTokenLogitsProcessor(3)],
    "forced last": [theirs.ForcedEOSTokenLogitsProcessor(10, ENDS)],
    "nan and inf": [theirs.InfNanRemoveLogitsProcessor()],
    "normalised": [theirs.LogitNormalization()],
    "all that are common": [
        theirs.RepetitionPenaltyLogitsProcessor(1.2),
        theirs.MinNewTokensLengthLogitsProcessor(6, 3, ENDS),
        theirs.TemperatureLogitsWarper(0.9),
        theirs.TopKLogitsWarper(12),
        theirs.TopPLogitsWarper(0.8),
        theirs.MinPLogitsWarper(0.05),
    ],
}
with contextlib.suppress(ValueError):  # transformers knows it since 5.20 or so
    behind_padding = theirs.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([0, 2, 5]))
    PROCESSORS["repetition behind padding"] = [behind_padding]


def state_with(ids, numbers, skipped=None, vocabulary=VOCABULARY):
    """A state whose rows hold `ids` [rows, n], of which the first token or the first six are the prompt."""
    state = State(len(ids), SLOTS, torch.zeros((), dtype=torch.int64))
    first = min(6, ids.shape[1])
    state.begin(ids[:, :first], None, ENDS, 0, numbers)
    if skipped is not None:
        state.skipped.copy_(skipped)
    state.ids[:, first : ids.shape[1]] = ids[:, first:]
    state.count.fill_(ids.shape[1])
    return state


@pytest.mark.parametrize("name", PROCESSORS)
def test_scores_are_transformers(name):
    made = recipe(PROCESSORS[name], sample=False)
    g = torch.Generator().manual_seed(0)
    for length in (1, 6, 7, 8, 9, 10, SLOTS):
        if "padding" in name and length < 6:
            continue
        ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=g)
        logits = 4 * torch.randn(ROWS, VOCABULARY, generator=g)
        if name == "nan and inf":
            logits[0, 3], logits[1, 4], logits[2, 5] = float("nan"), float("inf"), -float("inf")
        expected = theirs.LogitsProcessorList(PROCESSORS[name])(ids, logits.clone())
        state = state_with(ids, made.numbers, made.skipped)
        scores = logits.clone()
        for step in made.steps:
            scores = step(state, scores)
        assert torch.equal(scores, expected), f"{length} tokens"
        assert torch.equal(made.pick(state, logits), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_are_torchs(dtype):
    """The same tokens as torch.multinomial's for the same seed."""
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = state_with(torch.zeros(64, 3, dtype=torch.int64), {})
    torch.manual_seed(5)
    ours = recipe([], sample=True).pick(state, logits)
    torch.manual_seed(5)
    assert torch.equal(ours, torch.multinomial(logits.float().softmax(-1), 1)[:, 0])
    assert len(ours.unique()) > 5


def test_keys_tell_computations_apart_and_numbers_do_not_matter():
    def key(*processors, sample=True):
        return recipe(processors, sample).key

    assert key(theirs.TopKLogitsWarper(5)) == key(theirs.TopKLogitsWarper(5))
    assert key(theirs.TopKLogitsWarper(5)) != key(theirs.TopKLogitsWarper(6))
    assert key(theirs.TopKLogitsWarper(5)) != key(theirs.TopKLogitsWarper(5), sample=False)
    assert key(theirs.MinLengthLogitsProcessor(9, ENDS)) == key(theirs.MinLengthLogitsProcessor(12, ENDS))
    assert key(theirs.MinLengthLogitsProcessor(9, ENDS)) != key(theirs.MinLengthLogitsProcessor(9, ENDS[:1]))
    hash(key(*PROCESSORS["all that are common"]))


def test_what_looks_at_the_host_is_refused():
    class Own(theirs.TemperatureLogitsWarper):
        """A subclass may do anything."""

    for processor in (Own(0.5), theirs.NoRepeatNGramLogitsProcessor(2), theirs.EtaLogitsWarper(0.1)):
        with pytest.raises(NotOurs, match=type(processor).__name__):
            recipe([processor], sample=True)
    two = [theirs.MinLengthLogitsProcessor(9, ENDS), theirs.MinLengthLogitsProcessor(12, ENDS)]
    with pytest.raises(NotOurs, match="two logits processors of one kind"):
        recipe(two, sample=True)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_prompt_buckets(length, room):
    bucket = prompt_bucket(length, max(length, room))
    assert length <= bucket <= max(length, room)
    assert bucket - length < max(16, length / 7)
    assert bucket % 16 == 0 or bucket in (1, max(length, room))


def test_prompts_become_few_sizes():
    assert len({prompt_bucket(length, 4096) for length in range(1, 4097)}) < 60


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_cache_buckets(tokens, least, most):
    most = max(tokens, least, most)
    slots = cache_bucket(tokens, least, most)
    assert max(tokens, min(least, most)) <= slots <= most
    assert slots == most or slots & (slots - 1) == 0
