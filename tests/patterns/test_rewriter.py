"""The rewriter: values, strides, aliases, provenance and fuel of what a rule puts in place (semantics 7 of `dsi.patterns`)."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
from dsi.ir.context import Fuel
from dsi.ir.errors import DsiInternalError
from dsi.patterns.engine import apply_rules, find
from dsi.patterns.rewriter import PROVENANCE
from dsi.patterns.rule import Rule
from rule_graphs import SiluTanh, faked, rewritten
from torch import fx

aten = torch.ops.aten
X = torch.randn(2, 3, 5)


# ---------------------------------------------------------------------------------------------------------------- 7. rewriting


def test_new_nodes_have_value_source_and_provenance():
    gm, context = aten_graphs.aten_graph(lambda x: torch.nn.functional.silu(x.tanh()), X)
    apply_rules(gm, (SiluTanh,), context)
    new = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.activation.default]
    assert len(new) == 2
    for node in new:
        assert node.meta["val"].shape == X.shape
        assert "test_rewriter.py" in node.meta["stack_trace"]
        (note,) = node.meta[PROVENANCE]
        assert (note.rule, note.replaced) == ("silu_tanh", ("tanh", "silu"))
        assert note.place.startswith("rule_graphs.py:")


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
