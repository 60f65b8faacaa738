"""The eight semantics of matching (`dsi.patterns`), each with what it allows and what it refuses."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
from dsi.ir.context import Context, Fuel
from dsi.ir.errors import DsiInternalError
from dsi.ir.options import Options
from dsi.ir.spec import check_graph
from dsi.patterns.engine import apply_rules, find
from dsi.patterns.rewriter import PROVENANCE
from dsi.patterns.rule import Rule
from dsi.patterns.rules import RmsNorm, Silu
from torch import fx

aten = torch.ops.aten
X = torch.randn(2, 3, 5)


class SiluTanh(Rule):
    """silu(tanh(x)), of which the replacement computes the same in the other spelling."""

    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.silu(op.tanh(x))

    def rewrite(self, dsi, m):
        inner = dsi.activation(m.x, "tanh")
        return dsi.activation(inner, "silu")


class ScaledSum(Rule):
    """2 * (a + b), where a and b are tensors."""

    dims = {"a": "...", "b": "..."}

    def pattern(self, op, a, b):
        return (a + b) * 2

    def rewrite(self, dsi, m):
        return dsi.aten.add(dsi.aten.mul(m.a, 2), dsi.aten.mul(m.b, 2))


def rewritten(rule: type[Rule], fn, *args, symbolic: bool = False) -> tuple[fx.GraphModule, Context, int]:
    """The graph after one rule, checked against the IR's specification and against `fn` on the inputs."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    hits = apply_rules(gm, (rule,), context)
    check_graph(gm, "aten", context.fake_mode)
    torch.testing.assert_close(gm(*args), fn(*args))
    return gm, context, hits[rule.name()]


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


def faked(graph: fx.Graph, *inputs: torch.Tensor) -> tuple[fx.GraphModule, Context]:
    """A GraphModule with fake values for the given inputs."""
    gm = fx.GraphModule(torch.nn.Module(), graph)
    mode = torch._subclasses.FakeTensorMode()
    values = iter(inputs)
    with mode:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = mode.from_tensor(next(values))
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    context = Context(Options())
    context.fake_mode = mode
    return gm, context


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


# ---------------------------------------------------------------------------------------------------------------- 7. rewriting


def test_new_nodes_have_value_source_and_provenance():
    gm, context = aten_graphs.aten_graph(lambda x: torch.nn.functional.silu(x.tanh()), X)
    apply_rules(gm, (SiluTanh,), context)
    new = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.activation.default]
    assert len(new) == 2
    for node in new:
        assert node.meta["val"].shape == X.shape
        assert "test_semantics.py" in node.meta["stack_trace"]
        (note,) = node.meta[PROVENANCE]
        assert (note.rule, note.replaced) == ("silu_tanh", ("tanh", "silu"))
        assert note.place.startswith("test_semantics.py:")


def test_provenance_is_kept_through_a_second_rule():
    class Fold(Rule):
        def pattern(self, op, x):
            return op.dsi.activation(op.dsi.activation(x, "tanh"), "silu")

        def rewrite(self, dsi, m):
            return dsi.aten.silu(dsi.aten.tanh(m.x))

    gm, context = aten_graphs.traced(lambda x: torch.nn.functional.silu(x.tanh()), X)
    apply_rules(gm, (SiluTanh, Fold), context)
    assert [[p.rule for p in n.meta[PROVENANCE]] for n in gm.graph.nodes if n.op == "call_function"] == [["silu_tanh", "fold"]] * 2


class WrongShape(Rule):
    def pattern(self, op, x):
        return op.tanh(x)

    def rewrite(self, dsi, m):
        return dsi.aten.tanh(dsi.aten.unsqueeze(m.x, 0))


class WrongDtype(Rule):
    def pattern(self, op, x):
        return op.tanh(x)

    def rewrite(self, dsi, m):
        return dsi.aten.tanh(dsi.aten.cast(m.x, torch.bfloat16))


@pytest.mark.parametrize(("rule", "word"), [(WrongShape, "shape"), (WrongDtype, "dtype")])
def test_a_replacement_of_another_kind_is_refused_and_leaves_no_trace(rule, word):
    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    before = str(gm.graph)
    assert not apply_rules(gm, (rule,), context)
    assert word in context.report.misses[rule.name()].reason
    assert str(gm.graph) == before


def test_matching_changes_nothing():
    gm, _ = aten_graphs.traced(lambda x: torch.nn.functional.silu(x.tanh()), X)
    before = str(gm.graph)
    matches, miss = find(gm, SiluTanh)
    assert len(matches) == 1
    assert miss is None
    assert str(gm.graph) == before


class ActivationOf(Rule):
    """Turns a value with the strides of its input into a contiguous one."""

    def pattern(self, op, x):
        return op.tanh(x)

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, "tanh")


def test_strides_that_the_graph_returns_are_restored():
    gm, _, hits = rewritten(ActivationOf, lambda x: x.transpose(1, 2).tanh(), X)
    assert hits == 1
    assert gm(X).stride() == X.transpose(1, 2).stride()


def test_changed_strides_are_carried_on_to_what_the_graph_returns():
    gm, _, hits = rewritten(ActivationOf, lambda x: x.transpose(1, 2).tanh().cos().sin(), X)
    assert hits == 1
    assert gm(X).stride() == X.transpose(1, 2).stride()
    assert aten_graphs.targets(gm).index("aten.clone.default") > aten_graphs.targets(gm).index("aten.sin.default")


def test_a_view_that_needed_the_old_strides_gets_a_copy():
    gm, _, hits = rewritten(ActivationOf, lambda x: x.transpose(1, 2).tanh().transpose(1, 2).view(2, 15) * 1, X)
    assert hits == 1
    assert "aten.clone.default" in aten_graphs.targets(gm)


def test_memory_read_as_such_keeps_its_strides():
    def fn(x):
        return x.transpose(1, 2).tanh().as_strided((2, 15), (15, 1)) + 0.5

    assert rewritten(ActivationOf, fn, X)[2] == 1


class DropClone(Rule):
    def pattern(self, op, x):
        return op.clone(x)

    def rewrite(self, dsi, m):
        return m.x


def test_no_output_becomes_an_alias_of_an_input():
    gm, context, hits = rewritten(DropClone, lambda x: x.clone(), X)
    assert hits == 0
    assert gm(X).data_ptr() != X.data_ptr()
    assert rewritten(DropClone, lambda x: x.clone().view(30), X)[2] == 0
    assert "are to be" in context.report.misses["drop_clone"].reason or "must stay" in context.report.misses["drop_clone"].reason


def test_no_two_outputs_become_one_tensor():
    def fn(x):
        y = x.tanh()
        return y, y.clone()

    gm, _, hits = rewritten(DropClone, fn, X)
    assert hits == 0
    first, second = gm(X)
    assert first.data_ptr() != second.data_ptr()


def test_a_copy_that_protects_from_a_mutation_stays():
    """Two inputs that exchange their values: each clone is read after the other input was written."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    old_a = graph.call_function(aten.clone.default, (a,))
    graph.call_function(aten.copy_.default, (a, b))
    graph.call_function(aten.copy_.default, (b, old_a))
    graph.output(graph.call_function(aten.cos.default, (old_a,)))
    gm, context = faked(graph, X, X.clone())
    assert not apply_rules(gm, (DropClone,), context)
    one, two = X.clone(), X + 1
    gm(one, two)
    torch.testing.assert_close((one, two), (X + 1, X))


def test_a_copy_read_after_a_mutation_of_its_source_stays():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    old = graph.call_function(aten.clone.default, (a,))
    graph.call_function(aten.copy_.default, (a, b))
    graph.output(graph.call_function(aten.cos.default, (old,)))
    gm, context = faked(graph, X, X.clone())
    assert not apply_rules(gm, (DropClone,), context)
    assert "copy_" in context.report.misses["drop_clone"].reason


def test_fuel_is_taken_by_each_rewrite():
    def fn(x):
        return x.tanh() + x.cos().tanh() + x.sin().tanh()

    for limit in (0, 1, 2, 3, 9):
        gm, context = aten_graphs.traced(fn, X)
        context.fuel = Fuel(limit)
        assert apply_rules(gm, (ActivationOf,), context)["activation_of"] == min(limit, 3)
        assert len(context.fuel.log) == min(limit, 3)
        torch.testing.assert_close(gm(X), fn(X))


def test_rules_that_undo_each_other_are_an_internal_error():
    class Undo(Rule):
        def pattern(self, op, x):
            return op.dsi.activation(x, "tanh")

        def rewrite(self, dsi, m):
            return dsi.aten.tanh(m.x)

    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    with pytest.raises(DsiInternalError, match="undo"):
        apply_rules(gm, (ActivationOf, Undo), context, fixpoint=True)


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
    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    apply_rules(gm, (Silu, ActivationOf), context)
    assert "the graph has no" in context.report.misses["silu"].reason
    assert "activation_of" not in context.report.misses
