"""Exact hit counts on tiny models of real architectures."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
import transformers as T
import zoo
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.normalise import normalise
from dsi.passes.recognise import recognise

IDS = torch.randint(3, zoo.VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))


def graph_of(name: str, mode: str, attn: str | None = None, dtype: torch.dtype = torch.float32):
    """The ATen graph of a zoo decoder: prefill or decode with a StaticCache, or "plain" without a cache."""
    model = zoo.decoder(name, dtype=dtype, attn=attn)
    if mode == "plain":
        return aten_graphs.aten_graph(model, input_ids=IDS, use_cache=False)
    cache = T.StaticCache(config=model.config, max_cache_len=32)
    if mode == "prefill":
        return aten_graphs.aten_graph(model, input_ids=IDS, past_key_values=cache)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
    return aten_graphs.aten_graph(model, input_ids=IDS[:, :1], past_key_values=cache)


def recognised(gm, context) -> dict[str, int]:
    """Both stages, the specification of the IR checked around each; hits of the recognise stage and of nothing else."""
    aliases = output_aliases(gm)
    normalise(gm, context)
    check_graph(gm, "aten", context.fake_mode, aliases)
    context.report.hits.clear()
    recognise(gm, context)
    check_graph(gm, "aten", context.fake_mode, aliases)
    return dict(context.report.hits)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_llama(mode: str) -> None:
    expected = {"embedding": 1, "rms_norm": 5, "silu": 2, "gated": 2, "rope": 4, "kv_write": 4}
    assert recognised(*graph_of("llama", mode)) == expected


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_gpt2(mode: str) -> None:
    expected = {"embedding": 2, "layer_norm": 5, "linear_flattened": 8, "gelu": 2, "kv_write": 4}
    assert recognised(*graph_of("gpt2", mode)) == expected
