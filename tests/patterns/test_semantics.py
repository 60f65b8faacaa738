"""The eight semantics of matching (`dsi.patterns`), each with what it allows and what it refuses."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
from dsi.ir.context import Context
from dsi.ir.spec import check_graph
from dsi.patterns.engine import apply_rules
from dsi.patterns.rule import Rule
from dsi.patterns.rules import RmsNorm, Silu
from rule_graphs import SiluTanh, faked, rewritten
from torch import fx

aten = torch.ops.aten
X = torch.randn(2, 3, 5)


class ScaledSum(Rule):
    """2 * (a + b), where a and b are tensors."""

    dims = {"a": "...", "b": "..."}

    def pattern(self, op, a, b):
        return (a + b) * 2

    def rewrite(self, dsi, m):
        return dsi.aten.add(dsi.aten.mul(m.a, 2), dsi.aten.mul(m.b, 2))


def test_a_match_is_replaced_and_counted():
    gm, context, hits = rewritten(SiluTanh, lambda x: torch.nn.functional.silu(x.tanh()) + 1, X)
    assert hits == context.report.hits["silu_tanh"] == 1
    assert aten_graphs.targets(gm) == ["dsi.activation.default", "dsi.activation.default", "aten.add.Tensor"]


# ------------------------------------------------------------------------------------------------------------------ 1. escapes


def test_an_intermediate_that_is_read_outside_refuses_and_names_the_reader():
    def fn(x):
        inner = x.tanh()
        return torch.nn.functional.silu(inner), inner.cos()

    _, context, hits = rewritten(SiluTanh, fn, X)
    assert hits == 0
    assert "tanh is also read by cos" in context.report.misses["silu_tanh"].reason


def test_an_intermediate_that_the_graph_returns_refuses():
    def fn(x):
        inner = x.tanh()
        return torch.nn.functional.silu(inner), inner

    assert rewritten(SiluTanh, fn, X)[2] == 0


class BothOutputs(Rule):
    dims = {"x": "..."}

    def pattern(self, op, x):
        inner = op.tanh(x)
        return op.silu(inner), inner

    def rewrite(self, dsi, m):
        inner = dsi.activation(m.x, "tanh")
        return dsi.activation(inner, "silu"), inner


def test_a_returned_value_may_be_read_outside():
    def fn(x):
        inner = x.tanh()
        return torch.nn.functional.silu(inner), inner.cos()

    gm, _, hits = rewritten(BothOutputs, fn, X)
    assert hits == 1
    assert "aten.tanh.default" not in aten_graphs.targets(gm)


class SinAndCos(Rule):
    """Two outputs of which neither contains the other."""

    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.sin(x), op.cos(x)

    def rewrite(self, dsi, m):
        return dsi.aten.neg(dsi.aten.neg(dsi.aten.sin(m.x))), dsi.aten.neg(dsi.aten.neg(dsi.aten.cos(m.x)))


def test_outputs_side_by_side_are_found_through_their_input():
    gm, _, hits = rewritten(SinAndCos, lambda x: x.cos() * x.sin(), X)
    assert hits == 1
    assert aten_graphs.targets(gm).count("aten.neg.default") == 4


# ---------------------------------------------------------------------------------------------------------------- 2. convexity


class SumOfBoth(Rule):
    dims = {"x": "...", "y": "..."}

    def pattern(self, op, x, y):
        inner = op.tanh(x)
        return op.silu(inner) + y, inner

    def rewrite(self, dsi, m):
        inner = dsi.activation(m.x, "tanh")
        return dsi.aten.add(dsi.activation(inner, "silu"), m.y), inner


def test_a_path_that_leaves_the_match_and_comes_back_refuses():
    def fn(x):
        inner = x.tanh()
        return torch.nn.functional.silu(inner) + inner.cos()

    _, context, hits = rewritten(SumOfBoth, fn, X)
    assert hits == 0
    assert "not be convex" in context.report.misses["sum_of_both"].reason


def test_the_same_shape_without_the_path_matches():
    assert rewritten(SumOfBoth, lambda x: torch.nn.functional.silu(x.tanh()) + x.cos(), X)[2] == 1


# ------------------------------------------------------------------------------------------------------------------ 3. effects


def graph_with(between: bool) -> tuple[fx.GraphModule, Context]:
    """y = silu(tanh(x)), with a `copy_` into another input between the two or before both."""
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    if not between:
        graph.call_function(aten.copy_.default, (other, x))
    inner = graph.call_function(aten.tanh.default, (x,))
    if between:
        graph.call_function(aten.copy_.default, (other, x))
    graph.output(graph.call_function(aten.silu.default, (inner,)))
    return faked(graph, X, X.clone())


@pytest.mark.parametrize("between", [False, True])
def test_a_match_spans_no_mutation(between: bool):
    gm, context = graph_with(between)
    assert apply_rules(gm, (SiluTanh,), context)["silu_tanh"] == (not between)
    if between:
        assert "copy_" in context.report.misses["silu_tanh"].reason


def test_a_match_spans_no_all_reduce():
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    inner = graph.call_function(aten.tanh.default, (x,))
    reduced = graph.call_function(torch.ops.dsi.all_reduce.default, (other, "world"))
    graph.output((graph.call_function(aten.silu.default, (inner,)), reduced))
    gm, context = faked(graph, X, X)
    assert not apply_rules(gm, (SiluTanh,), context)
    assert "all_reduce" in context.report.misses["silu_tanh"].reason


class WriteBack(Rule):
    """A rule that has the mutation itself."""

    def pattern(self, op, x, cache):
        return op.copy_(cache, op.tanh(x))

    def rewrite(self, dsi, m):
        return dsi.aten.copy_(m.cache, dsi.activation(m.x, "tanh"))


def test_a_rule_that_contains_the_mutation_may_match_it():
    graph = fx.Graph()
    x, cache = graph.placeholder("x"), graph.placeholder("cache")
    graph.output(graph.call_function(aten.copy_.default, (cache, graph.call_function(aten.tanh.default, (x,)))))
    gm, context = faked(graph, X, X.clone())
    assert apply_rules(gm, (WriteBack,), context)["write_back"] == 1
    cache = torch.zeros_like(X)
    gm(X, cache)
    torch.testing.assert_close(cache, X.tanh())


# ----------------------------------------------------------------------------------------------------------------- 4. literals


@pytest.mark.parametrize(
    ("fn", "hits"),
    [
        (lambda a, b: (a + b) * 2, 1),
        (lambda a, b: (a + b) * 2.0, 1),
        (lambda a, b: 2 * (b + a), 1),
        (lambda a, b: (a + b) * 3, 0),
        (lambda a, b: (a + b) * a, 0),
    ],
)
def test_a_constant_is_that_number_in_either_order(fn, hits):
    assert rewritten(ScaledSum, fn, X, X + 1)[2] == hits


class LastMean(Rule):
    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.mean(x, [-1], True)

    def rewrite(self, dsi, m):
        return dsi.aten.mean(m.x, [-1], True)


@pytest.mark.parametrize(
    ("fn", "hits"),
    [
        (lambda x: x.mean(-1, keepdim=True), 1),
        (lambda x: x.mean(2, keepdim=True), 1),
        (lambda x: x.mean(1, keepdim=True), 0),
        (lambda x: x.mean((1, 2), keepdim=True), 0),
        (lambda x: x.mean(-1), 0),
        (lambda x: x.mean(-1, keepdim=True, dtype=torch.float64), 0),
    ],
)
def test_dimensions_are_compared_from_either_end(fn, hits):
    assert rewritten(LastMean, fn, X)[2] == hits


class Twice(Rule):
    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.tanh(x) * x

    def rewrite(self, dsi, m):
        return dsi.aten.mul(dsi.activation(m.x, "tanh"), m.x)


def test_a_parameter_that_occurs_twice_is_one_node():
    assert rewritten(Twice, lambda x, y: x * x.tanh(), X, X)[2] == 1
    _, context, hits = rewritten(Twice, lambda x, y: y * x.tanh(), X, X + 1)
    assert hits == 0
    assert "elsewhere" in context.report.misses["twice"].reason


@pytest.mark.parametrize(
    ("fn", "hits"),
    [
        (lambda x: (x == 0).float() * (x == 0).float().tanh(), 1),
        (lambda x: (x == 0).float() * (x == 1).float().tanh(), 0),
        (lambda x: (x == 0).float() * (x.sin() == 0).float().tanh(), 0),
    ],
)
def test_a_parameter_that_occurs_twice_may_be_computed_twice(fn, hits):
    assert rewritten(Twice, fn, X)[2] == hits


def test_two_random_values_are_not_one():
    gm, context = aten_graphs.traced(lambda x: torch.rand_like(x) * torch.rand_like(x).tanh(), X)
    assert not apply_rules(gm, (Twice,), context)


def test_what_is_written_between_is_another_value():
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    before = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.copy_.default, (x, other))
    after = graph.call_function(aten.sin.default, (x,))
    graph.output(graph.call_function(aten.mul.Tensor, (before, graph.call_function(aten.tanh.default, (after,)))))
    gm, context = faked(graph, X, X.clone())
    assert not apply_rules(gm, (Twice,), context)


# ---------------------------------------------------------------------------------------------------------------- 5. arguments


def test_an_argument_that_the_pattern_does_not_mention_must_have_its_default():
    _, context, hits = rewritten(ScaledSum, lambda a, b: torch.add(a, b, alpha=2) * 2, X, X)
    assert hits == 0
    assert "argument alpha" in context.report.misses["scaled_sum"].reason
    assert rewritten(ScaledSum, lambda a, b: torch.add(a, b, alpha=1) * 2, X, X)[2] == 1


def test_arguments_by_name_and_by_position_are_the_same():
    def call(*args, **kwargs):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(aten.mean.dim, (x, *args), kwargs))
        gm, context = faked(graph, X)
        return apply_rules(gm, (LastMean,), context)["last_mean"]

    assert call([-1], True) == call([-1], keepdim=True) == call(dim=[2], keepdim=True) == 1
    assert call([-1], keepdim=False) == 0


# ---------------------------------------------------------------------------------------------------------------- 6. placement


class SiluAndProduct(Rule):
    """Two outputs with an input of their own each."""

    def pattern(self, op, x, y):
        inner = op.tanh(x)
        return op.mul(op.silu(inner), y), inner

    def rewrite(self, dsi, m):
        inner = dsi.activation(m.x, "tanh")
        return dsi.aten.mul(dsi.activation(inner, "silu"), m.y), inner


def test_no_place_after_the_last_input_and_before_the_first_reader_refuses():
    graph = fx.Graph()
    x, z = graph.placeholder("x"), graph.placeholder("z")
    inner = graph.call_function(aten.tanh.default, (x,))
    early = graph.call_function(aten.cos.default, (inner,))  # reads an output before the input y exists
    y = graph.call_function(aten.sin.default, (z,))
    product = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.silu.default, (inner,)), y))
    graph.output((early, product))
    gm, context = faked(graph, X, X)
    before = gm(X, X)
    assert not apply_rules(gm, (SiluAndProduct,), context)
    assert "comes after" in context.report.misses["silu_and_product"].reason
    torch.testing.assert_close(gm(X, X), before)


def test_the_replacement_stands_before_an_early_reader():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    inner = graph.call_function(aten.tanh.default, (x,))
    early = graph.call_function(aten.cos.default, (inner,))
    product = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.silu.default, (inner,)), y))
    graph.output((early, product))
    gm, context = faked(graph, X, X)
    before = gm(X, X)
    assert apply_rules(gm, (SiluAndProduct,), context)["silu_and_product"] == 1
    torch.testing.assert_close(gm(X, X), before)


# -------------------------------------------------------------------------------------------------------------------- 8. sizes


def test_reading_a_size_is_no_escape():
    def fn(x):
        inner = x.tanh()
        return torch.nn.functional.silu(inner).view(inner.shape[0] * 3, 5)

    gm, context = aten_graphs.traced(fn, X, symbolic=True)
    # As a graph may spell it: the size is read off the intermediate value.
    (inner,) = (n for n in gm.graph.nodes if n.target is aten.tanh.default)
    for node in list(gm.graph.nodes):
        if node.target is aten.sym_size.int and node.args[1] == 0:
            with gm.graph.inserting_after(inner):
                new = gm.graph.call_function(aten.sym_size.int, (inner, 0))
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
    assert apply_rules(gm, (SiluTanh,), context)["silu_tanh"] == 1
    check_graph(gm, "aten", context.fake_mode)
    torch.testing.assert_close(gm(X), fn(X))


@pytest.mark.parametrize(
    "rule_and_fn",
    [(RmsNorm, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (Silu, lambda x: torch.nn.functional.silu(x))],
)
def test_symbolic_sizes_match_and_add_no_guard(rule_and_fn):
    rule, fn = rule_and_fn
    gm, context = aten_graphs.traced(fn, X, symbolic=True)
    guards = len(context.fake_mode.shape_env.guards)
    assert apply_rules(gm, (rule,), context)[rule.name()] == 1
    assert len(context.fake_mode.shape_env.guards) == guards
    check_graph(gm, "aten", context.fake_mode)
    for size in ((2, 3, 5), (4, 7, 11)):
        x = torch.randn(size)
        torch.testing.assert_close(gm(x), fn(x))


def test_sizes_that_only_happen_to_be_equal_do_not_match():
    class SameSizes(Rule):
        dims = {"a": "N", "b": "N"}

        def pattern(self, op, a, b):
            return op.tanh(a) * op.sum(b, [0])

        def rewrite(self, dsi, m):
            return dsi.aten.mul(dsi.activation(m.a, "tanh"), dsi.aten.sum(m.b, [0]))

    def fn(a, b):
        return a.tanh() * b.sum([0])

    assert rewritten(SameSizes, fn, torch.randn(7), torch.randn(7))[2] == 1
    assert rewritten(SameSizes, fn, torch.randn(7), torch.randn(5))[2] == 0
    assert rewritten(SameSizes, fn, torch.randn(7), torch.randn(5), symbolic=True)[2] == 0


# --------------------------------------------------------------------------------------------------------------- nearest miss


def test_the_nearest_miss_is_the_deepest_partial_match_with_rule_node_and_line():
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)

    gm, context = aten_graphs.aten_graph(norm, X)
    apply_rules(gm, (RmsNorm,), context)
    miss = context.report.misses["rms_norm"]
    assert "[-1] was expected" in miss.reason or "constant" in miss.reason or "list" in miss.reason
    assert miss.node == "mean"
    assert miss.where.startswith("test_semantics.py:")
    assert miss.rule.startswith("rms_norm (rms_norm.py:")


def test_a_rule_with_no_candidate_says_so_and_one_that_fired_has_no_miss():
    gm, context = aten_graphs.traced(lambda x: x.tanh().mean(-1, keepdim=True), X)
    apply_rules(gm, (Silu, LastMean, SiluTanh), context)
    assert "the graph has no" in context.report.misses["silu_tanh"].reason
    assert "last_mean" not in context.report.misses
