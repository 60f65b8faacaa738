"""Unmodified Hugging Face models: five anchored regions a layer, none without an anchor in a layer, and equal layers made equal."""

from __future__ import annotations

import pytest
import torch
import transformers as T
import zoo
from dsi.ir import ops
from dsi.passes.fuse.dataflow import is_view
from fuse.capture import Capture, compiled
from fuse.graphs import members

LAYERS = 2
ATTENTION = {"prefill": "attention + clone", "decode": "attention", "encode": "attention + clone"}

# Model -> embedding, the five regions of a layer (attention apart), what follows the layers.
PRE_NORM = {
    "gpt2": (
        "2 embedding + add",
        ("layer_norm + linear + kv_write", "linear + add", "layer_norm + linear + gelu_tanh", "linear + add"),
        "layer_norm + linear",
    ),
    "opt": (
        "2 embedding + add",
        ("layer_norm + 3 linear + mul + kv_write", "linear + add", "layer_norm + linear + relu", "linear + add"),
        "layer_norm + linear",
    ),
    "llama": (
        "embedding",
        ("rms_norm + 3 linear + rope + kv_write", "linear + add", "rms_norm + 2 linear + gated", "linear + add"),
        "rms_norm + linear",
    ),
    # Parallel residual: both additions follow the later of the two branches.
    "gpt_neox": (
        "embedding",
        ("layer_norm + linear + rope + kv_write", "linear", "layer_norm + linear + gelu_erf", "linear + add"),
        "layer_norm + linear",
    ),
}
POSITIONS = {"gpt2": False, "opt": False, "llama": True, "gpt_neox": True}
MASK = {"gpt2": "arange + add + le", "opt": "arange + add + new_ones + le + bitwise_and + index", "llama": "arange + add + le"}


def causal(name: str, mode: str, dtype: torch.dtype = torch.float32, dynamic: tuple[int, ...] = ()) -> Capture:
    """`name`'s graph for one call with a StaticCache; its logits and cache are compared with eager's."""
    model = zoo.decoder(name, dtype=dtype)
    ids = torch.randint(3, zoo.VOCAB, (2, 9))
    inputs, caches = [], []
    for _ in range(2):
        cache = T.StaticCache(config=model.config, max_cache_len=32)
        if mode == "decode":
            model(input_ids=ids[:, :8], past_key_values=cache)
        caches.append(cache)
        seen = 9 if mode == "decode" else 8
        given = {"input_ids": ids[:, 8:] if mode == "decode" else ids[:, :8].clone(), "past_key_values": cache}
        if name == "opt" and mode == "decode":  # without these it asks for the cache's length, which no graph can answer
            positions = torch.arange(seen).expand(2, seen)
            given |= {"attention_mask": torch.ones(2, seen, dtype=torch.long), "position_ids": positions[:, -given["input_ids"].shape[1] :]}
        inputs.append(given)
    with torch.no_grad():
        expected = model(**inputs[0]).logits
    capture, got = compiled(model, dynamic, **inputs[1])
    bound = 3e-5 if dtype == torch.float32 else 5e-2
    assert zoo.relative_error(got.logits, expected) < bound
    for one, other in zip(*(c.layers for c in caches), strict=True):
        assert zoo.relative_error(other.keys, one.keys) < bound and zoo.relative_error(other.values, one.values) < bound
    return capture


def expected_regions(name: str, mode: str) -> list[tuple[str, str]]:
    embedding, (qkv, output, up, down), head = PRE_NORM[name]
    layer = [("linear", qkv), ("attention", ATTENTION[mode]), ("linear", output), ("linear", up), ("linear", down)]
    return [("embedding", embedding), *layer * LAYERS, ("linear", head)]


def assert_equal_layers(capture: Capture) -> None:
    """The region of one place is the same kernel in every layer."""
    anchored = [r for r in capture.regions if r.kind in ("linear", "attention")]
    for i in range(5):
        assert len({r.key for r in anchored[i : 5 * LAYERS : 5]}) == 1


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", sorted(PRE_NORM))
def test_decoder(name, mode):
    capture = causal(name, mode)
    assert [(r.kind, r.label) for r in capture.regions if r.kind != "row"] == expected_regions(name, mode)
    if name != "opt":  # which flattens batch and length in its MLP, so that all layers but the first start from another shape
        assert_equal_layers(capture)
    assert all(r.spec is not None and r.plan is not None for r in capture.regions)

    # Rows are what all layers share, and the counters of all layers together.
    rows = [r.label for r in capture.regions if r.kind == "row"]
    assert rows.count("add") == 1
    rows.remove("add")
    if POSITIONS[name]:
        (positions,) = [r for r in rows if r.endswith("cos + sin")]
        rows.remove(positions)
    if mode == "decode":
        rows.remove(MASK.get(name, MASK["gpt2"]))
    if name == "opt" and mode == "decode":
        rows.remove("_to_copy + constant_pad_nd")  # the padding mask, which is then gathered from
    assert rows == []

    # No cache is copied, and nothing that computes stays outside.
    assert capture.context.report.notes == []
    writing = [r for r in capture.regions if "kv_write" in r.label]
    assert len(writing) == LAYERS and all(len(r.in_place) == 2 for r in writing)
    left = {"copy_"} if mode == "decode" else {"copy_", "zeros"}
    if name == "opt" and mode == "prefill":
        left |= {"cumsum", "ones"} & set(capture.outer())
    assert set(capture.outer()) == left


def test_decoder_in_bfloat16():
    capture = causal("llama", "decode", torch.bfloat16)
    assert [(r.kind, r.label) for r in capture.regions if r.kind != "row"] == expected_regions("llama", "decode")


@pytest.mark.parametrize(("name", "dynamic"), [("llama", (0, 1)), ("gpt2", (1,))])
def test_symbolic_batch_and_length(name, dynamic):
    capture = causal(name, "prefill", dynamic=dynamic)
    assert [(r.kind, r.label) for r in capture.regions if r.kind != "row"] == expected_regions(name, "prefill")
    assert_equal_layers(capture)
    assert any(isinstance(s, torch.SymInt) for r in capture.regions for n in r.outputs for s in n.meta["val"].shape)
    assert capture.context.report.notes == []


def test_encoder():
    model = zoo.encoder("bert")
    inputs = {"input_ids": torch.randint(3, zoo.VOCAB, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][1, 7:] = 0
    with torch.no_grad():
        expected = model(**inputs)
    capture, got = compiled(model, **inputs)
    assert zoo.relative_error(got.last_hidden_state, expected.last_hidden_state) < 3e-5
    assert zoo.relative_error(got.pooler_output, expected.pooler_output) < 3e-5
    layer = [
        ("linear", "layer_norm + 3 linear"),
        ("attention", "attention + clone"),
        ("linear", "linear + add"),
        ("linear", "layer_norm + linear + gelu_erf"),
        ("linear", "linear + add"),
    ]
    found = [(r.kind, r.label) for r in capture.regions]
    mask = found.pop(1)
    assert mask[0] == "row" and "bitwise_and" in mask[1]
    assert found == [("embedding", "3 embedding + add"), *layer * LAYERS, ("row", "layer_norm"), ("linear", "linear + tanh")]
    assert capture.outer() == [] and capture.context.report.unfused == []
    assert_equal_layers(capture)
    # The norm after a residual is computed before the next linear, which stores it once for the residual that follows.
    for region in capture.regions:
        if region.label.startswith("layer_norm + "):
            assert [o.target for o in region.outputs].count(ops.layer_norm) == 1


def test_members_and_roles_of_one_layer():
    capture = causal("llama", "decode")
    qkv = next(r for r in capture.regions if "rope" in r.label)
    compute = [m for m, node in zip(members(qkv), qkv.members, strict=True) if not is_view(node)]
    assert sorted(compute) == sorted(["rms_norm", *["linear"] * 3, "rope", "rope", "arange", "add", "kv_write", "kv_write"])
    by_role = {role: sorted(n.rstrip("_0123456789") for n, r in qkv.roles.items() if r == role) for role in ("anchor", "epilogue")}
    assert by_role == {"anchor": ["linear"] * 3, "epilogue": ["kv_write", "kv_write", "rope", "rope"]}
    assert [o.target for o in qkv.outputs] == [ops.rope, ops.kv_write, ops.kv_write]


def test_provenance():
    capture = causal("gpt2", "decode")
    for call in capture.graph.graph.find_nodes(op="call_module"):
        region = call.meta["region"]
        assert call.meta["dsi_region"] == region.name == call.target
        assert call.meta["stack_trace"] and call.meta["nn_module_stack"]
        for node in region.members:
            assert node.meta["dsi_region"] == region.name and node.meta["stack_trace"]
