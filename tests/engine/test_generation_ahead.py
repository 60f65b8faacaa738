"""A recorded prompt is launched before the look at the model, beside which it runs, and only where that can do no harm."""

from __future__ import annotations

import pytest
import torch
from dsi.engine.generation import Generator
from dsi.engine.generation.steps import PROMPT_RUNS, Steps
from generating import REFERENCE, VOCABULARY, Late, Stand, eager, prompt, small_llama
from torch import nn

import dsi

pytestmark = pytest.mark.one_engine

NEW = 4
HOW = dict(max_new_tokens=NEW, eos_token_id=2, pad_token_id=0)
DRAWN = dict(do_sample=True, temperature=50.0)  # nearly any token


class Logging(Stand):
    """Notes launches."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def record(self, run, place):
        def launch():
            self.log.append("launch")
            run()

        return launch, super().record(run, place)[1]


class Streamer:
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.reshape(-1))

    def end(self):
        self.seen.append(None)


@pytest.fixture(scope="module")
def shared():
    return Generator(small_llama(), max_out_tokens=96, options=REFERENCE)


@pytest.fixture
def generator(shared, monkeypatch):
    """With a prompt of 7 tokens recorded, for greedy calls and sampled ones, and a log of launches and looks since then."""
    shared._kept.forget()
    loop, log = shared._ready()[0], []
    loop.steps, loop.reader = Steps(Logging(log)), Late()
    for how in (HOW, dict(HOW, **DRAWN)):
        for _ in range(PROMPT_RUNS + 2):
            shared.generate(prompt(1, 7), **how)
    look = loop._watch.look
    monkeypatch.setattr(loop._watch, "look", lambda: log.append("look") or look())
    log.clear()
    shared.log = log
    return shared


def first_of(log):
    return log[: log.index("look") + 1]


def test_the_prompt_is_launched_first(generator):
    ids = prompt(1, 7, seed=5)
    made = generator.generate(ids, **HOW)
    assert generator.log == ["launch", "look", *["launch"] * (NEW - 1)]
    assert torch.equal(made, eager(generator.model, ids, **HOW))


def test_a_prompt_that_has_to_be_prepared_is_launched_first_as_well(generator):
    """It is of the size that was recorded."""
    ids = prompt(1, 8)
    made = generator.generate(ids, attention_mask=torch.ones_like(ids), **HOW)
    assert generator.log == ["launch", "look", *["launch"] * (NEW - 1)]
    assert torch.equal(made, eager(generator.model, ids, **HOW))


def test_what_is_not_recorded_waits_for_it(generator, monkeypatch):
    run = generator.loop._prompt
    monkeypatch.setattr(generator.loop, "_prompt", lambda *given: generator.log.append("run") or run(*given))
    generator.loop.steps.forget()
    generator.generate(prompt(1, 7), **HOW)
    assert generator.log[:2] == ["look", "run"]


def replaced(model):
    """The old one is still there, so that a record may read it; what it computes is for nobody."""
    norm = model.model.norm
    old, norm.weight = norm.weight, nn.Parameter(norm.weight.detach() * 2)
    return old


def replaced_for_good(model):
    replaced(model)


def written(model):
    with torch.no_grad():
        model.model.norm.weight.mul_(2)


def other_memory(model):
    model.model.norm.weight.data = model.model.norm.weight * 2


CHANGES = {
    replaced: ["launch", "look"],
    written: ["launch", "look"],
    replaced_for_good: ["look"],
    other_memory: ["look"],
    dsi.refresh: ["look"],
}


@pytest.mark.parametrize("how", [HOW, dict(HOW, **DRAWN)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed(generator, change, how):
    """Who is given tokens is given those of the model as it is, the prompt once, and the draws of the seed: in a call that is prepared, and
    in one that was."""
    ids = prompt(1, 7, seed=6)
    for _ in range(2):
        kept, streamer = change(generator.model), Streamer()
        generator.log.clear()
        torch.manual_seed(3)
        made = generator.generate(ids, streamer=streamer, **how)
        assert first_of(generator.log) == CHANGES[change]
        # Prompt and step are run once as they are, and the step is recorded anew.
        assert generator.log.count("launch") == CHANGES[change].count("launch") + NEW - 2
        torch.manual_seed(3)
        assert torch.equal(made, eager(generator.model, ids, **how)), kept
        assert streamer.seen.pop() is None and torch.equal(torch.cat(streamer.seen), made[0])
        assert generator.why_not_ours == ""
        for _ in range(PROMPT_RUNS + 1):
            torch.manual_seed(3)
            assert torch.equal(generator.generate(ids, streamer=Streamer(), **how), made)


def test_a_larger_vocabulary_is_not_read_from_the_old_table(generator):
    """The first table is kept by somebody, so that nothing is gone."""
    model, old = generator.model, generator.model.get_input_embeddings()
    model.set_input_embeddings(nn.Embedding(VOCABULARY + 9, old.embedding_dim))
    try:
        ids = torch.full((1, 7), VOCABULARY + 3)
        made = generator.generate(ids, **HOW)
        assert generator.log[0] == "look"
        assert torch.equal(made, eager(model, ids, **HOW))
    finally:
        model.set_input_embeddings(old)


def test_a_hook_may_read_what_is_gone_with_it(generator):
    hook = generator.model.model.norm.register_forward_hook(lambda module, args, output: output * 2)
    try:
        for _ in range(PROMPT_RUNS + 2):
            made = generator.generate(prompt(1, 7), **HOW)
        generator.log.clear()
        assert torch.equal(generator.generate(prompt(1, 7), **HOW), made)
        assert generator.log[0] == "look"
    finally:
        hook.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("how", [HOW, dict(HOW, **DRAWN)], ids=["greedy", "sampled"])
def test_a_model_that_has_changed_on_a_gpu(how, monkeypatch):
    model = small_llama(layers=2).cuda()
    generator, ids, ahead = Generator(model, max_out_tokens=96), prompt(1, 7).cuda(), []
    for _ in range(PROMPT_RUNS + 2):
        torch.manual_seed(3)
        made = generator.generate(ids, **how)
    steps, look = generator.loop.steps, generator.loop._watch.look
    before = steps.launched
    monkeypatch.setattr(generator.loop._watch, "look", lambda: ahead.append(steps.launched - before) or look())
    torch.manual_seed(3)
    assert torch.equal(generator.generate(ids, **how), made) and ahead == [1]
    for change in (replaced, written):
        kept, before = change(model), steps.launched
        ahead.clear()
        torch.manual_seed(3)
        made = generator.generate(ids, **how)
        assert ahead[0] == 1, kept
        torch.manual_seed(3)
        assert torch.equal(made, eager(model, ids, **how))
        for _ in range(PROMPT_RUNS + 1):
            torch.manual_seed(3)
            assert torch.equal(generator.generate(ids, **how), made)
