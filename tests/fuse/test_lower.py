"""KV writes: in place exactly where nobody can tell the difference."""

from __future__ import annotations

import copy

import pytest
import torch
from dsi.ir import ops
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.fuse import fuse, unfuse
from dsi.passes.lower import lower
from fuse.capture import Capture
from fuse.graphs import WIDTH, D, assert_equal, context, heads, trace, weight

B, S, L = 2, 3, 11


def _inputs():
    return torch.randn(B, S, WIDTH), weight(WIDTH, WIDTH), torch.randn(B, 4, L, 16), torch.tensor([4, 6, 5])


def lowered(function, *inputs, fuel=None):
    """`function` fused and lowered: the outer graph, its context; checked against the function wherever it is run functionally again."""
    gm = trace(function, *inputs)
    aliases = output_aliases(gm)
    ctx = context(fuel)
    fuse(gm, ctx)
    lower(gm, ctx)
    check_graph(gm, "lowered", aliases=aliases)
    flat = copy.deepcopy(gm)
    unfuse(flat)
    check_graph(flat, "aten")
    assert_equal(function, flat, inputs)
    return gm, ctx


def run_in_place(gm):
    """`gm` as an executor runs it that gives a region's output the memory of the input that it may overwrite."""

    def run(*inputs):
        values, feed = {}, iter(inputs)
        for node in gm.graph.nodes:
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                region = node.meta["region"]
                results = list(region.body(*args))
                for output, number in region.in_place.items():
                    results[output] = args[number].copy_(results[output])
                values[node] = tuple(results)
            else:
                values[node] = node.target(*args, **torch.fx.node.map_arg(node.kwargs, values.__getitem__))

    return run


def in_place(ctx):
    return [(r.outputs[o].name, r.inputs[i].name) for r in ctx.report.regions for o, i in r.in_place.items()]


def copies(gm):
    return [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default]


def test_write_back_to_an_input_is_in_place():
    def f(x, w, cache, pos):
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        result = D.attention(heads(x), new, new, scale=0.25)
        cache.copy_(new)
        return result

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [("kv_write", "cache_1")]
    assert not copies(gm) and not ctx.report.notes
    assert_equal(f, run_in_place(gm), _inputs())
    assert all(r.spec is not None and r.spec.name == r.name for r in ctx.report.regions)


def test_a_cache_with_gaps_is_not_written_in_place():
    """A part of a longer cache. The new value has no gaps, and who reads it was made for its strides."""

    def f(x, w, cache, pos):
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        result = D.attention(heads(x), new, new, scale=0.25)
        cache.copy_(new)
        return result

    x, w, _, pos = _inputs()
    gm, ctx = lowered(f, x, w, torch.randn(B, 4, L + 5, 16)[:, :, 2 : L + 2], pos)
    assert in_place(ctx) == [] and len(copies(gm)) == 1
    assert ctx.report.notes[0].endswith(f"cache_1 lies in memory with gaps (strides {[4 * (L + 5) * 16, (L + 5) * 16, 16, 1]})")


def test_no_fuel_leaves_the_copy():
    def f(x, w, cache, pos):
        cache.copy_(D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2))
        return x + 1

    gm = trace(f, *_inputs())
    regions = context()
    fuse(gm, regions)
    gm, ctx = lowered(f, *_inputs(), fuel=len(regions.report.regions))
    assert in_place(ctx) == [] and len(copies(gm)) == 1 and "fuel" in ctx.report.notes[0]


def test_write_outside_regions_is_in_place():
    def f(x, cache, pos):
        new = D.kv_write(cache, pos, torch.cumsum(x, 2), dim=2)
        cache.copy_(new)
        return torch.cumsum(new, 1)

    inputs = torch.randn(B, 4, S, 16), torch.randn(B, 4, L, 16), torch.tensor([4, 6, 5])
    gm = trace(f, *inputs)
    ctx = context(fuel=0)
    fuse(gm, ctx)
    ctx = context()
    lower(gm, ctx)
    check_graph(gm, "lowered")
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"].count(ops.kv_write_) == 1
    assert not copies(gm) and not ctx.report.notes
    assert_equal(f, gm, inputs)


def test_reader_of_the_old_cache_afterwards():
    def f(x, w, cache, pos):
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        result = D.attention(D.attention(heads(x), new, new, scale=0.25), cache, cache, scale=0.25)
        cache.copy_(new)
        return result

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and len(copies(gm)) == 1
    assert "after" in ctx.report.notes[0]


def test_reader_of_the_old_cache_before_is_no_hindrance():
    def f(x, w, cache, pos):
        old = D.attention(heads(x), cache, cache, scale=0.25)
        new = D.kv_write(cache, pos, heads(D.linear(old.transpose(1, 2).reshape(B, S, WIDTH), w)), dim=2)
        cache.copy_(new)
        return D.attention(heads(x), new, new, scale=0.25)

    gm, ctx = lowered(f, *_inputs())
    assert len(in_place(ctx)) == 1 and not copies(gm)
    assert_equal(f, run_in_place(gm), _inputs())


def test_view_of_the_old_cache_read_afterwards():
    def f(x, w, cache, pos):
        early = cache[:, :, :S]
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        result = D.attention(D.attention(heads(x), new, new, scale=0.25), early, early, scale=0.25)
        cache.copy_(new)
        return result

    _, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and ctx.report.notes


@pytest.mark.parametrize("view", [False, True])
def test_new_value_returned_as_a_tensor_of_its_own(view):
    def f(x, w, cache, pos):
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        cache.copy_(new)
        return new[:, :, :S] if view else new

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and len(copies(gm)) == 1
    assert "returned" in ctx.report.notes[0]


@pytest.mark.parametrize("fuel", [None, 0])
def test_writer_that_reads_the_cache_itself(fuel):
    def f(cache, pos):
        # Rows move within the cache: written in place, a row could be read after it has been replaced.
        cache.copy_(D.kv_write(cache, pos, cache[:, :, :S], dim=2))
        return pos + 1

    inputs = torch.randn(B, 4, L, 16), torch.tensor([1, 2, 0])
    gm, ctx = lowered(f, *inputs, fuel=fuel)
    assert in_place(ctx) == [] and len(copies(gm)) == 1
    assert "otherwise" in ctx.report.notes[0]
    assert_equal(f, run_in_place(gm), inputs)


def test_writer_that_is_given_a_view_of_the_cache():
    def f(x, w, cache, pos):
        early = torch.as_strided(cache, (B, 4, S, 16), (4 * L * 16, L * 16, 16, 1))  # no plan can take this view in
        cache.copy_(D.kv_write(cache, pos, heads(D.linear(x, w)) + early, dim=2))
        return pos + 1

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and len(copies(gm)) == 1
    assert_equal(f, run_in_place(gm), _inputs())


def test_two_writes_one_after_the_other():
    def f(x, w, cache, pos):
        first = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        a = D.attention(heads(x), first, first, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH)
        second = D.kv_write(first, pos + 1, heads(D.linear(a, w)), dim=2)
        cache.copy_(second)
        return D.attention(heads(a), second, second, scale=0.25)

    gm, ctx = lowered(f, *_inputs())
    assert len(in_place(ctx)) == 2 and not copies(gm)
    assert_equal(f, run_in_place(gm), _inputs())


def test_two_writes_of_one_cache_side_by_side():
    def f(x, w, cache, pos):
        one = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        other = D.kv_write(cache, pos + 1, heads(D.linear(x, w)), dim=2)
        cache.copy_(one)
        return D.attention(heads(x), one, other, scale=0.25)

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and len(copies(gm)) == 1 and len(ctx.report.notes) == 2


def test_first_state_read_after_the_second_write():
    def f(x, w, cache, pos):
        first = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        a = D.attention(heads(x), first, first, scale=0.25).transpose(1, 2).reshape(B, S, WIDTH)
        second = D.kv_write(first, pos + 1, heads(D.linear(a, w)), dim=2)
        b = D.attention(heads(a), second, second, scale=0.25)
        cache.copy_(second)
        return D.attention(b, first, first, scale=0.25)

    _, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and ctx.report.notes


def test_cache_written_back_to_another_input():
    def f(x, w, cache, other, pos):
        other.copy_(D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2))
        return x * 2

    x, w, cache, pos = _inputs()
    gm, ctx = lowered(f, x, w, cache, torch.zeros_like(cache), pos)
    assert in_place(ctx) == [] and len(copies(gm)) == 1 and ctx.report.notes


def test_cache_that_is_never_written_back():
    def f(x, w, cache, pos):
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        return D.attention(heads(x), new, new, scale=0.25)

    _, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [] and "copies the whole cache" in ctx.report.notes[0]


@pytest.mark.parametrize("like", [False, True])
def test_cache_that_the_graph_makes(like):
    def f(x, w, model, pos):
        cache = torch.zeros_like(model) if like else torch.zeros(B, 4, L, 16)
        new = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        return new, D.attention(heads(x), new[:, :, :S], new[:, :, :S], scale=0.25)

    gm, ctx = lowered(f, *_inputs())
    assert in_place(ctx) == [("kv_write", "zeros_like" if like else "zeros")] and not ctx.report.notes
    assert_equal(f, run_in_place(gm), _inputs())


def test_cache_that_the_graph_makes_and_reads_otherwise():
    def f(x, w, pos):
        cache = torch.zeros(B, 4, L, 16)
        k = D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2)
        return k, D.kv_write(cache, pos + 1, heads(D.linear(x, w)), dim=2)

    x, w, _, pos = _inputs()
    gm, ctx = lowered(f, x, w, pos)
    assert in_place(ctx) == [] and len(ctx.report.notes) == 2
    assert_equal(f, run_in_place(gm), (x, w, pos))


def test_result_of_the_copy_is_the_cache():
    def f(x, w, cache, pos):
        return cache.copy_(D.kv_write(cache, pos, heads(D.linear(x, w)), dim=2))

    gm, ctx = lowered(f, *_inputs())
    (output,) = gm.graph.find_nodes(op="output")
    assert len(in_place(ctx)) == 1 and output.args[0].op == "placeholder"
    assert_equal(f, run_in_place(gm), _inputs())


# ------------------------------------------------------------------------------------------------- what AOTAutograd says of outputs


class Cached(torch.nn.Module):
    """Writes rows into a cache that it is given, and returns what `returned` makes of the cache."""

    def __init__(self, returned):
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, WIDTH)
        self.returned = returned

    def forward(self, x, cache, pos):
        cache.index_copy_(2, pos, heads(self.project(x)))
        return torch.nn.functional.scaled_dot_product_attention(heads(x), cache, cache), self.returned(cache)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(lambda cache: cache, 1), (lambda cache: cache[:, :, :S], 1), (lambda cache: cache + 1, 1), (lambda cache: cache.clone(), 1)],
    ids=["itself", "view", "value", "copy"],
)
def test_returned_cache(returned, expected):
    x, _, cache, pos = _inputs()
    module = Cached(returned).eval()
    mine, theirs = cache.clone(), cache.clone()
    capture = Capture()
    with torch.no_grad():
        wanted = module(x, mine, pos)
        got = torch.compile(module, backend=capture, fullgraph=True)(x, theirs, pos)
    assert len(in_place(capture.context)) == expected
    torch.testing.assert_close(theirs, mine)
    torch.testing.assert_close(got, wanted)
    assert (got[1].untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()) == (
        wanted[1].untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    )
