"""Tiny models on a CUDA device, through generated kernels only: eager's numbers, in every dtype, by itself and in CUDA graphs."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
import zoo
from dsi.compiler.observe import collecting

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECODERS = ("gpt2", "llama", "opt", "gpt_neox", "gptj", "bloom", "falcon_gqa", "qwen3", "phi", "gemma2")
MODES = {"kernels": {"library": False}, "graphs": {"library": False, "mode": "reduce-overhead"}}
CACHE = 16
SLACK = 1.3  # error against float64 over eager's own: two roundings of one small sample


def judge(found, expected, exact, dtype):
    """fp32: at most 1e-5 from eager. Half precision: no further from float64 than eager is."""
    if dtype == torch.float32:
        assert zoo.relative_error(found, expected) <= 1e-5
    else:
        assert zoo.relative_error(found, exact) <= SLACK * zoo.relative_error(expected, exact)


def logits(forward, model, ids, cache):
    """Of a prompt and of three decode steps, [B, S, V]."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = torch.arange(CACHE, device=ids.device)[None].expand(ids.shape[0], -1)
    found = []
    for part in (slice(0, -3), slice(-3, -2), slice(-2, -1), slice(-1, None)):
        start, stop, _ = part.indices(ids.shape[1])
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        if model.config.model_type == "bloom":  # it makes ALiBi from the mask, which has to be as long as the cache
            given["attention_mask"] = (positions < stop).long()
        found.append(forward(input_ids=ids[:, part], past_key_values=cache, **given).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_eager(name, dtype, mode):
    model = zoo.decoder(name, dtype).cuda()
    wide = copy.deepcopy(model).double()
    ids = torch.randint(3, zoo.VOCAB, (3, 12), generator=torch.Generator().manual_seed(7)).cuda()

    def cache():
        return transformers.StaticCache(config=model.config, max_cache_len=CACHE)

    with torch.no_grad(), collecting() as contexts:
        exact, expected = logits(wide, wide, ids, cache()), logits(model, model, ids, cache())
        compiled, ours = torch.compile(model, backend="dsi", options=MODES[mode]), cache()
        for _ in range(3):  # into one cache: graphs that the second time records are replayed in the third
            ours.reset()
            judge(logits(compiled, model, ids, ours), expected, exact, dtype)
    assert contexts and not [note for context in contexts for note in context.report.notes if "no CUDA graph" in note]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_an_encoder_equals_eager(name, dtype):
    model = zoo.encoder(name, dtype).cuda()
    ids, mask, _ = (value.cuda() for value in zoo.padded_batch())
    compiled = torch.compile(model, backend="dsi", options={"library": False})
    with torch.no_grad():
        found, expected, exact = (
            forward(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
            for forward in (compiled, model, copy.deepcopy(model).double())
        )
    judge(found, expected, exact, dtype)
