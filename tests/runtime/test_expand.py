"""Expanding regions back to a flat ATen graph: equal numbers, provenance on every node, no copy of a cache."""

from __future__ import annotations

import pytest
import torch
from dsi.ir import ops
from dsi.ir.errors import DsiInternalError
from dsi.runtime import expand as expanding
from dsi.runtime.expand import CPU_EXPANSIONS, Provenance, check_provenance, expand
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_graphs import D, Outer, decode_layer, eager_layer, layer_inputs

SIZES = [(2, 1, 32, 5), (3, 7, 29, 11), (1, 1, 17, 0)]  # batch, length, cache, position


def run_flat(flat, tensors):
    return flat(*(value.clone() for value in tensors.values()))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_expanded_graph_equals_the_references(sizes, in_place):
    tensors = layer_inputs(*sizes)
    expected = {name: value.clone() for name, value in tensors.items()}
    result = eager_layer(expected)
    outer, gm = decode_layer(tensors, in_place=in_place)
    flat = expand(gm, outer.fakes, outer.mode)
    got = {name: value.clone() for name, value in tensors.items()}
    (out,) = flat(*got.values())
    torch.testing.assert_close(out, result, rtol=2e-5, atol=2e-5)
    for name in tensors:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    assert out.stride() == result.stride()


def test_no_semantic_operator_is_left():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    flat = expand(gm, outer.fakes, outer.mode)
    assert not [node for node in flat.graph.nodes if ops.is_semantic(node.target)]
    assert not [node for node in flat.graph.nodes if node.op == "call_module"]


def test_every_node_names_its_region_and_member_and_keeps_its_source_line():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    flat = expand(gm, outer.fakes, outer.mode)
    members = {region.name: {member.name for member in region.members} for region in outer.regions}
    seen = set()
    for node in flat.graph.nodes:
        if node.op == "call_function":
            provenance = node.meta["provenance"]
            assert provenance.member in members[provenance.region]
            assert provenance.region.split("_")[0] in node.stack_trace.replace("project_1", "project")
            seen.add(provenance.region)
    assert seen == set(members)


def test_leftovers_name_themselves():
    outer = Outer()
    x = outer.input("x", torch.randn(3, 5))
    y = outer.call(torch.ops.aten.cumsum.default, x, 1)
    flat = expand(outer.finish(y), outer.fakes, outer.mode)
    assert [node.meta["provenance"] for node in flat.graph.nodes if node.op == "call_function"] == [Provenance("", y.name)]


def test_a_node_without_provenance_is_an_internal_error():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    flat = expand(gm, outer.fakes, outer.mode)
    node = next(node for node in flat.graph.nodes if node.op == "call_function")
    del node.meta["provenance"]
    with pytest.raises(DsiInternalError, match=f"{node.name} .* no provenance"):
        check_provenance(flat)


def test_expansion_itself_checks_provenance(monkeypatch):
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    monkeypatch.setattr(expanding._Expander, "stamp", lambda self, member, region: None)
    with pytest.raises(DsiInternalError, match="no provenance"):
        expand(gm, outer.fakes, outer.mode)


@pytest.mark.parametrize("batch, heads", [(1, 4), (2, 4)])
def test_a_decode_step_copies_no_cache(batch, heads):
    """Nothing but the in-place writes makes a value as large as a cache, and no key is repeated for the query heads that share it."""
    cache = 257
    outer, gm = decode_layer(layer_inputs(batch, 1, cache, 5))
    flat = expand(gm, outer.fakes, outer.mode)
    smallest = batch * 2 * cache * 16
    large = [
        node
        for node in flat.graph.nodes
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].numel() >= smallest
    ]
    assert [node.target for node in large] == [torch.ops.aten.index_put_.default] * 2
    assert all(node.args[0].op == "placeholder" for node in large)


def test_a_functional_write_keeps_the_old_cache():
    tensors = layer_inputs(2, 1, 32, 5)
    outer = Outer()
    nodes = [outer.input(name, tensors[name]) for name in ("keys", "pos")]
    new = outer.input("new", torch.randn(2, 2, 1, 16))
    (written,) = outer.region("write", lambda c, p, n: (D.kv_write(c, p, n, dim=2),), *nodes, new)
    flat = expand(outer.finish(written), outer.fakes, outer.mode)
    keys, fresh = tensors["keys"].clone(), torch.randn(2, 2, 1, 16)
    (out,) = flat(keys, tensors["pos"], fresh)
    assert torch.equal(keys, tensors["keys"])
    assert torch.equal(out[:, :, 5], fresh[:, :, 0])


def test_a_leftover_write_in_place_writes_its_input():
    outer = Outer()
    cache, pos = outer.input("cache", torch.zeros(2, 3, 5)), outer.input("pos", torch.tensor([4, 1]))
    new = outer.input("new", torch.randn(2, 3, 2))
    outer.call(D.kv_write_.default, cache, pos, new, dim=-1)
    double = outer.call(torch.ops.aten.mul.Tensor, cache, 2.0)
    flat = expand(outer.finish(double), outer.fakes, outer.mode)
    real, fresh = torch.zeros(2, 3, 5), torch.randn(2, 3, 2)
    (out,) = flat(real, torch.tensor([4, 1]), fresh)
    assert torch.equal(real[..., [4, 1]], fresh)
    assert torch.equal(out, real * 2)


def test_what_lowering_may_not_overwrite_is_an_internal_error():
    def reads_later(cache, pos, new):
        written = D.kv_write(cache, pos, new, dim=1)
        return written, cache + 1.0

    def writes_something_else(cache, pos, new):
        return (D.kv_write(cache + 0.5, pos, new, dim=1),)

    for function, message in ((reads_later, "reads it afterwards"), (writes_something_else, "is no kv_write into")):
        outer = Outer()
        nodes = [outer.input("cache", torch.zeros(2, 5)), outer.input("pos", torch.tensor([4])), outer.input("new", torch.ones(2, 1))]
        results = outer.region("write", function, *nodes, in_place={0: 0})
        with pytest.raises(DsiInternalError, match=message):
            expand(outer.finish(*results), outer.fakes, outer.mode)


def test_constants_of_the_graph_stay_constants():
    outer = Outer()
    x = outer.input("x", torch.randn(3, 5))
    table = outer.constant("table", torch.arange(5.0))
    flat = expand(outer.finish(outer.call(torch.ops.aten.add.Tensor, x, table)), outer.fakes, outer.mode)
    assert len(flat.graph.find_nodes(op="placeholder")) == 1
    real = torch.randn(3, 5)
    assert torch.equal(flat(real)[0], real + torch.arange(5.0))


def test_symbolic_batch_and_length():
    tensors = layer_inputs(3, 7, 29, 5)
    outer, gm = decode_layer(tensors, dynamic=(3, 7))
    flat = expand(gm, outer.fakes, outer.mode)
    for batch, length, position in ((3, 7, 5), (5, 2, 0), (2, 11, 18)):
        fresh = layer_inputs(batch, length, 29, position, seed=batch)
        expected = {name: value.clone() for name, value in fresh.items()}
        result = eager_layer(expected)
        (out,) = flat(*fresh.values())
        torch.testing.assert_close(out, result, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(fresh["keys"], expected["keys"], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------ attention


def attention_case(seed, batch, heads, kv_heads, queries, keys, size, value_size, mask, bias, dtype):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(shape, generator=generator) * 2).to(dtype)

    def coin(*shape):
        return torch.rand(shape, generator=generator) < 0.6

    masks = {
        None: None,
        "bool": coin(batch, 1, queries, keys),
        "bool2d": coin(queries, keys),
        "heads": coin(1, heads, queries, keys),
        "float": torch.where(coin(batch, 1, queries, keys), 0.0, float("-inf")).to(dtype),
        "min": torch.where(coin(batch, 1, queries, keys), 0.0, torch.finfo(dtype).min).to(dtype),
        "wide": normal(batch, 1, queries, keys).float(),
        "none_seen": torch.zeros(batch, 1, queries, keys, dtype=torch.bool),
    }
    biases = {None: None, "alibi": normal(1, heads, 1, keys), "full": normal(batch, heads, queries, keys)}
    q, k, v = normal(batch, heads, queries, size), normal(batch, kv_heads, keys, size), normal(batch, kv_heads, keys, value_size)
    return q, k, v, masks[mask], biases[bias]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    batch=st.sampled_from([1, 3]),
    heads=st.sampled_from([(4, 4), (6, 2), (5, 1)]),
    queries=st.sampled_from([1, 2, 7]),
    keys=st.sampled_from([1, 7, 13]),
    sizes=st.sampled_from([(8, 8), (5, 5), (8, 3)]),
    mask=st.sampled_from([None, "bool", "bool2d", "heads", "float", "min", "wide", "none_seen"]),
    bias=st.sampled_from([None, "alibi", "full"]),
    sinks=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([0, 3]),
    softcap=st.sampled_from([0.0, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_attention_means_the_same(seed, batch, heads, queries, keys, sizes, mask, bias, sinks, causal, window, softcap, dtype):
    q, k, v, mask, bias = attention_case(seed, batch, *heads, queries, keys, *sizes, mask, bias, dtype)
    options = {"scale": 0.3, "causal": causal, "window": window, "softcap": softcap}
    options["sinks"] = q[0, :, 0, 0] if sinks else None
    expected = ops.attention_reference(q, k, v, mask, bias, **options)
    got = expanding.attention(q, k, v, mask, bias, **options)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_runs_fused_with_its_keys_as_they_are(heads, mask):
    q, k, v, mask, _ = attention_case(0, 2, *heads, 1, 33, 16, 16, mask, None, torch.float32)
    outer = Outer()
    nodes = [outer.input(name, value) for name, value in (("q", q), ("k", k), ("v", v))]
    nodes += [outer.input("mask", mask)] if mask is not None else []
    (out,) = outer.region("attend", lambda *a: (D.attention(*a, scale=0.25),), *nodes, kind="attention")
    flat = expand(outer.finish(out), outer.fakes, outer.mode)
    fused = [node for node in flat.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(fused) == 1
    assert [fused[0].args[1], fused[0].args[2]] == flat.graph.find_nodes(op="placeholder")[1:3]


def test_grouped_attention_repeats_no_key():
    """Where the fused kernel does not apply (a soft cap), the keys are still read once, not once a query head."""
    q, k, v, _, _ = attention_case(0, 2, 6, 2, 1, 33, 16, 16, None, None, torch.float32)
    outer = Outer()
    nodes = [outer.input(name, value) for name, value in (("q", q), ("k", k), ("v", v))]
    (out,) = outer.region("attend", lambda *a: (D.attention(*a, scale=0.25, softcap=7.0),), *nodes, kind="attention")
    flat = expand(outer.finish(out), outer.fakes, outer.mode)
    made = [node for node in flat.graph.nodes if node.op == "call_function" and node.meta["val"].numel() >= k.numel()]
    views = {torch.ops.aten.view.default, torch.ops.aten.permute.default, torch.ops.aten.expand.default}
    assert made
    assert {node.target for node in made} <= views
    assert all(node.meta["val"].numel() == k.numel() for node in made)


def test_the_table_holds_semantic_operators_only():
    assert set(CPU_EXPANSIONS) <= set(ops.REGISTRY)
