"""Exact hit counts on tiny models of real architectures, and what the matching costs."""

from __future__ import annotations

import time
from typing import Any

import aten_graphs
import pytest
import torch
import transformers as T
import zoo
from dsi.compiler.collector import no_collections
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.normalise import normalise
from dsi.passes.recognise import TIDY, recognise

from bench.families.axes import Case
from bench.families.harness import run

IDS = torch.randint(3, zoo.VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))
LLAMA = {"embedding": 1, "rms_norm": 5, "silu": 2, "gated": 2, "rope": 4, "kv_write": 4}
GPT2 = {"embedding": 2, "layer_norm": 5, "linear_flattened": 8, "gelu": 2, "kv_write": 4}
NEOX = {"embedding": 1, "layer_norm": 5, "gelu": 2, "rope": 4, "partial_rope": 4, "kv_write": 4}
EAGER, EAGER_GQA = {"attention": 2}, {"attention": 2, "repeated_heads": 2}

# model, mode, attention implementation, dtype, hits of the recognise stage
CASES: list[tuple[str, str, str | None, torch.dtype, dict[str, int]]] = [
    ("llama", "prefill", None, torch.float32, LLAMA),
    ("llama", "decode", None, torch.float32, LLAMA),
    ("llama", "decode", None, torch.bfloat16, LLAMA),
    ("llama", "decode", "eager", torch.bfloat16, LLAMA | EAGER_GQA),
    ("llama", "prefill", "eager", torch.float32, LLAMA | EAGER_GQA),
    ("gpt2", "prefill", None, torch.float32, GPT2),
    ("gpt2", "decode", None, torch.float32, GPT2),
    ("gpt2", "prefill", "eager", torch.bfloat16, GPT2 | EAGER),
    ("opt", "prefill", None, torch.float32, {"embedding": 2, "layer_norm": 5, "relu": 2, "kv_write": 4}),
    ("opt", "plain", "eager", torch.float32, {"embedding": 2, "layer_norm": 5, "relu": 2, "attention": 2}),
    ("gpt_neox", "prefill", None, torch.float32, NEOX),
    ("gpt_neox", "decode", "eager", torch.float32, NEOX | EAGER),
    ("gptj", "decode", None, torch.float32, NEOX | {"layer_norm": 3}),
    ("bloom", "decode", None, torch.bfloat16, {"embedding": 1, "layer_norm": 6, "gelu": 2, "kv_write": 4, "attention": 2}),
    ("bloom_6_heads", "prefill", None, torch.float32, {"embedding": 1, "layer_norm": 6, "gelu": 2, "kv_write": 4, "attention": 2}),
    ("gpt_neo", "prefill", None, torch.bfloat16, {"embedding": 2, "layer_norm": 5, "gelu": 2, "kv_write": 4, "attention": 2}),
    ("qwen3", "decode", None, torch.float32, LLAMA | {"rms_norm": 9}),
    ("phi", "decode", None, torch.float32, NEOX | {"layer_norm": 3}),
    (
        "gemma2",
        "prefill",
        None,
        torch.bfloat16,
        {"embedding": 1, "rms_norm": 9, "gelu": 2, "gated": 2, "rope": 4, "kv_write": 4, "tanh": 1} | EAGER_GQA,
    ),
]


def graph_of(name: str, mode: str, attn: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The ATen graph of a zoo decoder and its context: prefill or decode with a StaticCache, or "plain" without a cache."""
    model = zoo.decoder(name, dtype=dtype, attn=attn)
    if mode == "plain":
        return aten_graphs.aten_graph(model, input_ids=IDS, use_cache=False)
    cache = T.StaticCache(config=model.config, max_cache_len=32)
    if mode == "prefill":
        return aten_graphs.aten_graph(model, input_ids=IDS, past_key_values=cache)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
    return aten_graphs.aten_graph(model, input_ids=IDS[:, :1], past_key_values=cache)


def recognised(gm: Any, context: Any) -> dict[str, int]:
    """Both stages, the specification of the IR checked around each; hits of the recognise stage and of nothing else."""
    aliases = output_aliases(gm)
    normalise(gm, context)
    check_graph(gm, "aten", context.fake_mode, aliases)
    context.report.hits.clear()
    recognise(gm, context)
    check_graph(gm, "aten", context.fake_mode, aliases)
    tidying = {rule.name() for rule in TIDY}
    return {name: n for name, n in context.report.hits.items() if name not in tidying}


@pytest.mark.parametrize(
    ("name", "mode", "attn", "dtype", "hits"), CASES, ids=lambda v: str(v).removeprefix("torch.") if not isinstance(v, dict) else ""
)
def test_hits(name, mode, attn, dtype, hits):
    assert recognised(*graph_of(name, mode, attn, dtype)) == hits


@pytest.mark.parametrize(("name", "attn"), [("bert", None), ("bert", "eager"), ("roberta", None), ("distilbert", None)])
def test_encoders(name, attn):
    torch.manual_seed(0)
    model = T.AutoModel.from_config(zoo.encoder_configs()[name], attn_implementation=attn).eval()
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0
    hits = recognised(*aten_graphs.aten_graph(model, input_ids=IDS, attention_mask=mask))
    expected = {"embedding": 2 if name == "distilbert" else 3, "layer_norm": 5, "gelu": 2}
    if name != "distilbert":
        expected["tanh"] = 1
    assert hits == expected | (EAGER if attn else {})


@pytest.mark.parametrize(
    ("name", "mode", "attn"),
    [
        ("llama", "plain", None),
        ("llama", "plain", "eager"),
        ("gpt2", "plain", "eager"),
        ("gpt_neox", "plain", None),
        ("gptj", "plain", "eager"),
        ("bloom", "plain", None),
        ("gemma2", "plain", None),
        ("falcon_gqa", "plain", "eager"),
    ],
)
def test_numbers_are_those_of_the_graph_before(name, mode, attn):
    gm, context = graph_of(name, mode, attn)
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            like = torch.randn if fake.dtype.is_floating_point else lambda size, generator: torch.randint(0, 2, size, generator=generator)
            inputs.append(like(tuple(fake.shape), generator=generator).to(fake.dtype))
    before = gm(*[i.clone() for i in inputs])
    recognised(gm, context)
    after = gm(*[i.clone() for i in inputs])
    assert len(before) == len(after)
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())
        assert a.stride() == b.stride()


BEYOND = {"XLNet": 1, "XGLM": 1, "DeBERTa 2": 1, "Swin v2": 4}


@pytest.mark.parametrize("name", BEYOND)
def test_attentions_beyond_the_list(name):
    """Each attention of these is one, whatever is added to its scores and however they lie; products for positions stay what they are."""
    outcome = run(Case(name, "eager", "none", layers=1))
    (report,) = outcome.reports["prefill"]
    assert report.hits["attention"] == BEYOND[name] and not outcome.unfused()["attention"]
    ((error, eager),) = outcome.errors.values()
    assert error <= max(1e-5, 2 * eager)


def test_rotary_angles_by_matmul_become_a_product():
    """As rotary embeddings were written for years: inverse frequencies [B, D/2, 1] @ positions [B, 1, S]."""

    def angles(frequencies, positions):
        wide = frequencies[None, :, None].float().expand(positions.shape[0], -1, 1)
        freqs = (wide @ positions[:, None, :].float()).transpose(1, 2)
        return torch.cat((freqs, freqs), dim=-1).cos()

    gm, context = aten_graphs.aten_graph(angles, torch.rand(8), torch.arange(10).view(2, 5))
    normalise(gm, context)
    assert context.report.hits["outer_product"] == 1
    assert not [t for t in aten_graphs.targets(gm) if "bmm" in t or "mm" in t]


def decoder_layer(x, cos, sin, w, big):
    """One layer of a Llama as AOTAutograd gives it after the lift, on weights that all layers share."""

    def norm(x):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rope(x):
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    linear = torch.ops.dsi.linear
    y = norm(x)
    q, k, v = (linear(y, big).view(2, 5, 2, 8).transpose(1, 2) for _ in range(3))
    attended = torch.ops.dsi.attention(rope(q), rope(k), v, scale=0.25)
    x = x + linear(attended.transpose(1, 2).reshape(2, 5, 16), big)
    y = norm(x)
    return x + linear(torch.nn.functional.silu(linear(y, big)) * linear(y, big), big)


def test_thirty_two_layers_take_less_than_a_second_and_time_is_linear():
    half = torch.bfloat16
    inputs = [torch.randn(*size).to(half) for size in ((2, 5, 16), (5, 8), (5, 8), (16,), (16, 16))]

    def seconds(layers: int) -> float:
        def model(x, *weights):
            for _ in range(layers):
                x = decoder_layer(x, *weights)
            return x

        gm, context = aten_graphs.traced(model, *inputs)
        with no_collections():  # as a compilation runs them: elsewhere in the process there may be millions of objects to look at
            start = time.process_time()
            normalise(gm, context)
            recognise(gm, context)
            taken = time.process_time() - start
        hits = context.report.hits
        assert [hits[n] for n in ("rms_norm", "rope", "gated")] == [2 * layers, 2 * layers, layers]
        return taken

    seconds(2)  # imports and the recording of the patterns
    few, many = seconds(8), seconds(32)
    assert many < 1.0, f"{many:.2f} s"
    assert many < 8 * few, f"{few:.2f} s for 8 layers, {many:.2f} s for 32"


def test_symbolic_batch_and_length():
    ids = IDS.clone()
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(ids, dim)
    gm, context = aten_graphs.aten_graph(zoo.decoder("llama", attn="eager"), input_ids=ids, use_cache=False, dynamic=None)
    guards = len(context.fake_mode.shape_env.guards)
    assert recognised(gm, context) == {k: n for k, n in LLAMA.items() if k != "kv_write"} | EAGER_GQA
    assert len(context.fake_mode.shape_env.guards) == guards
