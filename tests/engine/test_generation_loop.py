"""Steps recorded and launched, tokens looked at one step late: with stand-ins on the CPU, and with CUDA graphs where there is a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from dsi.engine.generation import Generator
from dsi.engine.generation.steps import PROMPT_RUNS, Steps
from generating import REFERENCE, Late, Stand, eager, prompt, small_llama

import dsi

pytestmark = pytest.mark.one_engine

NEW = 8


@pytest.fixture(scope="module")
def generator():
    return Generator(small_llama(), max_out_tokens=96, options=REFERENCE)


@pytest.fixture
def stand(generator):
    """The generator's loop with stand-ins that have seen nothing."""
    loop, recorder = generator._ready()[0], Stand()
    loop.steps, loop.reader = Steps(recorder), Late()
    return recorder


def launches(generator, *arguments, **how):
    """(what was made, launches of recorded steps, steps run as they are)"""
    steps = generator.loop.steps
    launched, plain = steps.launched, steps.plain
    made = generator.generate(*arguments, **how)
    assert generator.why_not_ours == ""
    return made, steps.launched - launched, steps.plain - plain


def test_a_token_is_one_launch(generator, stand):
    """The step is recorded when it is run for the second time, the prompt when its size has come a few times."""
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    expected = eager(generator.model, ids, **how)
    counts = []
    for _ in range(PROMPT_RUNS + 2):
        made, *launched_and_plain = launches(generator, ids, **how)
        assert torch.equal(made, expected)
        counts.append(launched_and_plain)
    assert counts == [[NEW - 2, 2], *[[NEW - 1, 1]] * (PROMPT_RUNS - 1), *[[NEW, 0]] * 2]
    assert stand.recorded == 2
    other = prompt(1, 12, seed=4)  # of the same bucket
    made, launched, plain = launches(generator, other, **how)
    assert (launched, plain) == (NEW, 0) and stand.recorded == 2
    assert torch.equal(made, eager(generator.model, other, **how))


@torch.no_grad()
def test_what_was_recorded_can_be_measured_and_runs_the_same_again(generator, stand):
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    generator.generate(ids, **how)
    assert generator.loop.measured() is not None and generator.loop.measured(prompt=True) is None, "that prompt came once"
    for _ in range(PROMPT_RUNS):
        made = generator.generate(ids, **how)
    state, logged = generator.loop._began[0], made[0, 7:].tolist()
    for prompts, tokens in ((True, logged[:1]), (False, logged[1:])):
        replay, rewind, room = generator.loop.measured(prompts)
        assert room == len(tokens)
        for _ in range(2):
            rewind()
            seen = []
            for _ in range(room):
                replay()
                seen.append(int(state.token))
            assert seen == tokens and int(state.length) == (7 if prompts else 6 + NEW)
    assert torch.equal(generator.generate(ids, **how), made)


def test_memory_that_a_cache_has_outgrown_is_free():
    generator = Generator(small_llama(), max_out_tokens=600, options=REFERENCE)
    for length in (7, 8):
        generator.generate(prompt(1, length), max_new_tokens=3, eos_token_id=None)
    outgrown = [weakref.ref(memory) for pair in generator.loop.store._memory for memory in pair]
    generator.generate(prompt(1, 300), max_new_tokens=3, eos_token_id=None)
    gc.collect()
    assert outgrown and all(memory() is None for memory in outgrown)


def test_steps_behind_the_end_are_discarded(generator, stand):
    """The end is seen two steps late: two more are run, and nobody sees them."""
    ids = prompt(2, 7)
    plain = eager(generator.model, ids, max_new_tokens=NEW, eos_token_id=None)
    ends = [plain[0, 9].item(), plain[1, 8].item()]
    how = dict(max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0)
    expected = eager(generator.model, ids, **how)
    seen = []

    class Streamer:
        def put(self, value):
            seen.append(value)

        def end(self):
            pass

    for _ in range(3):
        seen.clear()
        made, launched, ran = launches(generator, ids, **how)
        assert torch.equal(made, expected)
        assert launched + ran == made.shape[1] - 7 + Late.lag
    with_cache = generator.generate(ids, return_dict_in_generate=True, **how)
    assert with_cache.past_key_values.get_seq_length() == expected.shape[1] - 1
    generator.generate(prompt(1, 7), max_new_tokens=NEW, eos_token_id=None, streamer=Streamer())
    assert len(seen) == NEW + 1, "the prompt, and each token once"


def test_the_end_by_length_runs_no_step_too_many(generator, stand):
    _, launched, plain = launches(generator, prompt(1, 5), max_new_tokens=NEW, eos_token_id=None)
    assert launched + plain == NEW


def test_samples_repeat_for_a_seed(generator, stand):
    how = dict(max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=None)
    texts = []
    for _ in range(3):
        torch.manual_seed(3)
        texts.append(generator.generate(prompt(1, 7), **how).tolist())
    assert texts[0] == texts[1] == texts[2]
    torch.manual_seed(3)
    assert texts[0] == eager(generator.model, prompt(1, 7), **how).tolist()


def test_another_way_to_sample_is_another_record(generator, stand):
    ids = prompt(1, 7)
    for _ in range(PROMPT_RUNS + 1):
        for temperature in (0.5, 2.0):
            how = dict(max_new_tokens=NEW, do_sample=True, temperature=temperature, eos_token_id=None)
            torch.manual_seed(1)
            made = generator.generate(ids, **how)
            torch.manual_seed(1)
            assert torch.equal(made, eager(generator.model, ids, **how))
    assert stand.recorded == 4


def test_replaced_weights_and_moved_caches_are_recorded_anew(generator, stand):
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    for _ in range(PROMPT_RUNS + 1):
        launches(generator, ids, **how)
    recorded = stand.recorded
    weight = generator.model.lm_head.weight
    generator.model.lm_head.weight = torch.nn.Parameter(weight.flip(0).contiguous())
    try:
        made, _, plain = launches(generator, ids, **how)
        assert plain == 2 and torch.equal(made, eager(generator.model, ids, **how))
    finally:
        generator.model.lm_head.weight = weight
    assert stand.recorded == recorded + 1
    grown = generator.loop.store.grown
    launches(generator, prompt(4, 7), **how)  # more rows than any test here had: the memory moves
    assert generator.loop.store.grown == grown + 1
    made, _, plain = launches(generator, ids, **how)
    assert plain == 2 and torch.equal(made, eager(generator.model, ids, **how))


def test_written_weights_are_recorded_anew(generator, stand):
    """What a step reads may be made of a weight, as int8 forms are."""
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    for _ in range(PROMPT_RUNS + 1):
        launches(generator, ids, **how)
    with torch.no_grad():
        generator.model.lm_head.weight.neg_()
    made, _, plain = launches(generator, ids, **how)
    assert plain == 2 and torch.equal(made, eager(generator.model, ids, **how))
    generator.model.lm_head.weight.data.neg_()
    dsi.refresh(generator.model)
    made, _, plain = launches(generator, ids, **how)
    assert plain == 2 and torch.equal(made, eager(generator.model, ids, **how))
    assert launches(generator, ids, **how)[2] == 1, "only the prompt, which has to come a few times"


def test_a_replaced_module_is_recorded_anew(generator, stand):
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    for _ in range(PROMPT_RUNS + 1):
        launches(generator, ids, **how)
    mlp = generator.model.model.layers[0].mlp
    generator.model.model.layers[0].mlp = torch.nn.Identity()
    try:
        made, _, plain = launches(generator, ids, **how)
        assert plain == 2 and torch.equal(made, eager(generator.model, ids, **how))
    finally:
        generator.model.model.layers[0].mlp = mlp


def test_what_cannot_be_recorded_runs_as_it_is_and_is_said(generator, stand, caplog):
    stand.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    ids, how = prompt(1, 7), dict(max_new_tokens=NEW, eos_token_id=None)
    made, launched, plain = launches(generator, ids, **how)
    assert (launched, plain) == (0, NEW) and torch.equal(made, eager(generator.model, ids, **how))
    assert "every kernel is launched by itself: operation not permitted when stream is capturing" in caplog.text


def test_criteria_are_asked_after_every_token(generator, stand):
    from transformers import StoppingCriteria, StoppingCriteriaList

    lengths = []

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= 10])

    criteria = StoppingCriteriaList([After()])
    made, launched, plain = launches(generator, prompt(1, 7), max_new_tokens=NEW, eos_token_id=None, stopping_criteria=criteria)
    assert lengths == [8, 9, 10] and made.shape[1] == 10 and launched + plain == 3


@pytest.mark.gpu
class TestOnAGpu:
    """CUDA graphs and copies beside the steps."""

    @pytest.fixture(scope="class")
    def engines(self):
        model = small_llama(layers=2).cuda()
        return Generator(model, max_out_tokens=96), model

    @pytest.mark.parametrize("rows", [1, 3])
    def test_a_token_is_one_launch(self, engines, rows):
        generator, model = engines
        ids, how = prompt(rows, 7).cuda(), dict(max_new_tokens=24, eos_token_id=None)
        expected = eager(model, ids, **how)
        for _ in range(PROMPT_RUNS + 1):
            assert torch.equal(generator.generate(ids, **how), expected)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generator.generate(ids, **how)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["cudaGraphLaunch"] == 24
        assert generator.loop.steps.problem == ""

    def test_ends_are_seen_late_and_cut(self, engines):
        generator, model = engines
        ids = prompt(2, 7).cuda()
        plain = eager(model, ids, max_new_tokens=24, eos_token_id=None)
        how = dict(max_new_tokens=24, eos_token_id=[plain[0, 11].item(), plain[1, 15].item()], pad_token_id=0)
        for _ in range(3):
            assert torch.equal(generator.generate(ids, **how), eager(model, ids, **how))

    def test_samples_repeat_for_a_seed_and_are_transformers(self, engines):
        generator, model = engines
        ids = prompt(1, 7).cuda()
        how = dict(max_new_tokens=24, do_sample=True, top_k=20, top_p=0.9, repetition_penalty=1.2, eos_token_id=None)
        texts = []
        for _ in range(4):
            torch.manual_seed(3)
            texts.append(generator.generate(ids, **how).tolist())
        torch.manual_seed(3)
        assert texts.count(texts[0]) == 4 and texts[0] == model.generate(ids, **how).tolist()

    def test_another_stream_waits_for_the_last_call(self, engines):
        generator, model = engines
        ids, how = prompt(1, 7).cuda(), dict(max_new_tokens=24, eos_token_id=None)
        expected = eager(model, ids, **how)
        for _ in range(4):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                made = generator.generate(ids, **how)
            stream.synchronize()
            assert torch.equal(made, expected)
            assert torch.equal(generator.generate(ids, **how), expected)

    def test_replaced_weights(self, engines):
        generator, model = engines
        ids, how = prompt(1, 7).cuda(), dict(max_new_tokens=24, eos_token_id=None)
        generator.generate(ids, **how)
        weight = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(weight.flip(0).contiguous())
        assert torch.equal(generator.generate(ids, **how), eager(model, ids, **how))
        model.lm_head.weight = weight
        assert torch.equal(generator.generate(ids, **how), eager(model, ids, **how))
