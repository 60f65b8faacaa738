"""Generation by the engine's own loop: the tokens of eager on every decoder, two graphs for all prompts, and what callers can ask for."""

from __future__ import annotations

import pytest
import torch
import zoo
from dsi.compiler.observe import collecting
from dsi.engine.generation import Generator
from generating import REFERENCE, eager, eager_calls, left_padded, prompt, small_llama
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bench import models


@pytest.mark.parametrize("name", zoo.decoder_configs())
def test_greedy_tokens_are_eagers(name):
    """Two prompts of different length side by side: the shorter one is what eager makes of it alone, without a cache."""
    model = zoo.decoder(name)
    generator = Generator(model, max_out_tokens=64, options=REFERENCE)
    rows = [prompt(11, seed=2), prompt(4, seed=3)]
    made = generator.generate(**left_padded(*rows), max_new_tokens=8, eos_token_id=None)
    assert generator.why_not_ours == ""
    for row, ids in zip(rows, made, strict=True):
        alone = eager(model, row[None], max_new_tokens=8, eos_token_id=None)
        assert ids[-8:].tolist() == alone[0, -8:].tolist()


@pytest.fixture(scope="module")
def shared():
    return Generator(small_llama(), max_out_tokens=96, options=REFERENCE)


@pytest.mark.one_engine
class TestOneEngine:
    """These share an engine, and so what it has compiled."""

    def test_two_graphs_serve_every_prompt(self, shared):
        with collecting() as contexts:
            for length in (3, 17, 50, 1):
                ids = prompt(1, length, seed=length)
                with eager_calls(LlamaDecoderLayer) as seen:
                    made = shared.generate(ids, max_new_tokens=5)
                assert seen == [], "a forward ran uncompiled"
                assert torch.equal(made, eager(shared.model, ids, max_new_tokens=5))
        assert len(contexts) == 2
        assert not any(context.report.notes for context in contexts), "the cache is written in place"

    def test_sampling_is_transformers_for_the_same_seed(self, shared):
        how = dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, min_new_tokens=4)
        ids = prompt(1, 9)
        for seed in range(3):
            torch.manual_seed(seed)
            ours = shared.generate(ids, max_new_tokens=12, **how)
            assert shared.why_not_ours == ""
            torch.manual_seed(seed)
            assert torch.equal(ours, eager(shared.model, ids, max_new_tokens=12, **how))

    def test_ends_of_rows(self, shared):
        """Each row goes on with padding after its own end; generation stops at the last one's."""
        ids = prompt(3, 6)
        plain = eager(shared.model, ids, max_new_tokens=10, eos_token_id=None)
        ends = [plain[0, 8].item(), plain[1, 10].item(), plain[2, 7].item()]
        ours = shared.generate(ids, max_new_tokens=10, eos_token_id=ends, pad_token_id=0)
        assert torch.equal(ours, eager(shared.model, ids, max_new_tokens=10, eos_token_id=ends, pad_token_id=0))
        assert ours.shape[1] < 16 and (ours[:, -1] == 0).any()

    def test_streamer(self, shared):
        class Streamer:
            def __init__(self):
                self.values, self.ended = [], 0

            def put(self, value):
                self.values.append(value.tolist())

            def end(self):
                self.ended += 1

        ids, ours, theirs = prompt(1, 6), Streamer(), Streamer()
        shared.generate(ids, max_new_tokens=5, streamer=ours)
        eager(shared.model, ids, max_new_tokens=5, streamer=theirs)
        assert (ours.values, ours.ended) == (theirs.values, 1)

    def test_a_streamer_that_calls_its_own_engine_is_refused(self, shared):
        class Asks:
            def put(self, value):
                shared.generate(prompt(1, 4), max_new_tokens=2)

        with pytest.raises(RuntimeError, match="calls the engine that it serves"):
            shared.generate(prompt(1, 6), max_new_tokens=5, streamer=Asks())
        assert torch.equal(shared.generate(prompt(1, 6), max_new_tokens=5), eager(shared.model, prompt(1, 6), max_new_tokens=5))

    def test_stopping_criteria(self, shared):
        class After(StoppingCriteria):
            """The first row ends when it holds 9 tokens, the second one when it holds 12."""

            def __call__(self, input_ids, scores, **kwargs):
                assert scores is None
                return torch.tensor([input_ids.shape[1] >= 9, input_ids.shape[1] >= 12])

        ids = prompt(2, 6)
        for eos in (None, 198):
            how = dict(max_new_tokens=10, eos_token_id=eos, pad_token_id=0, stopping_criteria=StoppingCriteriaList([After()]))
            ours = shared.generate(ids, **how)
            assert shared.why_not_ours == "" and ours.shape == (2, 12)
            assert torch.equal(ours, eager(shared.model, ids, **how))

    def test_configurations_and_several_sequences_of_a_prompt(self, shared):
        config = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=5, num_return_sequences=3, pad_token_id=0)
        torch.manual_seed(1)
        ours = shared.generate(prompt(1, 5), generation_config=config)
        torch.manual_seed(1)
        assert torch.equal(ours, shared.model.generate(prompt(1, 5), generation_config=config))
        assert shared.why_not_ours == "" and ours.shape[0] == 3

    def test_a_cache_of_the_callers_is_filled(self, shared):
        """The way of transformers' chats: one cache, handed in empty at first, and the whole conversation with each turn."""
        from transformers import DynamicCache

        cache, text = DynamicCache(config=shared.model.config), prompt(1, 5)
        for turn in range(3):
            text = shared.generate(text, past_key_values=cache, max_new_tokens=4, eos_token_id=None)
            assert shared.why_not_ours == "" and cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, prompt(1, 3, seed=turn)], 1)
        expected = prompt(1, 5)
        for turn in range(3):
            expected = eager(shared.model, expected, max_new_tokens=4, eos_token_id=None)
            expected = torch.cat([expected, prompt(1, 3, seed=turn)], 1)
        assert torch.equal(text, expected)

    def test_inside_inference_mode(self, shared):
        with torch.inference_mode():
            ids = prompt(1, 7)
            made = shared.generate(ids, max_new_tokens=5)
        assert torch.equal(made, eager(shared.model, ids.clone(), max_new_tokens=5))


@pytest.mark.one_engine
class TestTransformersLoops:
    """What is not the engine's loop's runs in transformers', through the compiled forward."""

    @pytest.mark.parametrize(
        "how",
        [
            dict(num_beams=3, num_return_sequences=2),
            dict(return_dict_in_generate=True, output_scores=True),
            dict(no_repeat_ngram_size=2),
            dict(prompt_lookup_num_tokens=2),
        ],
        ids=lambda how: next(iter(how)),
    )
    def test_same_tokens_and_nothing_uncompiled(self, shared, how):
        ids = prompt(1, 7)
        with eager_calls(LlamaDecoderLayer) as seen:
            ours = shared.generate(ids, max_new_tokens=6, eos_token_id=None, **how)
        assert shared.why_not_ours and seen == []
        theirs = shared.model.generate(ids, max_new_tokens=6, eos_token_id=None, **how)
        if isinstance(theirs, dict):
            torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), rtol=1e-4, atol=1e-4)
            ours, theirs = ours.sequences, theirs.sequences
        assert torch.equal(ours, theirs)


def test_through_generated_code():
    """The executor that the others leave out for the time that it takes to compile."""
    model = small_llama()
    generator = Generator(model, max_out_tokens=64)
    for length in (5, 20):
        ids = prompt(1, length, seed=length)
        made = generator.generate(ids, max_new_tokens=8, eos_token_id=None)
        assert torch.equal(made, eager(model, ids, max_new_tokens=8, eos_token_id=None))


def test_a_real_model_answers_as_it_does_eager():
    """SmolLM2-135M."""
    model, tokenizer = models.smollm2(), models.smollm2_tokenizer()
    generator = Generator(model, max_out_tokens=256, options=REFERENCE)
    message = [{"role": "user", "content": "What is a compiler? Answer in one sentence."}]
    given = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ours = generator.generate(**given, max_new_tokens=10, do_sample=False)
    theirs = model.generate(**given, max_new_tokens=10, do_sample=False, use_cache=False)
    assert torch.equal(ours, theirs) and generator.why_not_ours == ""
    assert tokenizer.decode(ours[0, given["input_ids"].shape[1] :]).startswith("A compiler is a")


def test_more_than_one_graph_goes_to_transformers_loops_and_is_said(caplog):
    model = small_llama()
    forward = model.model.layers[0].mlp.forward

    def breaks(x):
        torch._dynamo.graph_break()
        return forward(x)

    model.model.layers[0].mlp.forward = breaks
    generator = Generator(model, max_out_tokens=32, options=REFERENCE)
    made = generator.generate(prompt(1, 5), max_new_tokens=1)
    assert torch.equal(made, eager(model, prompt(1, 5), max_new_tokens=1))
    assert generator.why_not_ours.startswith("the model is more than one graph") and "transformers' loop" in caplog.text


def test_min_out_tokens_above_max_out_tokens_is_refused():
    with pytest.raises(ValueError, match="min_out_tokens = 65 is more than max_out_tokens = 64"):
        Generator(small_llama(), max_out_tokens=64, min_out_tokens=65)


def test_a_cache_that_does_not_fit_says_what_it_needs():
    generator = Generator(small_llama(), max_out_tokens=2**45, min_out_tokens=2**45, options=REFERENCE)
    with pytest.raises(RuntimeError, match=r"the KV cache of 1 rows of \d+ tokens needs \d+ MiB.*min_out_tokens = "):
        generator.generate(prompt(1, 5), max_new_tokens=3)
