"""Which models the engine's loop takes, found out from each: those that count from the end of a cache, that prepare inputs in a way of
their own, or that have experts."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
import zoo
from dsi.engine.generation import Generator
from dsi.engine.generation.decoder import NotOurs
from dsi.engine.generation.examine import examine
from dsi.engine.generation.rolling import mask_of_slots
from dsi.engine.generation.steps import Steps
from generating import REFERENCE, VOCABULARY, eager, left_padded, prompt, small_llama
from torch._subclasses.fake_tensor import FakeTensor

import dsi

BASE = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def hot(kind, config):
    torch.manual_seed(0)
    return zoo.hot(kind(config).eval(), 0)


def generator_of(model, **how):
    return Generator(model, max_out_tokens=64, options=REFERENCE, **how)


class TestACacheThatRolls:
    """GPT-Neo's local layers count keys from the end of what a cache returns."""

    def test_windows_continue_from_a_callers_cache(self):
        model = zoo.decoder("gpt_neo")
        assert examine(model).rolls
        generator = generator_of(model)
        begun = generator.generate(prompt(1, 11), max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True)
        assert generator.why_not_ours == ""
        cache = begun["cache" if "cache" in set(begun) else "past_key_values"]
        reference = model.generate(prompt(1, 11), max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True)
        theirs = reference["cache" if "cache" in set(reference) else "past_key_values"]
        for ours, layer in zip(cache.layers, theirs.layers, strict=True):
            torch.testing.assert_close(ours.keys, layer.keys, rtol=1e-4, atol=1e-4)
        more = torch.cat([begun.sequences, prompt(1, 3, seed=9)], 1)
        name = "cache" if hasattr(transformers.generation.GenerateDecoderOnlyOutput, "cache") else "past_key_values"
        continued = generator.generate(more, **{name: cache}, max_new_tokens=5, eos_token_id=None)
        assert generator.why_not_ours == "" and torch.equal(continued, eager(model, more, max_new_tokens=5, eos_token_id=None))
        longest = generator.generate(prompt(1, 40), max_new_tokens=24, eos_token_id=None)  # exactly full
        assert torch.equal(longest, eager(model, prompt(1, 40), max_new_tokens=24, eos_token_id=None))

    def test_the_mask_moves_with_the_tokens(self):
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
        assert mask_of_slots(mask, torch.tensor(4)).tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
        assert torch.equal(mask_of_slots(mask, torch.tensor(6)), mask)

    def test_a_model_that_ignores_positions_is_not_right_with_it(self):
        """Seen by running it: its tokens would take their places from the length of the cache."""

        class CountsItself(type(small_llama())):
            _can_compile_fullgraph = False

            def forward(self, input_ids=None, attention_mask=None, past_key_values=None, position_ids=None, **more):
                before = past_key_values.get_seq_length() if past_key_values is not None else 0
                position_ids = before + torch.arange(input_ids.shape[1])[None]
                given = dict(attention_mask=attention_mask, past_key_values=past_key_values, position_ids=position_ids)
                return super().forward(input_ids, **given, **more)

        model = hot(CountsItself, transformers.LlamaConfig(**BASE, **TOKENS, rope_theta=2.0))
        model.model.layers[0].self_attn.forward = _bent_by_positions(model.model.layers[0].self_attn)
        with pytest.raises(NotOurs, match=r"CountsItself computes something else with .*its logits are off by"):
            examine(model)


def _bent_by_positions(attention):
    """Rotary positions are relative; these are not."""
    forward = attention.forward

    def bent(hidden_states, position_embeddings=None, **more):
        return forward(hidden_states + position_embeddings[0].repeat(1, 1, 4), position_embeddings=position_embeddings, **more)

    return bent


class TestPreparationsOfTheirOwn:
    def test_longrope_is_ours_until_frequencies_change(self):
        """Phi-3 computes its whole cache again at one length."""
        rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
        sizes = dict(max_position_embeddings=64, original_max_position_embeddings=24, rope_parameters=rope)
        model = hot(transformers.Phi3ForCausalLM, transformers.Phi3Config(**BASE, **TOKENS, **sizes))
        try:
            prepares = examine(model).prepares
        except NotOurs as reason:  # transformers before 5.20 or so decides on the host which frequencies it takes
            assert "a trial call" in str(reason)
            pytest.xfail(str(reason))
        assert not any(prepares.differs(held, 1) for held in (*range(1, 24), *range(25, 40)))
        assert prepares.differs(24, 1).endswith("prepares the step behind 24 tokens in a way of its own")
        generator = generator_of(model)
        for length, new, theirs in ((19, 6, ""), (30, 6, ""), (24, 2, prepares.differs(24, 1))):
            how = dict(max_new_tokens=new, eos_token_id=None)
            assert torch.equal(generator.generate(prompt(1, length), **how), eager(model, prompt(1, length), **how)), length
            assert generator.why_not_ours == theirs

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda given: given, ""),
            (lambda given: given | {"pixel_values": None}, ""),
            (lambda given: given | {"position_ids": given["position_ids"] + 1}, "in a way of its own"),
            (lambda given: given | {"input_ids": given["input_ids"][:, :0]}, "in a way of its own"),
            (lambda given: given if given["input_ids"].sum() > 0 else {}, "cannot be tried: "),
        ],
        ids=["nothing", "images", "values", "sizes", "contents"],
    )
    def test_what_it_changes_is_found_out(self, change, reason):
        class Prepares(type(small_llama())):
            def prepare_inputs_for_generation(self, *args, **kwargs):
                return change(super().prepare_inputs_for_generation(*args, **kwargs))

        model = hot(Prepares, transformers.LlamaConfig(**BASE, **TOKENS))
        found = examine(model).prepares
        for held, fed in ((0, 5), (5, 1), (4, 3)):
            difference = found.differs(held, fed)
            assert reason in difference and bool(difference) == bool(reason)


def test_experts_in_float32_are_ours():
    model = hot(transformers.MixtralForCausalLM, transformers.MixtralConfig(**BASE, **TOKENS, num_local_experts=4))
    generator = generator_of(model)
    made = generator.generate(**left_padded(prompt(9), prompt(4, seed=3)), max_new_tokens=6, eos_token_id=None)
    assert generator.why_not_ours == ""
    alone = eager(model, prompt(4, seed=3)[None], max_new_tokens=6, eos_token_id=None)
    assert made[1, -6:].tolist() == alone[0, -6:].tolist()


def test_a_prompt_that_cannot_be_recorded_leaves_decode_steps_recorded(caplog):
    """The product of experts looks at the host in a prompt, and not in a decode step."""

    class Recorder:
        def place(self):
            return 0

        def may_record(self):
            return True

        def record(self, run, place):
            run()
            return (lambda: None), ()

    def prompt_step():
        if len(ran) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        ran.append("prompt")

    ran, steps = [], Steps(Recorder())
    for _ in range(2):
        steps.run(("prompt", 16), lambda: ran.append("prompt"))
        steps.run(("step",), lambda: None)
    assert steps.launched == 2
    steps.run(("prompt", 32), lambda: None)
    with pytest.raises(RuntimeError):
        steps.run(("prompt", 32), prompt_step)
    assert "no CUDA graph of a prompt could be recorded" in caplog.text and "not permitted" in steps.problem
    assert steps.run(("step",), lambda: None) is not None and steps.launched == 3


class Remembers(transformers.LlamaForCausalLM):
    """Leaves on itself what its forward reads."""

    scale = 1.0

    def prepare_inputs_for_generation(self, *args, **kwargs):
        self.scale = 0.5
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        held = {"past_key_values": past_key_values} if past_key_values is not None else {"cache": cache}
        held = {name: value for name, value in held.items() if value is not None}
        made = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **held, **kwargs)
        made.logits = torch.sin(made.logits * self.scale)
        return made


def test_what_a_preparation_leaves_on_the_model_reaches_its_forward():
    base = small_llama()
    model = Remembers(base.config).eval()
    model.load_state_dict(base.state_dict())
    expected = copy.deepcopy(model).generate(prompt(1, 7), max_new_tokens=4, eos_token_id=None)
    generator = generator_of(model)
    assert torch.equal(generator.generate(prompt(1, 7), max_new_tokens=4, eos_token_id=None), expected)
    assert "leaves something on the model" in generator.why_not_ours
    assert model.scale == 0.5


def test_what_a_model_compiles_by_itself_is_never_given_tensors_without_contents():
    """Its kernels would read memory that is not there, which ends the process."""
    model, given = small_llama(), []

    def backend(gm, inputs):
        def run(*values):
            given.extend(values)
            return gm(*values)

        return run

    activation = model.model.layers[0].mlp.act_fn = torch.nn.Identity()
    activation.forward = torch.compile(lambda x: torch.nn.functional.silu(x), backend=backend)
    ids = prompt(1, 5)
    expected = model.generate(ids, max_new_tokens=3)
    assert given
    given.clear()
    generator = generator_of(model)
    assert torch.equal(generator.generate(ids, max_new_tokens=3), expected) and generator.why_not_ours == ""
    assert not any(isinstance(value, FakeTensor) for value in given)


def test_parts_that_torch_compile_wraps_are_taken_back():
    model = small_llama()
    expected = model.generate(prompt(1, 5), max_new_tokens=3)
    layer = model.model.layers[0]
    model.model.layers[0] = torch.compile(layer, backend="eager")
    with pytest.warns(UserWarning, match="was compiled in place before"):
        engine = dsi.init_inference(model, dtype=None, replace_with_kernel_inject=True, options=REFERENCE)
    assert model.model.layers[0] is layer
    assert torch.equal(engine.generate(prompt(1, 5), max_new_tokens=3), expected) and engine.generator.why_not_ours == ""


class Decorated(transformers.LlamaForCausalLM):
    @torch.compile(backend="eager")
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **given):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **given)


def test_a_forward_that_its_class_compiles_is_taken_back():
    base = small_llama()
    model = Decorated(base.config).eval()
    model.load_state_dict(base.state_dict())
    with pytest.warns(UserWarning, match="was compiled in place before"):
        engine = dsi.init_inference(model, dtype=None, replace_with_kernel_inject=True, options=REFERENCE)
    assert torch.equal(engine.generate(prompt(1, 5), max_new_tokens=3), base.generate(prompt(1, 5), max_new_tokens=3))
    assert engine.generator.why_not_ours == ""


def test_a_forward_that_is_not_to_be_compiled_is_not():
    model = small_llama()
    expected = model.generate(prompt(1, 5), max_new_tokens=3)
    mlp = model.model.layers[0].mlp
    mlp.forward = kept = torch.compiler.disable(mlp.forward)
    engine = dsi.init_inference(model, dtype=None, replace_with_kernel_inject=True, options=REFERENCE)
    assert torch.equal(engine.generate(prompt(1, 5), max_new_tokens=3), expected)
    assert mlp.forward is kept and "more than one graph" in engine.generator.why_not_ours


def test_where_torch_compile_is_switched_off_generation_runs_and_says_so(caplog):
    model, ids = small_llama(), prompt(1, 5)
    expected = model.generate(ids, max_new_tokens=3)
    generator = generator_of(model)
    with torch._dynamo.config.patch(disable=True):
        assert torch.equal(generator.generate(ids, max_new_tokens=3), expected)
        assert "switched off" in generator.why_not_ours and "nothing is compiled" in caplog.text
    for _ in range(2):
        assert torch.equal(generator.generate(ids, max_new_tokens=3), expected) and generator.why_not_ours == ""
    with torch._dynamo.config.patch(disable=True):
        assert torch.equal(generator.generate(ids, max_new_tokens=3), expected) and "switched off" in generator.why_not_ours
