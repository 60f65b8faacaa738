"""What transformers prepared for a call is used for later ones exactly where these differ in their tokens alone."""

from __future__ import annotations

import pytest
import torch
from dsi.engine.generation import Generator
from dsi.engine.generation.frozen import Known, frozen
from dsi.engine.generation.kept import Kept
from dsi.engine.generation.merged import Merged
from dsi.engine.generation.request import Request
from dsi.engine.generation.sampling import Recipe
from generating import REFERENCE, VOCABULARY, eager, prompt, small_llama
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

pytestmark = pytest.mark.one_engine

NEW = 4
HOW = dict(max_new_tokens=NEW, eos_token_id=2, pad_token_id=0)


@pytest.fixture(scope="module")
def shared():
    return Generator(small_llama(), max_out_tokens=96, options=REFERENCE)


@pytest.fixture
def generator(shared):
    """Nothing is kept from another test, nor a setting."""
    shared._kept.forget()
    configs = shared.model.config, shared.model.generation_config
    before = [dict(vars(config)) for config in configs]
    yield shared
    for config, values in zip(configs, before, strict=True):
        vars(config).clear()
        vars(config).update(values)


@pytest.fixture
def prepared(monkeypatch):
    """A list that grows when transformers prepares a call."""
    seen = []
    prepare = GenerationMixin._get_stopping_criteria

    def watched(self, *args, **kwargs):
        seen.append(type(self).__name__)
        return prepare(self, *args, **kwargs)

    watched.__name__ = prepare.__name__
    monkeypatch.setattr(GenerationMixin, "_get_stopping_criteria", watched)
    return seen


def test_other_tokens_need_no_preparation(generator, prepared):
    for seed in range(3):
        ids = prompt(1, 7, seed=seed)
        made = generator.generate(ids, **HOW)
        assert len(prepared) == 1
        assert torch.equal(made, eager(generator.model, ids, **HOW))
        del prepared[1:]  # eager's


LENGTHS = {
    "new tokens are counted": (HOW, 1),
    "whatever is drawn": (dict(HOW, do_sample=True, top_k=5, repetition_penalty=1.3), 1),
    "all tokens are counted": (dict(HOW, max_new_tokens=None, max_length=18), 3),
    "an end that is not to come yet": (dict(HOW, min_new_tokens=2), 3),
    "tokens that are not to begin with": (dict(HOW, begin_suppress_tokens=[7]), 3),
}


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("rows", [1, 2])
def test_prompts_of_other_lengths_need_none_where_only_positions_hang_on_them(generator, prepared, case, rows):
    how, times = LENGTHS[case]
    made = []
    for length in (7, 12, 15, 12):
        ids = prompt(rows, length, seed=length)
        torch.manual_seed(1)
        made.append((ids, generator.generate(ids, **how)))
    assert len(prepared) == times
    for ids, tokens in made:
        torch.manual_seed(1)
        assert torch.equal(tokens, eager(generator.model, ids, **how))


@pytest.mark.parametrize(("first", "all_lengths"), [(0, True), (2, False), (None, True)])
def test_positions_that_do_not_count_from_zero_are_for_their_prompt(shared, first, all_lengths):
    kept = Kept(shared.model)
    calls = [kept.call(dict(HOW, inputs=prompt(1, length))) for length in (7, 8)]
    config = GenerationConfig(**HOW)
    config._pad_token_tensor = None
    positions = None if first is None else torch.arange(first, first + 7)[None]
    kept.keep(calls[0], Request(calls[0].ids, 7, NEW, Recipe(False, None), positions=positions), config, 1, plain=True)
    assert [kept.has(call) for call in calls] == [True, all_lengths]
    for call in calls[: 1 + all_lengths]:
        made, n = kept.request(call, 1, call.ids), call.ids.shape[1]
        assert made.fed == n and made.ids is call.ids
        assert made.positions is None if first is None else torch.equal(made.positions, torch.arange(first, first + n)[None])


def test_a_mask_that_hides_nothing_is_not_kept_for_prompts_of_other_lengths(shared):
    """A cache that made way for a smaller one, when memory ran out, has no room for it."""
    kept = Kept(shared.model)
    calls = [kept.call(dict(HOW, inputs=prompt(2, length), attention_mask=torch.ones(2, length).long())) for length in (60, 8)]
    config = GenerationConfig(**HOW)
    config._pad_token_tensor = None
    seen = torch.ones(2, 60, dtype=torch.bool)
    kept.keep(calls[0], Request(calls[0].ids, 60, NEW, Recipe(False, None), mask=seen), config, 1, plain=True)
    made = kept.request(calls[1], 1, calls[1].ids)
    assert made.fed == 8 and made.mask is None


def test_prompts_that_are_too_long_or_empty_are_seen_all_the_same(generator, prepared):
    generator.generate(prompt(1, 7), **HOW)
    with pytest.raises(
        ValueError, match="a prompt of 93 tokens and 4 new ones are 97 tokens, and the engine was made for max_out_tokens = 96"
    ):
        generator.generate(prompt(1, 93), **HOW)
    with pytest.raises(ValueError, match=r"inputs is .1, 0.: the prompt holds no token"):
        generator.generate(prompt(1, 0), **HOW)
    assert len(prepared) == 1


def test_a_hook_that_looks_at_lengths_is_asked_about_each(prepared):
    class Own(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **given):
            return super().prepare_inputs_for_generation(input_ids, **given)

    model = small_llama()
    model.__class__ = Own
    generator = Generator(model, max_out_tokens=96, options=REFERENCE)
    for length in (7, 8, 8):
        generator.generate(prompt(1, length), **HOW)
    assert generator.why_not_ours == "" and len(prepared) == 2


@pytest.fixture
def caches(monkeypatch):
    """A list that grows when transformers makes a cache."""
    seen, make = [], DynamicCache.__init__

    def made(self, *args, **kwargs):
        seen.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "__init__", made)
    return seen


def test_a_cache_is_made_for_transformers_loops_alone(generator, caches, prepared):
    """The first one shows of what kind it is, for configurations that stay as they are."""
    generator._growing = None
    for new, made in ((4, 1), (5, 0), (6, 0)):
        caches.clear()
        ids, how = prompt(1, 9), dict(HOW, max_new_tokens=new)
        tokens = generator.generate(ids, **how)
        assert len(prepared) == 1 and len(caches) == made
        assert torch.equal(tokens, eager(generator.model, ids, **how))
        prepared.clear()
    ids = prompt(1, 9)
    for more in ({"no_repeat_ngram_size": 2}, {"num_beams": 2}):
        expected = generator.model.generate(ids, **HOW, **more)
        caches.clear()
        assert torch.equal(generator.generate(ids, **HOW, **more), expected)
        assert len(caches) == 1 and caches[0].get_seq_length() == 9 + NEW - 1, "it was used"
    caches.clear()
    assert generator.generate(prompt(1, 10), return_dict_in_generate=True, **HOW)[1].get_seq_length() == 10 + NEW - 1
    assert len(caches) == 1
    generator.model.config.max_position_embeddings = 500
    caches.clear()
    generator.generate(prompt(1, 11), **HOW)
    assert len(caches) == 1, "it may be of another kind"


def test_a_loop_of_the_callers_is_given_a_cache(generator, caches):
    """It stands in for the one that would be called, and expects what that is given."""
    given = []

    def custom(model, input_ids, **kwargs):
        given.extend(value for value in kwargs.values() if isinstance(value, DynamicCache))
        return input_ids

    for new in (4, 5):
        generator.generate(prompt(1, 7), **dict(HOW, max_new_tokens=new))
    generator.generate(prompt(1, 7), custom_generate=custom, **HOW)
    assert len(given) == 1


def test_rows_samples_and_masks(generator, prepared):
    """Whatever is sampled is what transformers samples for the seed."""
    how = dict(HOW, do_sample=True, top_k=20, temperature=0.8, repetition_penalty=1.2, min_new_tokens=2, eos_token_id=[2, 9])
    made = []
    for seed in (1, 2):
        ids = prompt(2, 7, seed=seed)
        torch.manual_seed(seed)
        made.append((ids, seed, generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)))
    assert len(prepared) == 1
    for ids, seed, tokens in made:
        torch.manual_seed(seed)
        assert torch.equal(tokens, eager(generator.model, ids, attention_mask=torch.ones_like(ids), **how))


def test_a_streamer_gets_the_prompt_and_every_token(generator, prepared):
    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], 0

        def put(self, value):
            self.seen.append(value)

        def end(self):
            self.ended += 1

    for seed in (1, 2):
        ids, streamer = prompt(1, 7, seed=seed), Streamer()
        made = generator.generate(ids, streamer=streamer, **HOW)
        assert torch.equal(torch.cat([value.reshape(-1) for value in streamer.seen]), made[0]) and streamer.ended == 1
        assert torch.equal(streamer.seen[0], ids)
    assert len(prepared) == 1


def criteria():
    return StoppingCriteriaList([MaxLengthCriteria(9)])


CHANGES = {
    "another argument": lambda g, how: how.update(max_new_tokens=NEW + 1),
    "one more argument": lambda g, how: how.update(repetition_penalty=1.5),
    "one that is as large": lambda g, how: how.update(repetition_penalty=1),
    "the model's defaults": lambda g, how: setattr(g.model.generation_config, "repetition_penalty", 1.5),
    "an entry of its own": lambda g, how: setattr(g.model.generation_config, "mine", [1, 2]),
    "the model's configuration": lambda g, how: setattr(g.model.config, "max_position_embeddings", 500),
    "a configuration": lambda g, how: how.update(generation_config=GenerationConfig(do_sample=False, repetition_penalty=1.5)),
    "a criterion": lambda g, how: how.update(stopping_criteria=criteria()),
    "a processor": lambda g, how: how.update(logits_processor=LogitsProcessorList()),
    "a tensor": lambda g, how: how.update(eos_token_id=torch.tensor([2])),
    "a row": lambda g, how: how.update(inputs=prompt(2, 7)),
    "a prompt of one token": lambda g, how: how.update(inputs=prompt(1, 1)),
    "another dtype": lambda g, how: how.update(inputs=how["inputs"].int()),
    "a mask": lambda g, how: how.update(attention_mask=torch.tensor([[0] * 2 + [1] * 5])),
    "padding that transformers finds": lambda g, how: how.update(inputs=torch.cat([torch.tensor([[0, 0]]), how["inputs"][:, 2:]], 1)),
    "more than ids": lambda g, how: how.update(return_dict_in_generate=True),
    "a way of its own": lambda g, how: how.update(num_beams=2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_prepared(generator, prepared, change):
    how = dict(HOW, inputs=prompt(1, 7))
    for _ in range(2):
        generator.generate(**how)
    assert len(prepared) == 1
    CHANGES[change](generator, how)
    made = generator.generate(**how)
    assert len(prepared) == 2
    made = getattr(made, "sequences", made)
    theirs = generator.model.generate(
        **{**how, "use_cache": False, "stopping_criteria": criteria() if "stopping_criteria" in how else None}
    )
    assert torch.equal(made, getattr(theirs, "sequences", theirs))


def test_a_mask_with_padding_is_looked_at_each_time(generator):
    """The first mask of a size hides nothing; the next one does."""
    ids = prompt(1, 7)
    for mask in (torch.ones(1, 7).long(), torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), torch.ones(1, 7).long()):
        made = generator.generate(ids, attention_mask=mask, **HOW)
        assert torch.equal(made, eager(generator.model, ids, attention_mask=mask, **HOW))


def test_masks_of_other_numbers_than_one_are_prepared(generator):
    """transformers adds them up for positions, so that what it made of twos is nothing for ones."""
    ids = prompt(1, 7)
    for number in (2, 1, 2):
        mask = torch.full_like(ids, number)
        made = generator.generate(ids, attention_mask=mask, **HOW)
        assert torch.equal(made, eager(generator.model, ids, attention_mask=mask, **HOW))


def test_padding_in_the_first_prompt_of_a_size_is_not_kept(generator):
    ids = prompt(1, 7)
    padded = torch.cat([torch.zeros(1, 2).long(), ids[:, 2:]], 1)
    for given in (padded, ids, padded, ids):
        assert torch.equal(generator.generate(given, **HOW), eager(generator.model, given, **HOW))


def test_a_configuration_that_was_written_to(generator):
    ids, config = prompt(1, 7), GenerationConfig(**HOW)
    for tokens in (4, 4, 6):
        config.max_new_tokens = tokens
        assert generator.generate(ids, config).shape[1] == 7 + tokens


def entry(name, value):
    return lambda config: setattr(config, name, value)


@pytest.mark.parametrize(
    "change",
    {
        "a number": entry("mine", 2),
        "a truth of the same value": entry("mine", True),
        "a real of the same value": entry("mine", 1.0),
        "one more": entry("more", None),
        "one less": lambda config: delattr(config, "mine"),
        "within a list": lambda config: config.several.append(3),
        "within that": lambda config: config.several[0].update(inner=1.0),
        "another list": entry("several", [2]),
        "a tensor": entry("mine", torch.tensor(1)),
        "another class": entry("__class__", type("Other", (GenerationConfig,), {})),
    }.items(),
    ids=lambda change: change[0],
)
def test_a_configuration_is_known_as_long_as_it_has_its_contents(change):
    config = GenerationConfig(mine=1, several=[{"inner": 1}])
    known = Known(config)
    assert known.has(config) and known.contents == frozen(config)
    change[1](config)
    assert not known.has(config)


MERGED = {
    "nothing": (None, {}),
    "arguments": (None, dict(HOW, do_sample=True, top_k=3, eos_token_id=[2, 9])),
    "a configuration": (GenerationConfig(max_new_tokens=3, eos_token_id=[2, 9], stop_strings=["a"]), {}),
    "both": (GenerationConfig(max_new_tokens=3), dict(HOW)),
    "what is handed on": (None, dict(HOW, attention_mask=torch.ones(1, 2), mine=3, cache=None, output_attentions=True)),
    "a tensor that is taken": (None, dict(eos_token_id=torch.tensor([2]))),
}


@pytest.mark.parametrize("case", MERGED)
def test_merged_configurations_are_transformers_own(generator, case):
    model, merged = generator.model, Merged()
    config, settings = MERGED[case]
    calls = []

    def merge(*args, **kwargs):
        calls.append(1)
        return model._prepare_generation_config(*args, **kwargs)

    for _ in range(3):
        given = {name: [*value] if isinstance(value, list) else value for name, value in settings.items()}
        expected, rest = model._prepare_generation_config(config, **given)
        made, others = merged.merge(model, merge, config, given)
        assert type(made) is type(expected) and list(others) == list(rest)
        assert all(others[name] is rest[name] for name in rest)
        tensors = [name for name, value in vars(expected).items() if isinstance(value, torch.Tensor)]
        assert {n: v for n, v in vars(made).items() if n not in tensors} == {n: v for n, v in vars(expected).items() if n not in tensors}
        made.max_length, made._eos_token_tensor = 3, torch.tensor([1])  # as transformers goes on to do
        if isinstance(made.eos_token_id, list):
            made.eos_token_id.append(77)
    assert len(calls) == (3 if case == "a tensor that is taken" else 1)
    model.generation_config.top_k = 7
    assert merged.merge(model, merge, config, given)[0].top_k == given.get("top_k", 7)


def test_what_is_wrong_with_tokens_is_still_said(generator):
    ids = prompt(1, 7)
    generator.generate(ids, **HOW)
    ids[0, 3] = VOCABULARY
    with pytest.raises(ValueError, match=f"token id {VOCABULARY} .row 0, place 3."):
        generator.generate(ids, **HOW)


def test_arguments_that_are_for_transformers_to_refuse(generator):
    ids = prompt(1, 7)
    generator.generate(ids, **HOW)
    with pytest.raises(TypeError, match="multiple values"):
        generator.generate(ids, inputs=ids, **HOW)
    by_place = generator.generate(ids, None, None, criteria(), **HOW)
    assert by_place.shape[1] == 9


def test_a_model_that_changes_is_prepared_anew(prepared):
    model = small_llama()
    generator, ids = Generator(model, max_out_tokens=96, options=REFERENCE), prompt(1, 7)
    for _ in range(2):
        generator.generate(ids, **HOW)
    model.resize_token_embeddings(VOCABULARY - 9)
    ids[0, 3] = VOCABULARY - 9
    with pytest.raises(ValueError, match=f"{VOCABULARY - 9} tokens are in the vocabulary"):
        generator.generate(ids, **HOW)
    ids[0, 3] = 5
    assert torch.equal(generator.generate(ids, **HOW), eager(model, ids, **HOW))
    assert len(prepared) == 3  # one of them eager's


def test_models_that_prepare_in_a_way_of_their_own_are_left_to_it(shared):
    class Other(LlamaForCausalLM):
        def _get_stopping_criteria(self, *args, **kwargs):
            return super()._get_stopping_criteria(*args, **kwargs)

    given = dict(HOW, inputs=prompt(1, 7))
    assert Kept(shared.model).call(given) is not None
    assert Kept(Other(shared.model.config)).call(given) is None


def test_an_instance_that_does(generator, prepared, monkeypatch):
    ids = prompt(1, 7)
    generator.generate(ids, **HOW)
    monkeypatch.setattr(generator.model, "_get_stopping_criteria", generator.model._get_stopping_criteria, raising=False)
    generator.generate(ids, **HOW)
    assert len(prepared) == 2


def test_autocast_is_seen(shared):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Kept(shared.model).call(dict(HOW, inputs=prompt(1, 7))) is None
