"""The engine's KV cache by itself: it grows, is used again, and hands copies over; and what is found out about a model."""

from __future__ import annotations

import pytest
import torch
import transformers
import zoo
from dsi.engine.generation.cache import LAUNCH_BYTES, KeyValueStore, LayerShape, hand_over, is_growing, take_over
from dsi.engine.generation.decoder import NotOurs
from dsi.engine.generation.examine import examine, position_limit
from generating import small_llama
from transformers import DynamicCache, StaticCache

SHAPES = [LayerShape(2, 8, 8, torch.float32, torch.float32), LayerShape(1, 4, 6, torch.float16, torch.bfloat16)]


def store():
    return KeyValueStore(SHAPES, torch.device("cpu"))


def test_it_grows_in_either_direction_and_never_shrinks():
    memory = store()
    first = memory.cache(2, 16)
    assert [tuple(layer.keys.shape) for layer in first.layers] == [(2, 2, 16, 8), (2, 1, 16, 4)]
    assert [(layer.keys.dtype, layer.values.dtype) for layer in first.layers][1] == (torch.float16, torch.bfloat16)
    assert memory.cache(2, 8) is first and memory.grown == 1, "a shorter request has the same cache"
    one = memory.cache(1, 16)
    assert one.layers[0].keys.data_ptr() == first.layers[0].keys.data_ptr() and memory.grown == 1
    grown = memory.cache(1, 32)
    assert grown.layers[0].keys.shape == (1, 2, 32, 8) and (memory.rows, memory.slots, memory.grown) == (2, 32, 2)
    assert memory.cache(3, 1).layers[0].keys.shape == (3, 2, 32, 8)
    assert memory.bytes_a_token == 2 * (8 + 8) * 4 + 4 * 2 + 6 * 2


@pytest.mark.parametrize("launch", [0, 1 << 20], ids=["what was written", "all at once"])
def test_what_a_call_left_is_gone_in_the_next(monkeypatch, launch, written=3):
    monkeypatch.setitem(LAUNCH_BYTES, "cpu", launch)
    memory = store()
    cache = memory.cache(2, 16)
    cache.layers[0].values[:, :, :written] = torch.inf
    memory.written, _ = written, memory.length.fill_(9)
    again = memory.cache(2, 16)
    assert again is cache and not again.layers[0].values.any() and memory.length == 0


def test_new_tokens_are_written_behind_those_that_are_there():
    memory = store()
    cache = memory.cache(1, 16)
    memory.length.fill_(5)
    new = torch.ones(1, 2, 3, 8), 2 * torch.ones(1, 2, 3, 8)
    keys, values = cache.update(*new, 0)
    assert keys is cache.layers[0].keys and values is cache.layers[0].values
    assert keys[0, 0, :, 0].tolist() == [0] * 5 + [1] * 3 + [0] * 8
    assert memory.length == 5, "whoever runs the model advances it"
    assert cache.get_mask_sizes(3, 0) == (16, 0) and cache.get_seq_length() == 5


def test_over_to_a_callers_cache_and_back():
    """A window's layer of theirs keeps its last tokens only; ours keeps every token in its place."""
    config = transformers.Gemma2Config(num_hidden_layers=2, sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    memory = KeyValueStore([SHAPES[0]] * 2, torch.device("cpu"))
    cache = memory.cache(2, 16)
    for layer in cache.layers:
        layer.keys.normal_(), layer.values.normal_()
    theirs = hand_over(cache, DynamicCache(config=config), 0, 6)
    hand_over(cache, theirs, 6, 9)
    assert theirs.get_seq_length() == 9
    assert torch.equal(theirs.layers[0].keys, cache.layers[0].keys[:, :, :9])
    assert torch.equal(theirs.layers[1].keys, cache.layers[1].keys[:, :, 6:9])
    kept = [layer.keys.clone() for layer in theirs.layers]
    expected = [(layer.keys[:, :, :9].clone(), layer.values[:, :, :9].clone()) for layer in cache.layers]
    memory.written = 9
    take_over(memory.cache(2, 16), theirs, 9)
    assert torch.equal(cache.layers[0].keys[:, :, :9], expected[0][0]) and torch.equal(cache.layers[0].values[:, :, :9], expected[0][1])
    assert torch.equal(cache.layers[1].keys[:, :, 6:9], expected[1][0][:, :, 6:]) and not cache.layers[1].keys[:, :, :6].any()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(theirs.layers, kept, strict=True)), "what was handed over is a copy"


def test_which_caches_can_be_taken_over():
    config = small_llama().config
    assert is_growing(DynamicCache()) and is_growing(DynamicCache(config=config))
    assert not is_growing(StaticCache(config=config, max_cache_len=8)) and not is_growing(None)


def test_a_model_is_examined_without_being_touched():
    model = zoo.decoder("opt")
    before = {name: (id(tensor), tensor._version) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = examine(model)
    assert found.layers == (LayerShape(4, 16, 16, torch.float32, torch.float32),) * 2
    assert found.always_masked, "OPT counts its positions in the mask"
    assert not examine(zoo.decoder("llama")).always_masked
    assert {name: (id(tensor), tensor._version) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == before


def test_models_that_are_none_for_the_loop_are_refused_in_a_sentence():
    sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    with pytest.raises(NotOurs, match="MambaForCausalLM"):
        examine(mamba)
    with pytest.raises(NotOurs, match="is no transformers model that generates"):
        examine(torch.nn.Linear(2, 2))
    llama = small_llama()
    llama.config.layer_types = ["chunked_attention"]
    with pytest.raises(NotOurs, match="some layers are of the kind chunked_attention"):
        examine(llama)


@pytest.mark.parametrize(
    ("name", "positions"), [("gpt2", 256), ("opt", 256), ("gptj", 256), ("llama", None), ("bloom", None), ("gpt_neox", None)]
)
def test_tables_of_positions(name, positions):
    model = zoo.decoder(name)
    assert position_limit(model, model.config) == positions
