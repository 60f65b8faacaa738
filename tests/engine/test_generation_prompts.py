"""Prompts, masks, caches and surroundings that are not as they should be: said in a sentence, or taken as transformers takes them."""

from __future__ import annotations

import pytest
import torch
import transformers
from dsi.engine.generation.prompts import check_prompt
from generating import REFERENCE, VOCABULARY, eager, prompt, small_llama
from transformers import BatchEncoding, DynamicCache, StaticCache

import dsi

pytestmark = pytest.mark.one_engine

HOW = dict(max_new_tokens=4, eos_token_id=None)


def engine_of(model):
    return dsi.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True, max_out_tokens=64, options=REFERENCE)


@pytest.fixture(scope="module")
def engine():
    return engine_of(small_llama())


@pytest.fixture
def silent(engine, monkeypatch):
    """The engine, whose model must not be run."""
    monkeypatch.setattr(engine.generator._facade, "stand_in", lambda: pytest.fail("something was prepared"))
    return engine


class Decoupled(torch.nn.Embedding):
    """A table for tokens that were added lies beside the first one."""

    def __init__(self):
        super().__init__(10, 4)
        self.added = torch.nn.Embedding(3, 4)
        self.projection = torch.nn.Linear(4, 6)


def test_tables_beside_the_first_one_hold_tokens_too():
    model = small_llama()
    model.set_input_embeddings(Decoupled())
    check_prompt(model, {"inputs": torch.tensor([[0, 12]])})
    with pytest.raises(ValueError, match=r"token id 13 .* 13 tokens are in the vocabulary"):
        check_prompt(model, {"inputs": torch.tensor([[0, 13]])})


def test_a_generate_of_the_models_own_takes_prompts_of_its_own_form():
    class Codebooks(type(small_llama())):
        def generate(self, inputs):
            return inputs

    model = small_llama()
    with pytest.raises(ValueError, match=r"give \[rows, tokens\]"):
        check_prompt(model, {"inputs": torch.ones(1, 3, 2, dtype=torch.int64)})
    model.__class__ = Codebooks
    check_prompt(model, {"inputs": torch.ones(1, 3, 2, dtype=torch.int64)})


class TestSaidBeforeAnythingRuns:
    @pytest.mark.parametrize(
        ("ids", "sentence"),
        [
            (torch.zeros(1, 0, dtype=torch.int64), r"inputs is \(1, 0\): the prompt holds no token"),
            (torch.tensor([[1, 2], [3, VOCABULARY]]), r"token id 199 \(row 1, place 1\), and 199 tokens are in the vocabulary"),
            (torch.tensor([[1, -100]]), r"token id -100 \(row 0, place 1\)"),
            (torch.tensor([1, 2]), r"inputs is \(2,\); give \[rows, tokens\]"),
            (torch.ones(1, 2), r"inputs is torch.float32; token ids are integers"),
            ([[1, 2]], r"inputs is a list; give a tensor of token ids .*return_tensors"),
            ("Hello", r"inputs is a str; give a tensor"),
            (BatchEncoding({"input_ids": prompt(1, 2)}), r"BatchEncoding, which holds several inputs: call generate\(\*\*inputs\)"),
        ],
        ids=["empty", "too large", "negative", "flat", "float", "list", "text", "encoding"],
    )
    def test_what_is_no_prompt(self, silent, ids, sentence):
        with pytest.raises((ValueError, TypeError), match=sentence):
            silent.generate(ids, **HOW)

    @pytest.mark.parametrize("shape", [(1, 5), (2, 7), (1, 9)])
    def test_a_mask_of_other_sizes(self, silent, shape):
        with pytest.raises(ValueError, match=r"attention_mask is \(\d, \d\), and inputs \(1, 7\): give one entry a token"):
            silent.generate(prompt(1, 7), attention_mask=torch.ones(shape), **HOW)

    def test_ids_of_an_encoder_and_its_decoder(self):
        sizes = dict(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
        engine = engine_of(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval())
        for given in (dict(input_ids=torch.tensor([[300]])), dict(input_ids=prompt(1, 3), decoder_input_ids=torch.tensor([[300]]))):
            with pytest.raises(ValueError, match=r"input_ids holds token id 300 \(row 0, place 0\)"):
                engine.generate(**given, max_new_tokens=2)

    def test_padding_that_is_no_token(self, engine):
        how = dict(pad_token_id=-1, eos_token_id=[5, 6], max_new_tokens=4)
        with pytest.raises(ValueError, match="pad_token_id = -1 is outside of the vocabulary of 199"):
            engine.generate(prompt(2, 7), **how)
        engine.generate(prompt(1, 7), **how)  # one row never goes on behind its end

    def test_caches_that_move(self, engine):
        with pytest.raises(ValueError, match="cache_implementation = 'offloaded' moves keys and values"):
            engine.generate(prompt(1, 7), cache_implementation="offloaded", **HOW)

    def test_a_cache_of_fixed_size_that_is_too_small(self, silent):
        given = {_cache_name(silent): StaticCache(config=silent.config, max_cache_len=9)}
        with pytest.raises(ValueError, match="7 tokens and 4 new ones are 11 tokens, and the cache that is given has room for 9"):
            silent.generate(prompt(1, 7), max_new_tokens=4, **given)
        with pytest.raises(pytest.fail.Exception, match="prepared"):  # the newest token needs no room
            silent.generate(prompt(1, 7), max_new_tokens=3, **given)

    def test_a_cache_that_does_not_fit(self, engine):
        cache = DynamicCache(config=engine.config)
        engine(prompt(2, 7), **{_cache_name(engine): cache}, use_cache=True)
        for ids, sentence in (
            (prompt(1, 9), "the cache holds 2 rows, and the prompt has 1"),
            (prompt(2, 7), "7 tokens are given, and the cache holds 7: give the whole text"),
        ):
            with pytest.raises(ValueError, match=sentence):
                engine.generate(ids, **{_cache_name(engine): cache}, **HOW)


def _cache_name(engine):
    import inspect

    return "cache" if "cache" in inspect.signature(engine.forward).parameters else "past_key_values"


class TestTakenAsTransformersTakesIt:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
    def test_masks_of_any_dtype(self, engine, dtype):
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]).to(dtype)
        made = engine.generate(prompt(2, 7), attention_mask=mask, **HOW)
        assert engine.generator.why_not_ours == ""
        assert torch.equal(made, eager(engine.module, prompt(2, 7), attention_mask=mask, **HOW))

    def test_ids_of_32_bits_and_padding_without_a_mask(self, engine):
        ids = prompt(2, 7)
        ids[0, :2] = ids[1, 3] = 0
        made = engine.generate(ids.to(torch.int32), **HOW)
        assert engine.generator.why_not_ours == "" and made.dtype == torch.int64
        assert torch.equal(made, eager(engine.module, ids, **HOW))

    def test_tokens_that_were_added(self):
        model, given = small_llama(), {"input_ids": torch.tensor([[1, 5, 220]])}
        with pytest.raises(ValueError, match="token id 220"):
            check_prompt(model, given)
        model.resize_token_embeddings(230)
        check_prompt(model, given)

    def test_autocast_goes_to_transformers_loop(self):
        """Also where the first call is made in it: what layers keep is found out without it."""
        engine = engine_of(small_llama())
        with torch.autocast("cpu", torch.bfloat16):
            engine.generate(prompt(1, 7), **HOW)
        assert engine.generator.why_not_ours == "autocast is on"
        assert torch.equal(engine.generate(prompt(1, 7), **HOW), eager(engine.module, prompt(1, 7), **HOW))
        assert engine.generator.why_not_ours == ""

    def test_hooks_count_whenever_they_are_registered(self, engine):
        ids, model = prompt(1, 7), engine.module
        before, logits = engine.generate(ids, **HOW), engine(ids).logits
        handle = model.lm_head.register_forward_hook(lambda module, given, made: -made)
        try:
            assert torch.equal(engine.generate(ids, **HOW), eager(model, ids, **HOW))
            torch.testing.assert_close(engine(ids).logits, -logits)
        finally:
            handle.remove()
        assert torch.equal(engine.generate(ids, **HOW), before)

    def test_a_wrapper_that_generates_with_the_model_inside_is_warned_of(self, caplog):
        """As adapters' wrappers do: what runs is the model inside, as it is."""

        class Wrapper(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.base_model, self.config, self.generation_config = model, model.config, model.generation_config
                self.can_generate, self.device, self.dtype = model.can_generate, model.device, model.dtype

            def forward(self, *args, **kwargs):
                return self.base_model(*args, **kwargs)

            def generate(self, *args, **kwargs):
                return self.base_model.generate(*args, **kwargs)

        model = small_llama()
        made = engine_of(Wrapper(model)).generate(prompt(1, 7), **HOW)
        assert torch.equal(made, eager(model, prompt(1, 7), **HOW))
        assert "nothing of this generation was compiled: the generate of Wrapper runs a model inside of it" in caplog.text
