"""The outer graph: views, outputs, order, sizes, fuel, reports, and the way back."""

from __future__ import annotations

import time

import pytest
import torch
from dsi.ir import analysis, ops
from dsi.ir.spec import check_graph
from dsi.passes.fuse import fuse, unfuse
from fuse.graphs import HEADS, WIDTH, D, assert_equal, assert_plans, context, fused, heads, kinds, labels, name, outer, trace, weight

B, S = 2, 3


def x3() -> torch.Tensor:
    return torch.randn(B, S, WIDTH)


def test_views_between_regions_are_taken_in_by_the_reader():
    def f(x, w, v):
        return D.linear(D.attention(*[heads(D.linear(x, w))] * 3, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH), v)

    gm, ctx = fused(f, x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert kinds(ctx) == ["linear", "attention", "linear"] and outer(gm) == []
    assert not any("view" in str(o.target) or "transpose" in str(o.target) for r in ctx.report.regions for o in r.outputs)


def test_a_returned_view_is_made_outside_and_aliases_nothing_else():
    def f(x, w):
        y = D.linear(x, w)
        return y, y.view(B * S, WIDTH), heads(y)[:, 1:]

    gm, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert len(ctx.report.regions[0].outputs) == 1
    assert outer(gm) == ["view", "view", "transpose", "slice"]


def test_a_value_whose_parts_are_read_is_stored_in_parts_with_dense_strides():
    def f(x, w):
        y = heads(D.linear(x, w))
        return torch.cumsum(y[:, :1], -1), torch.cumsum(y[:, 2:3].view(B, S, 16), -1)

    gm, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    (region,) = ctx.report.regions
    assert [tuple(o.meta["val"].shape) for o in region.outputs] == [(B, 1, S, 16), (B, 1, S, 16)]
    assert all(o.meta["val"].is_contiguous() for o in region.outputs)
    assert not any("slice" in n for n in outer(gm))


def test_a_value_whose_parts_are_all_read_is_stored_whole():
    def f(x, w):
        y = D.linear(x, w)
        return torch.cumsum(y[..., :30], -1), torch.cumsum(y[..., 30:], -1)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert [o.target for r in ctx.report.regions for o in r.outputs] == [ops.linear]


def test_a_view_that_no_plan_can_take_in_stays_outside():
    def f(x, w):
        return torch.relu(D.linear(torch.as_strided(x, (S, WIDTH), (WIDTH, 1), 5), w))

    gm, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear + relu"] and outer(gm) == ["as_strided"]


def test_embeddings_that_are_added_are_one_region():
    def f(table, positions, kinds_, ids, w):
        h = D.embedding(table, ids) + D.embedding(positions, torch.arange(ids.shape[1])[None] + 2)
        return D.linear(D.layer_norm(h + D.embedding(kinds_, torch.zeros_like(ids)), None, None, eps=1e-5), w)

    tables = torch.randn(11, WIDTH), torch.randn(9, WIDTH), torch.randn(2, WIDTH)
    gm, ctx = fused(f, *tables, torch.randint(0, 11, (B, S)), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["3 embedding + add", "layer_norm + linear"]
    assert outer(gm) == []


def test_length_counters_of_all_layers_are_one_region():
    def f(*counters):
        for counter in counters:
            counter.copy_(counter + 3)
        return counters[0] * 1.5

    gm = trace(lambda *c: [n + 3 for n in c], *[torch.tensor(i) for i in range(5)])
    ctx = context()
    fuse(gm, ctx)
    assert labels(ctx) == ["add"] and len(ctx.report.regions[0].outputs) == 5
    _, ctx = fused(f, *[torch.tensor(i) for i in range(5)])
    assert labels(ctx) == ["add", "mul"]


def test_positions_are_computed_where_they_are_used():
    def f(past, frequencies):
        p = torch.arange(S) + past
        angle = p[:, None].float() * frequencies
        return angle.cos(), angle.sin(), torch.arange(9)[None] <= p[:, None]

    _, ctx = fused(f, torch.tensor(4), torch.rand(8))
    assert sorted(labels(ctx)) == ["arange + add + _to_copy + mul + cos + sin", "arange + add + le"]


def test_what_many_read_is_computed_once():
    def f(x, w, mask):
        added = torch.where(mask, 0.0, -1e9)
        for _ in range(3):
            x = D.attention(*[heads(D.linear(x, w))] * 3, added, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH)
        return x

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.rand(B, 1, S, S) > 0.2)
    assert kinds(ctx).count("row") == 1 and not any("where" in label and "attention" in label for label in labels(ctx))


def test_order_of_effects_is_kept():
    def f(x, w, state):
        before = D.linear(state, w)
        state.copy_(torch.relu(D.linear(x, w)))
        return before + torch.tanh(state)

    gm, _ = fused(f, x3(), weight(WIDTH, WIDTH), x3())
    names = [name(n) for n in gm.graph.nodes]
    assert names.index("copy_") < len(names) - 2


@pytest.mark.parametrize(("batch", "length"), [(True, False), (False, True), (True, True)])
def test_symbolic_sizes(batch, length):
    def f(x, w, up, down, scale, frequencies, cache, values, past):
        pos = torch.arange(x.shape[1]) + past
        angles = pos[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        y = D.rms_norm(x, scale, eps=1e-6)
        q, k, v = heads(D.linear(y, w)), heads(D.linear(y, w)), heads(D.linear(y, w))
        keys = D.kv_write(cache, pos, D.rope(k, cos, sin, style="half"), dim=2)
        y = D.attention(D.rope(q, cos, sin, style="half"), keys, D.kv_write(values, pos, v, dim=2), scale=0.25)
        x = D.linear(y.transpose(1, 2).reshape(x.shape), w) + x
        y = D.rms_norm(x, scale, eps=1e-6)
        return D.linear(D.gated(D.linear(y, up), D.linear(y, up), "silu"), down) + x

    def inputs(b, s):
        weights = weight(WIDTH, WIDTH), weight(96, WIDTH), weight(WIDTH, 96), torch.rand(WIDTH)
        caches = torch.randn(b, HEADS, 13, 16), torch.randn(b, HEADS, 13, 16)
        return torch.randn(b, s, WIDTH), *weights, torch.rand(16), *caches, torch.tensor(2)

    b = (0,) if batch else ()
    gm, ctx = fused(f, *inputs(3, 5), symbolic={0: b + ((1,) if length else ()), 6: b, 7: b})
    assert [k for k in kinds(ctx) if k != "row"] == ["linear", "attention", "linear", "linear", "linear"]
    assert "rms_norm + 3 linear + rope + kv_write" in labels(ctx) and outer(gm) == ["sym_size"] * (batch + length)
    other = inputs(4 if batch else 3, 7 if length else 5)
    assert_equal(f, gm, other)
    assert_plans(gm, other)


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 99])
def test_fuel(fuel):
    def f(x, up, down, scale):
        y = D.rms_norm(x, scale, eps=1e-6)
        return D.linear(D.gated(D.linear(y, up), D.linear(y, up * 2), "silu"), down) + x

    inputs = x3(), weight(96, WIDTH), weight(WIDTH, 96), torch.rand(WIDTH)
    gm = trace(f, *inputs)
    ctx = context(fuel)
    fuse(gm, ctx)
    check_graph(gm, "regions")
    assert len(ctx.report.regions) == min(fuel, 3)
    assert ("fuel" in " ".join(r.reason for r in ctx.report.unfused)) == (fuel < 3)
    assert all(entry.startswith("fuse ") for entry in ctx.fuel.log)
    assert_equal(f, gm, inputs)


def test_unfuse_gives_back_the_operators_and_their_meta():
    def f(x, w, scale):
        return torch.relu(D.linear(D.rms_norm(x, scale, eps=1e-6), w)) + 1

    gm = trace(f, x3(), weight(WIDTH, WIDTH), torch.rand(WIDTH))
    before = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    for node in gm.graph.nodes:
        node.meta["dsi_provenance"] = ("a rule", node.name)
    fuse(gm, context())
    unfuse(gm)
    found = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.target for n in found] == before
    assert {n.meta["dsi_region"] for n in found} == {"region_000_linear"} and all(n.meta["dsi_provenance"][0] == "a rule" for n in found)
    assert not list(gm.children())


def test_every_leftover_is_reported_with_a_reason():
    def f(x, w):
        values, places = torch.topk(torch.cumsum(D.linear(x, w), -1), 3)
        return values + 1, places, torch.bernoulli(torch.sigmoid(values))

    gm, ctx = fused_without_running(f, x3(), weight(WIDTH, WIDTH))
    assert set(outer(gm)) == {"cumsum", "topk", "bernoulli"}
    reported = {r.node: r.reason for r in ctx.report.unfused}
    assert set(reported) == {"cumsum", "bernoulli"} | ({"topk"} & set(reported))
    assert "random" in reported["bernoulli"]


def fused_without_running(function, *inputs):
    gm = trace(function, *inputs)
    ctx = context()
    fuse(gm, ctx)
    check_graph(gm, "regions")
    return gm, ctx


def test_equal_layers_are_planned_once(monkeypatch):
    calls = []
    plan = analysis.plan_region
    monkeypatch.setattr(analysis, "plan_region", lambda body: calls.append(body) or plan(body))

    def model(layers):
        def f(x, scale, qkv, w, up, down):
            for _ in range(layers):
                y = D.rms_norm(x, scale, eps=1e-6)
                x = x + D.linear(D.attention(*[heads(D.linear(y, qkv))] * 3, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH), w)
                y = D.rms_norm(x, scale, eps=1e-6)
                x = x + D.linear(D.gated(D.linear(y, up), D.linear(y, up), "silu"), down)
            return x

        return f

    inputs = x3(), torch.rand(WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(96, WIDTH), weight(WIDTH, 96)
    counts, times = [], []
    for layers in (4, 24):
        gm = trace(model(layers), *inputs)
        calls.clear()
        ctx = context()
        start = time.process_time()
        fuse(gm, ctx)
        times.append(time.process_time() - start)
        counts.append(len(calls))
        assert len(ctx.report.regions) == 5 * layers
    assert counts[0] == counts[1]
    assert times[1] < 5


def test_a_size_asked_of_an_inner_value_does_not_make_it_leave():
    def f(x, w):
        return torch.relu(D.linear(x, w)).view(x.shape[0], -1)

    inputs = x3(), weight(WIDTH, WIDTH)
    gm = trace(f, *inputs, symbolic={0: (0,)})
    (linear,) = gm.graph.find_nodes(op="call_function", target=ops.linear)
    (size,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    (view,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    with gm.graph.inserting_before(view):
        asked = gm.graph.call_function(torch.ops.aten.sym_size.int, (linear, 0))
    asked.meta["val"] = size.meta["val"]
    view.args = (view.args[0], [asked, *view.args[1][1:]])
    ctx = context()
    fuse(gm, ctx)
    check_graph(gm, "regions")
    assert labels(ctx) == ["linear + relu"] and len(ctx.report.regions[0].outputs) == 1
    assert_equal(f, gm, inputs)


def test_spelled_out_defaults_make_no_other_kernel():
    def f(x, w):
        y = D.attention(*[heads(D.linear(x, w))] * 3, None, None, scale=0.25, causal=False, window=0, softcap=0.0)
        y = D.linear(y.transpose(1, 2).reshape(B, S, WIDTH), w, None, kn=False)
        return D.linear(D.attention(*[heads(D.linear(y, w))] * 3, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH), w)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear", "attention + clone", "linear"] * 2
    assert len({r.key for r in ctx.report.regions if r.kind == "attention"}) == 1
