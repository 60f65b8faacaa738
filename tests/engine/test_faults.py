"""What users of other engines have reported as faults, one test each: none of them happens here."""

from __future__ import annotations

import threading

import pytest
import torch
from dsi.engine.generation.compiled import SHAPES, loudly
from generating import REFERENCE, eager, left_padded, prompt, small_llama

import dsi

pytestmark = pytest.mark.one_engine

MOST = 96


def engine_of(model):
    return dsi.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True, max_out_tokens=MOST, options=REFERENCE)


@pytest.fixture(scope="module")
def engine():
    return engine_of(small_llama())


def same_as_eager(engine, ids, new=6):
    made = engine.generate(ids, max_new_tokens=new)
    assert torch.equal(made, eager(engine.module, ids, max_new_tokens=new))
    return made


def test_batches_of_1_3_2_5_1_in_a_row(engine):
    for rows in (1, 3, 2, 5, 1):
        same_as_eager(engine, prompt(rows, 7, seed=rows))


def test_a_longer_prompt_after_a_shorter_one(engine):
    for length in (4, 40, 3, 64):
        same_as_eager(engine, prompt(1, length, seed=length))


def test_too_long_is_said_with_both_numbers_before_anything_is_computed(engine):
    class Refuses:
        """A streamer is the first to see tokens."""

        def put(self, value):
            raise AssertionError("something was computed")

    with pytest.raises(ValueError, match=r"90 tokens and 7 new ones are 97 tokens.*max_out_tokens = 96"):
        engine.generate(prompt(1, 90), max_new_tokens=7, streamer=Refuses())
    with pytest.raises(ValueError, match=r"90 tokens and 10 new ones are 100 tokens"):
        engine.generate(input_ids=prompt(1, 90), max_length=100, num_beams=2)
    same_as_eager(engine, prompt(1, 90), new=6)  # exactly full


def test_more_than_the_table_of_positions_is_refused():
    """Reading behind a table is garbage on a GPU, not an error."""
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=199, n_positions=32))
    with pytest.raises(ValueError, match=r"30 tokens and 3 new ones are 33 tokens.*GPT2LMHeadModel has a table of 32 positions"):
        engine_of(model.eval()).generate(prompt(1, 30), max_new_tokens=3)


def test_left_padded_rows_beside_unpadded_ones_are_what_each_is_alone(engine):
    rows = [prompt(length, seed=length) for length in (9, 2, 5)]
    made = engine.generate(**left_padded(*rows), max_new_tokens=6, eos_token_id=None)
    for row, text in zip(rows, made, strict=True):
        alone = engine.generate(row[None], max_new_tokens=6, eos_token_id=None)
        assert text[-6:].tolist() == alone[0, -6:].tolist()
        assert alone.tolist() == eager(engine.module, row[None], max_new_tokens=6, eos_token_id=None).tolist()


def test_the_same_prompt_twice_gives_the_same_text(engine):
    ids = prompt(1, 8)
    first = engine.generate(ids, max_new_tokens=8)
    engine.generate(prompt(3, 20, seed=5), max_new_tokens=8)
    assert torch.equal(engine.generate(ids, max_new_tokens=8), first)
    texts = []
    for _ in range(2):
        torch.manual_seed(11)
        texts.append(engine.generate(ids, max_new_tokens=8, do_sample=True, top_k=0).tolist())
    assert texts[0] == texts[1] != first.tolist()


def test_two_engines_in_one_process(engine):
    other = engine_of(small_llama(seed=3))
    ids = prompt(2, 7)
    first, second = engine.generate(ids, max_new_tokens=6), other.generate(ids, max_new_tokens=6)
    assert torch.equal(first, eager(engine.module, ids, max_new_tokens=6))
    assert torch.equal(second, eager(other.module, ids, max_new_tokens=6))
    assert not torch.equal(first, second)
    assert torch.equal(engine.generate(ids, max_new_tokens=6), first)


def test_several_tokens_continue_from_a_returned_cache(engine):
    ids = prompt(2, 7)
    whole = eager(engine.module, ids, max_new_tokens=5, eos_token_id=None)
    begun = engine.generate(ids, max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True)
    assert torch.equal(begun.sequences, whole)
    cache = begun.past_key_values
    assert cache.get_seq_length() == 7 + 5 - 1
    assert all(layer.keys.abs().sum(-1).gt(0).all() for layer in cache.layers), "what is returned is filled, not full of zeros"
    more = torch.cat([begun.sequences, prompt(2, 4, seed=9)], 1)  # a turn of a conversation: several tokens that the cache has not seen
    continued = engine.generate(more, past_key_values=cache, max_new_tokens=5, eos_token_id=None)
    assert torch.equal(continued, eager(engine.module, more, max_new_tokens=5, eos_token_id=None))
    assert cache.get_seq_length() == more.shape[1] + 5 - 1, "a caller's cache holds the new tokens afterwards"


def test_a_prompt_of_one_token(engine):
    same_as_eager(engine, prompt(1, 1))
    same_as_eager(engine, prompt(2, 1))


def test_what_a_caller_keeps_is_not_overwritten(engine):
    kept = engine.generate(prompt(2, 6), max_new_tokens=6, return_dict_in_generate=True)
    before = kept.sequences.clone(), [layer.keys.clone() for layer in kept.past_key_values.layers]
    engine.generate(prompt(2, 9, seed=4), max_new_tokens=6)
    logits = engine(prompt(1, 4)).logits
    copy = logits.clone()
    engine(prompt(1, 4, seed=8))
    assert torch.equal(kept.sequences, before[0]) and torch.equal(logits, copy)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(kept.past_key_values.layers, before[1], strict=True))


def test_weights_replaced_after_the_first_call_take_effect():
    engine = engine_of(small_llama(seed=6))
    ids = prompt(1, 7)
    before = same_as_eager(engine, ids)
    engine.module.lm_head.weight = torch.nn.Parameter(engine.module.lm_head.weight.flip(0).contiguous())
    after = same_as_eager(engine, ids)
    assert not torch.equal(before, after)
    with torch.no_grad():
        engine.module.model.embed_tokens.weight.mul_(-1)
    assert not torch.equal(same_as_eager(engine, ids), after)


def test_a_call_that_fails_midway_leaves_the_engine_whole(engine):
    class Leaves:
        """A client that hangs up after the second token."""

        def __init__(self):
            self.seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 3:
                raise ConnectionError("gone")

        def end(self):
            raise AssertionError("it did not end")

    with pytest.raises(ConnectionError, match="gone"):
        engine.generate(prompt(1, 7), max_new_tokens=8, streamer=Leaves())
    same_as_eager(engine, prompt(1, 7))


def test_calls_from_several_threads_wait_for_each_other(engine):
    prompts = [prompt(1 + n % 2, 5 + n, seed=n) for n in range(6)]
    expected = [eager(engine.module, ids, max_new_tokens=6) for ids in prompts]
    made = [None] * len(prompts)

    def work(number):
        made[number] = engine.generate(prompts[number], max_new_tokens=6)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_what_an_engine_asks_of_dynamo_holds_in_every_thread_and_no_longer_than_a_call():
    """Threads that come and go beside each other: in none does a call with one shape too many go on uncompiled in silence."""
    before = torch._dynamo.config.recompile_limit
    inside, leave, seen = threading.Barrier(2), threading.Event(), []

    def stay():
        with loudly:
            inside.wait()
            leave.wait()
            seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    with loudly:
        seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        leave.set()
        thread.join()
        seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
    assert seen == [True, True, True]
    assert torch._dynamo.config.recompile_limit == before


def test_a_call_like_an_earlier_one_compiles_under_the_same_limits(engine, monkeypatch):
    limits, (loop, *_) = [], engine.generator._ready()

    def watched(run):
        def call(*arguments):
            limits.append(torch._dynamo.config.recompile_limit)
            return run(*arguments)

        return call

    for name in ("_prompt", "_step"):
        monkeypatch.setattr(loop, name, watched(getattr(loop, name)))
    before = torch._dynamo.config.recompile_limit
    for _ in range(3):
        engine.generate(prompt(1, 7), max_new_tokens=3)
    assert len(limits) == 9 and set(limits) == {SHAPES} and torch._dynamo.config.recompile_limit == before


def test_a_model_that_becomes_more_than_one_graph_goes_on_in_transformers_loop():
    engine = engine_of(small_llama())
    for _ in range(2):
        same_as_eager(engine, prompt(1, 7), 3)
    part = engine.module.model.layers[0].mlp
    before = part.forward

    def forward(x):
        torch._dynamo.graph_break()
        return 1.5 * before(x)

    part.forward = forward
    same_as_eager(engine, prompt(1, 7), 3)
    assert "more than one graph" in engine.generator.why_not_ours
