"""The ten region rules: for each a graph in which it keeps something out of a region, and what becomes of that graph."""

from __future__ import annotations

import torch
from dsi.ir.spec import check_graph
from dsi.passes.fuse import fuse
from fuse.graphs import WIDTH, D, context, fused, heads, kinds, labels, members, name, outer, region_with, trace, weight

B, S = 2, 3


def x3() -> torch.Tensor:
    return torch.randn(B, S, WIDTH)


def reasons(ctx, rule):
    return [r for r in ctx.report.unfused if r.rule == rule]


# ------------------------------------------------------------------------------------------------------------------------ rule 1


def test_rule_1_a_view_that_cuts_a_dimension_ends_the_region():
    def f(x, w, bias):
        return torch.relu(D.linear(x, w).view(4, 96) + bias)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.randn(96))
    assert labels(ctx) == ["linear", "add + relu"]


def test_rule_1_a_view_that_regroups_dimensions_does_not():
    def f(x, w, bias):
        return torch.relu(D.linear(x, w).view(B * S, 4, 16) + bias)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.randn(16))
    assert labels(ctx) == ["linear + add + relu"]


def test_rule_1_rows_whose_number_is_a_quotient_are_not_cut():
    """Patches of images of any size: a division gives how many there are."""

    def f(x, first, w, bias):
        x = torch.cat([first, x[:, : x.shape[1] // 2]], 1)
        return x + torch.relu(D.linear(x, w).view(x.shape[0], -1, 4, 16) + bias).flatten(2)

    inputs = (torch.randn(B, 7, WIDTH), torch.randn(B, 1, WIDTH), weight(WIDTH, WIDTH), torch.randn(16))
    _, ctx = fused(f, *inputs, symbolic={0: (0, 1), 1: (0,)})
    assert [kind for kind in kinds(ctx) if kind != "row"] == ["linear"] and not reasons(ctx, "region rule 1")


# ------------------------------------------------------------------------------------------------------------------------ rule 2


def test_rule_2_linears_of_one_input_are_one_anchor():
    def f(x, q, k, v):
        return D.linear(x, q), D.linear(x, k), D.linear(x, v)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), weight(32, WIDTH), weight(32, WIDTH))
    assert labels(ctx) == ["3 linear"]


def test_rule_2_other_inputs_make_other_anchors():
    def f(x, y, q, k):
        return D.linear(x, q), D.linear(y, k)

    _, ctx = fused(f, x3(), x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear", "linear"]


def test_rule_2_a_path_between_linears_makes_two_anchors():
    def f(x, q, k):
        first = D.linear(x, q)
        return first, D.linear(x, k * first.amax())

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert [r.label for r in ctx.report.regions if r.kind == "linear"] == ["linear", "linear"]


def test_rule_2_the_same_view_of_one_input_counts_as_the_same_input():
    def f(x, q, k):
        return D.linear(x[:, -1], q), D.linear(x[:, -1], k), D.linear(x[:, 0], q)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert sorted(labels(ctx)) == ["2 linear", "linear"]


# ------------------------------------------------------------------------------------------------------------------------ rule 3


def test_rule_3_other_rows_and_columns_make_another_region():
    def f(x):
        y = torch.relu(x)
        return y, torch.tanh(y[:, :, :3])

    _, ctx = fused(f, x3())
    assert labels(ctx) == ["relu", "tanh"]


def test_rule_3_a_linear_of_which_some_rows_are_read_is_stored_whole():
    def f(x, g, w, v):
        y = D.linear(D.rms_norm(x, g, eps=1e-5), w)
        return D.linear(torch.relu(y[:, 1:]), v), y[:, 0]

    _, ctx = fused(f, x3(), torch.randn(WIDTH), weight(32, WIDTH), weight(WIDTH, 32))
    assert labels(ctx) == ["rms_norm + linear", "relu + linear"]
    assert not ctx.report.unfused


# ------------------------------------------------------------------------------------------------------------------------ rule 4


def test_rule_4_an_epilogue_looks_at_no_other_column():
    def f(x, w):
        return torch.cumsum(D.linear(x, w), -1) * 2

    gm, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear", "mul"] and outer(gm) == ["cumsum"]
    assert reasons(ctx, "region rule 4")[0].node == "cumsum"


def test_rule_4_rope_and_a_norm_of_each_head_stay_inside_a_held_group():
    def f(x, w, scale, cos, sin):
        return D.rope(D.rms_norm(heads(D.linear(x, w)), scale, eps=1e-6), cos, sin, style="half")

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.randn(16), torch.randn(S, 16), torch.randn(S, 16))
    assert labels(ctx) == ["linear + rms_norm + rope"]


# ------------------------------------------------------------------------------------------------------------------------ rule 5


def test_rule_5_a_norm_of_another_size_than_k_is_no_prologue():
    def f(x, scale, w):
        return D.linear(D.layer_norm(x.view(B, S, 2, 32), scale, None, eps=1e-5).view(B, S, WIDTH), w)

    _, ctx = fused(f, x3(), torch.randn(32), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["layer_norm", "linear"]


def test_rule_5_a_prologue_of_two_linears_is_computed_in_both():
    def f(x, scale, w, v):
        y = D.layer_norm(x, scale, None, eps=1e-5)
        first = torch.relu(D.linear(y, w))
        return D.linear(first, v) + D.linear(y, w.t() * first.amax())

    _, ctx = fused(f, x3(), torch.randn(WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert sum("layer_norm + linear" in label for label in labels(ctx)) == 2
    assert all(len(r.outputs) == 1 for r in ctx.report.regions if "layer_norm" in r.label)


# ------------------------------------------------------------------------------------------------------------------------ rule 6


def test_rule_6_a_norm_does_not_follow_its_linear():
    def f(x, w, scale):
        return D.layer_norm(D.linear(x, w) + x, scale, None, eps=1e-5)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.randn(WIDTH))
    assert labels(ctx) == ["linear + add", "layer_norm"]


def test_rule_6_nor_an_embedding_although_its_rows_are_whole():
    def f(table, ids, scale, w):
        return D.linear(D.layer_norm(D.embedding(table, ids) * 2, scale, None, eps=1e-5), w)

    _, ctx = fused(f, torch.randn(7, WIDTH), torch.tensor([[1, 6, 0]]), torch.randn(WIDTH), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["embedding + mul", "layer_norm + linear"]


# ------------------------------------------------------------------------------------------------------------------------ rule 7


def test_rule_7_no_second_contraction():
    def f(x, up, down):
        return D.linear(D.activation(D.linear(x, up), "silu"), down) + x

    _, ctx = fused(f, x3(), weight(96, WIDTH), weight(WIDTH, 96))
    assert labels(ctx) == ["linear + silu", "linear + add"]


# ------------------------------------------------------------------------------------------------------------------------ rule 8


def test_rule_8_what_would_make_a_circle_stays_out():
    def f(x, w):
        y = D.linear(x, w)
        return torch.relu(y) + torch.cumsum(y, -1)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear + relu", "add"]


def test_rule_8_what_else_is_read_outside_becomes_an_output():
    def f(x, w):
        y = D.linear(x, w)
        z = torch.relu(y)
        return y, z, z + 1

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear + relu + add"] and len(ctx.report.regions[0].outputs) == 3


def test_rule_8_an_escaping_prologue_is_stored_by_the_first_that_reads_it():
    def f(h, y, scale, w, v):
        h = h + torch.cumsum(y, 1)
        first = D.linear(D.rms_norm(h, scale, eps=1e-6), w)
        return D.linear(torch.cumsum(first, -1), v) + h

    _, ctx = fused(f, x3(), x3(), torch.randn(WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["add + rms_norm + linear", "linear + add"]
    assert [o.name for o in ctx.report.regions[0].outputs] == ["add", "linear"]


def test_rule_8_parts_of_a_linear_are_stored_without_the_rest():
    def f(x, w, cache, pos):
        q, k = D.linear(x, w).split(WIDTH, -1)
        return D.attention(heads(q), *[D.kv_write(cache, pos, heads(k), dim=2)] * 2, scale=0.25)

    _, ctx = fused(f, x3(), weight(2 * WIDTH, WIDTH), torch.randn(B, 4, 7, 16), torch.tensor([1, 6, 3]))
    assert labels(ctx) == ["linear + kv_write", "attention"]
    assert sorted(tuple(o.meta["val"].shape) for o in ctx.report.regions[0].outputs) == [(B, S, WIDTH), (B, 4, 7, 16)]


# ------------------------------------------------------------------------------------------------------------------------ rule 9


def test_rule_9_nothing_reads_a_written_cache_in_the_region_that_writes():
    def f(x, w, cache, pos):
        return D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2) * 2

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), torch.randn(B, 4, 7, 16), torch.tensor([1, 6, 3]))
    assert labels(ctx) == ["linear + kv_write", "mul"]


# ----------------------------------------------------------------------------------------------------------------------- rule 10


def test_rule_10_an_all_reduce_cuts():
    def f(x, h, w, bias, scale, v):
        h = h + (D.all_reduce(D.linear(x, w), "group") + bias)
        first = D.linear(D.rms_norm(h, scale, eps=1e-6), v)
        return D.all_reduce(D.linear(first, w), "group") + h

    gm = trace(f, x3(), x3(), weight(WIDTH, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH), weight(WIDTH, WIDTH))
    ctx = context()
    fuse(gm, ctx)
    check_graph(gm, "regions")
    assert outer(gm) == ["all_reduce", "all_reduce"]
    # What follows an all-reduce belongs to the next linear, or to nobody where there is none.
    assert labels(ctx) == ["linear", "add + rms_norm + linear", "linear", "add"]
    assert not any("all_reduce" in members(r) for r in ctx.report.regions)
    assert [r.reason for r in reasons(ctx, "fuse")] == [
        "dsi.all_reduce.default stays an ATen operator: an all-reduce is never inside a region"
    ] * 2


def test_rule_10_between_two_anchors_the_producer_comes_first():
    def f(x, w, v):
        return D.linear(torch.tanh(D.linear(x, w) * 2), v)

    _, ctx = fused(f, x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear + mul + tanh", "linear"]
    roles = region_with(ctx, "tanh").roles
    assert set(roles.values()) == {"anchor", "epilogue"} and "linear" in roles


def test_the_later_of_two_producers_takes_what_both_could():
    def f(x, y, w, v):
        return D.linear(x, w) + D.linear(y, v)

    gm, ctx = fused(f, x3(), x3(), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH))
    assert labels(ctx) == ["linear", "linear + add"]
    assert [name(n) for n in gm.graph.nodes if n.op == "call_module"] == ["region_000_linear", "region_001_linear"]
