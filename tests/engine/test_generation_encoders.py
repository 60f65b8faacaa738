"""Encoder-decoders: the tokens of eager, three graphs for all lengths, and what their callers can give."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from dsi.compiler.observe import collecting
from dsi.engine.generation import Generator
from dsi.engine.generation.cache import LayerShape
from dsi.engine.generation.examine import examine, source_limit
from dsi.engine.generation.source import SourceShape, SourceStore
from dsi.engine.generation.steps import PROMPT_RUNS, Steps
from generating import REFERENCE, VOCABULARY, Late, Stand, eager_calls, prompt
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5Block
from zoo import hot

NEW = 8
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
BART = dict(
    **dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4),
    **dict(encoder_ffn_dim=48, decoder_ffn_dim=48),
)
TOKENS = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)


def t5(**more):
    torch.manual_seed(0)
    return hot(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **TOKENS, **more)).eval())


def gated_t5():
    """As T5 v1.1 has it."""
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def bart():
    """Positions of a table, and a first and a last token that are forced, as in those that translate and summarise."""
    torch.manual_seed(0)
    tokens = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
    model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(**BART, **tokens, max_position_embeddings=40)).eval()
    model.generation_config.forced_bos_token_id, model.generation_config.forced_eos_token_id = 7, 2
    return hot(model)


def whisper():
    """A source without a mask, and a generate of its own."""
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=[5], begin_suppress_tokens=[9])
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**BART, **tokens, num_mel_bins=16, max_source_positions=20, max_target_positions=40)
    return hot(transformers.WhisperForConditionalGeneration(config).eval())


def text(rows, length, pad, seed=1):
    """A batch whose second row is padded behind its end."""
    ids = prompt(rows, length, seed=seed)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, -3:], ids[1, -3:] = 0, pad
    return dict(input_ids=ids, attention_mask=mask)


def same(generator, given, **how):
    """The tokens, which must be eager's, made by the engine's loop."""
    made = generator.generate(**given, **how)
    assert generator.why_not_ours == ""
    assert torch.equal(made, generator.model.generate(**given, **how))
    return made


ONE_ROW, MORE_ROWS = ((1, 7), (1, 20), (1, 2)), ((3, 9), (2, 30), (1, 5))


@pytest.mark.parametrize(("make", "sizes"), [(gated_t5, ONE_ROW), (bart, ONE_ROW + MORE_ROWS)])
def test_three_graphs_serve_all_lengths(make, sizes):
    """Encoder, prompt and decode step; with several rows once more, for any number of them."""
    model = make()
    generator, pad = Generator(model, max_out_tokens=40, options=REFERENCE), model.config.pad_token_id
    how = dict(max_new_tokens=NEW, min_new_tokens=3)
    counts = []
    for rows, length in sizes:
        with collecting() as contexts:
            same(generator, text(rows, length, pad, seed=length), **how)
        counts.append(len(contexts))
    assert counts == [3, 0, 0, 3, 0, 0][: len(sizes)]


@pytest.fixture(scope="module")
def shared():
    return Generator(t5(), max_out_tokens=64, options=REFERENCE)


@pytest.mark.one_engine
class TestOneEngine:
    def test_nothing_runs_uncompiled(self, shared):
        given = text(1, 7, 0)
        same(shared, given, max_new_tokens=NEW)
        with eager_calls(T5Block) as seen:
            shared.generate(**given, max_new_tokens=NEW)
        assert seen == []

    def test_beams_compile_nothing_for_another_length(self, shared):
        """Four graphs: in transformers' loops the first decode step, with one token in the cache, is another one than those that follow."""
        counts = []
        for length in (7, 12, 5):
            given, how = text(1, length, 0, seed=length), dict(max_new_tokens=NEW, num_beams=3, num_return_sequences=2)
            with collecting() as contexts, eager_calls(T5Block) as seen:
                made = shared.generate(**given, **how)
            assert seen == [] and shared.why_not_ours
            assert torch.equal(made, shared.model.generate(**given, **how))
            counts.append(len(contexts))
        assert counts[0] <= 4 and counts[1:] == [0, 0]

    def test_no_mask_is_a_mask_of_ones(self, shared):
        given = text(1, 9, 0)
        del given["attention_mask"]
        same(shared, given, max_new_tokens=NEW)

    def test_a_row_in_a_batch_is_what_it_is_alone(self, shared):
        """Behind a longer source that left its keys and values."""
        same(shared, text(1, 40, 0, seed=5), max_new_tokens=NEW)
        rows = [prompt(11, seed=2), prompt(4, seed=3)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        made = shared.generate(input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=NEW, eos_token_id=None)
        for row, tokens in zip(rows, made, strict=True):
            assert torch.equal(tokens, shared.model.generate(row[None], max_new_tokens=NEW, eos_token_id=None)[0])

    def test_a_decoder_that_starts_with_several_tokens(self, shared):
        start = torch.tensor([[0, 17, 23]])
        for n in (3, 2):
            made = same(shared, text(1, 6, 0), decoder_input_ids=start[:, :n], max_new_tokens=NEW)
            assert made[0, :n].tolist() == start[0, :n].tolist()

    def test_states_of_the_encoder_that_are_given(self, shared):
        given = text(2, 9, 0)
        with torch.no_grad():
            states = shared.model.get_encoder()(**given).last_hidden_state
        held = states.clone()
        same(shared, dict(encoder_outputs=BaseModelOutput(last_hidden_state=states), attention_mask=given["attention_mask"]))
        assert torch.equal(states, held)

    def test_settings_that_the_loop_knows(self, shared):
        for how in (
            dict(forced_bos_token_id=11, forced_eos_token_id=1),
            dict(repetition_penalty=1.3, suppress_tokens=[4, 8]),
            dict(decoder_start_token_id=9, eos_token_id=[1, 30]),
        ):
            same(shared, text(2, 9, 0), max_new_tokens=NEW, **how)
        given = text(1, 9, 0)
        torch.manual_seed(7)
        ours = shared.generate(**given, max_new_tokens=NEW, do_sample=True, top_k=20, num_return_sequences=2)
        assert shared.why_not_ours == ""
        torch.manual_seed(7)
        assert torch.equal(ours, shared.model.generate(**given, max_new_tokens=NEW, do_sample=True, top_k=20, num_return_sequences=2))

    def test_an_output_holds_caches_of_its_own(self, shared):
        given, how = text(2, 9, 0), dict(max_new_tokens=NEW, return_dict_in_generate=True, eos_token_id=None)
        ours, theirs = shared.generate(**given, **how), shared.model.generate(**given, **how)
        assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
        both = [(output.past_key_values.self_attention_cache, output.past_key_values.cross_attention_cache) for output in (ours, theirs)]
        held = [layer.keys.clone() for cache in both[0] for layer in cache.layers]
        for mine, other in zip(*both, strict=True):
            for layer, expected in zip(mine.layers, other.layers, strict=True):
                seen = given["attention_mask"][:, None, :, None] if mine is both[0][1] else 1  # what is hidden is no matter
                torch.testing.assert_close(layer.keys * seen, expected.keys * seen, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(layer.values * seen, expected.values * seen, rtol=1e-4, atol=1e-4)
        shared.generate(**text(2, 12, 0, seed=8), max_new_tokens=NEW)
        assert all(torch.equal(layer.keys, kept) for (layer, kept) in zip([x for c in both[0] for x in c.layers], held, strict=True))

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            (dict(decoder_input_ids=torch.tensor([[0, 5, 6]]), decoder_attention_mask=torch.tensor([[1, 0, 1]])), "hides tokens"),
            (dict(no_repeat_ngram_size=2), "NoRepeatNGram"),
            (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
        ],
    )
    def test_anything_else_is_transformers(self, shared, more, why):
        given = dict(text(1, 9, 0), max_new_tokens=3, **more)
        ours = shared.generate(**given)
        assert why in shared.why_not_ours
        theirs = shared.model.generate(**given)
        ours, theirs = (output.sequences if isinstance(output, dict) else output for output in (ours, theirs))
        assert torch.equal(ours, theirs)

    def test_a_cache_of_the_callers_is_transformers(self, shared):
        same(shared, text(1, 9, 0), max_new_tokens=NEW)
        given, name = dict(text(1, 9, 0), max_new_tokens=3), shared.loop.decoder.cache_name
        pairs = [transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache()) for _ in range(2)]
        ours, theirs = (by.generate(**given, **{name: pair}) for by, pair in zip((shared, shared.model), pairs, strict=True))
        assert "the caller's own" in shared.why_not_ours and torch.equal(ours, theirs)
        assert [pair.get_seq_length() for pair in pairs] == [3, 3]

    def test_too_many_tokens_are_refused(self, shared):
        with pytest.raises(ValueError, match="a prompt of 1 tokens and 80 new ones are 81 tokens"):
            shared.generate(prompt(1, 7), max_new_tokens=80)


def test_a_token_is_one_launch():
    """The prompt's step is recorded when its sizes have come a few times; another length of the same bucket is none."""
    generator, how = Generator(t5(), max_out_tokens=32, options=REFERENCE), dict(max_new_tokens=NEW, eos_token_id=None)
    same(generator, text(1, 7, 0), **how)
    loop, recorder = generator.loop, Stand()
    loop.steps, loop.reader = Steps(recorder), Late()
    for call in range(PROMPT_RUNS + 2):
        launched = loop.steps.launched
        same(generator, text(1, 7 + call, 0, seed=call), **how)
    assert loop.steps.launched - launched == NEW and recorder.recorded == 2
    same(generator, text(1, 300, 0), **how)  # a longer one than there is memory for
    assert recorder.recorded == 3
    same(generator, text(1, 7, 0), **how)


def test_whisper_by_its_own_generate():
    model = whisper()
    generator = Generator(model, max_out_tokens=40, options=REFERENCE)
    for rows, seed in ((1, 0), (2, 1)):
        sound = torch.randn(rows, 16, 40, generator=torch.Generator().manual_seed(seed))
        ours = generator.generate(input_features=sound, max_new_tokens=5)
        assert torch.equal(ours, model.generate(input_features=sound, max_new_tokens=5))
    assert generator.why_not_ours == ""


def m2m():
    """Positions are counted by tokens that are no padding."""
    torch.manual_seed(0)
    tokens = dict(pad_token_id=7, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)  # 7 is the first token that a trial would take
    return hot(transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**BART, **tokens, max_position_embeddings=40)).eval())


def umt5():
    torch.manual_seed(0)
    return hot(transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**T5, **TOKENS)).eval())


# Before transformers 5.20 or so M2M looks at lengths on the host, and says so.
COUNTING = [(m2m, True)] if transformers.M2M100ForConditionalGeneration._can_compile_fullgraph else []


@pytest.mark.parametrize(("make", "masked"), [*COUNTING, (umt5, True), (whisper, False)])
def test_what_is_found_out_of_a_model(make, masked):
    model = make()
    decoder = examine(model, torch.zeros(1, 4, 32))
    assert decoder.source.masked == masked and decoder.source.width == 32
    assert len(decoder.layers) == len(decoder.source.layers) == 1


def test_positions_of_a_table_are_not_run_past():
    """A prompt is padded, but not past the decoder's last position."""
    model = bart()
    generator = Generator(model, max_out_tokens=64, options=REFERENCE)
    start = torch.cat([torch.tensor([[2]]), prompt(1, 35)], 1)
    same(generator, text(1, 6, 1), decoder_input_ids=start, max_new_tokens=3)
    with pytest.raises(ValueError, match="a table of 40 positions"):
        generator.generate(**text(1, 6, 1), decoder_input_ids=start, max_new_tokens=5)
    for how in (dict(), dict(num_beams=2)):
        with pytest.raises(ValueError, match=r"rows of 41 tokens, and the encoder of MBart\w* has a table of 40 positions"):
            generator.generate(**text(1, 41, 1), max_new_tokens=3, **how)
    same(generator, text(1, 40, 1), max_new_tokens=3)


@pytest.mark.parametrize(("make", "most"), [(bart, 40), (t5, None), (whisper, None)])
def test_how_long_a_source_may_be(make, most):
    assert source_limit(make()) == most


def test_a_source_that_a_mask_changes_in_a_way_of_its_own():
    """Padding must be nothing to the decoder; a model to which it is something goes through transformers' loop."""

    model = t5()
    plain = model.decoder.forward

    def odd(*args, encoder_attention_mask=None, **kwargs):
        made = plain(*args, encoder_attention_mask=encoder_attention_mask, **kwargs)
        if encoder_attention_mask is not None:
            made.last_hidden_state = made.last_hidden_state * (1 + encoder_attention_mask[:, -1:, None])
        return made

    model.decoder.forward = odd
    generator, given = Generator(model, max_out_tokens=32, options=REFERENCE), text(1, 7, 0)
    made = generator.generate(**given, max_new_tokens=2)
    assert "with a source that is padded" in generator.why_not_ours
    assert torch.equal(made, model.generate(**given, max_new_tokens=2))


def test_a_row_that_sees_nothing_of_its_source():
    """Such a row's attention may be the mean of all places, hidden or not: those of padding must not be among them."""
    model = t5()
    model.set_attn_implementation("eager")
    generator, given = Generator(model, max_out_tokens=32, options=REFERENCE), text(1, 9, 0, seed=2)
    for seen, why in ((1, ""), (0, "a row whose source is hidden as a whole")):
        given["attention_mask"][:] = seen
        made = generator.generate(**given, max_new_tokens=NEW, eos_token_id=None)
        assert why in generator.why_not_ours and bool(why) == bool(generator.why_not_ours)
        assert torch.equal(made, model.generate(**given, max_new_tokens=NEW, eos_token_id=None))


def test_a_hook_that_reads_padding_is_found_whenever_it_comes():
    """What a model is found to be holds for the model as it is: another hook, and it is tried again."""
    model = t5()
    generator, given = Generator(model, max_out_tokens=32, options=REFERENCE), text(1, 9, 0)
    same(generator, given, max_new_tokens=NEW)
    loop = generator.loop
    with torch.no_grad():
        model.shared.weight.mul_(0.5)
    same(generator, given, max_new_tokens=NEW)
    assert generator.loop is loop

    def adds_the_mean(module, args, kwargs, output):
        output.last_hidden_state = output.last_hidden_state + 3 * kwargs["encoder_hidden_states"].mean(1, keepdim=True)
        return output

    hook = model.decoder.register_forward_hook(adds_the_mean, with_kwargs=True)
    made = generator.generate(**given, max_new_tokens=NEW)
    assert "computes something else" in generator.why_not_ours
    assert torch.equal(made, model.generate(**given, max_new_tokens=NEW))
    hook.remove()
    same(generator, given, max_new_tokens=NEW)
    assert generator.loop is loop


def test_a_source_that_fits_alone_is_not_refused_for_larger_batches_before(monkeypatch):
    """Rows of one call and places of another are not asked for together where there is no memory for both."""
    store = SourceStore(SourceShape(8, torch.float32, (LayerShape(2, 4, 4, torch.float32, torch.float32),), True), torch.device("cpu"))
    own, zeros = Cache(layers=[]), torch.zeros

    def scarce(*size, **how):
        if math.prod(size) > 16 * 256 * 8:
            raise torch.OutOfMemoryError("no more")
        return zeros(*size, **how)

    monkeypatch.setattr(torch, "zeros", scarce)
    store.hold(own, torch.ones(16, 20, 8), None)
    store.hold(own, torch.ones(1, 1000, 8), None)
    assert (store.rows, store.places) == (1, 1024)
    with pytest.raises(RuntimeError, match="a source of 16 rows of 1000 places"):
        store.hold(own, torch.ones(16, 1000, 8), None)
    prompt_part, _ = store.hold(own, torch.ones(2, 20, 8), None)
    assert prompt_part.mask[:, :20].all() and not prompt_part.mask[:, 20:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [gated_t5, bart])
def test_a_token_is_one_launch_on_a_gpu(make):
    model = make().cuda()
    generator, how = Generator(model, max_out_tokens=40), dict(max_new_tokens=NEW, eos_token_id=None)
    for rows, length in ((1, 7), (3, 20), (2, 9), (1, 300 if make is gated_t5 else 30)):
        given = {name: value.cuda() for name, value in text(rows, length, model.config.pad_token_id).items()}
        for _ in range(PROMPT_RUNS + 1):
            same(generator, given, **how)
        launched = generator.loop.steps.launched
        same(generator, given, **how)
        assert generator.loop.steps.launched - launched == NEW and generator.loop.steps.problem == ""


@pytest.mark.gpu
def test_whisper_on_a_gpu():
    model = whisper().cuda()
    generator = Generator(model, max_out_tokens=40)
    for rows in (1, 2, 1):
        sound = torch.randn(rows, 16, 40, generator=torch.Generator().manual_seed(rows)).cuda()
        ours = generator.generate(input_features=sound, max_new_tokens=8)
        assert generator.why_not_ours == ""
        assert torch.equal(ours, model.generate(input_features=sound, max_new_tokens=8))
