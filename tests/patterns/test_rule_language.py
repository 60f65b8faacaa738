"""Writing a rule: what the language offers, and what it says of a rule that is malformed."""

from __future__ import annotations

import re

import aten_graphs
import pytest
import torch
import torch.nn.functional as F
from dsi.ir.errors import DsiError
from dsi.ir.options import Options
from dsi.ir.spec import check_graph
from dsi.passes.recognise import recognise
from dsi.patterns.engine import apply_rules, find
from dsi.patterns.rule import Rule, compile_rule

X = torch.randn(2, 3, 5)
PLACE = r"test_rule_language\.py:\d+"


def rule(pattern, rewrite=lambda self, dsi, m: m.x, **attributes) -> type[Rule]:
    return type("Sketch", (Rule,), {"pattern": pattern, "rewrite": rewrite, **attributes})


@pytest.mark.parametrize(
    ("pattern", "attributes", "sentence"),
    [
        (lambda self, op, x: op.tahn(x), {}, r"op\.tahn is not in the vocabulary; did you mean 'tanh'"),
        (lambda self, op, x: op.dsi.rmsnorm(x), {}, r"op\.dsi\.rmsnorm is not in the vocabulary; did you mean 'rms_norm'"),
        (lambda self, op, x, y: op.tanh(x), {}, r"the parameter 'y' is not used"),
        (lambda self, op, x: 3, {}, r"returned 3, which is not a pattern value"),
        (lambda self, op, x: x, {}, r"returned a bare parameter"),
        (lambda self, op, x: op.maybe_cast(x, torch.float32, tag="a"), {}, r"returned a bare parameter"),
        (lambda self, op, x: op.tanh(x, 1), {}, r"tanh takes at most 1 argument"),
        (lambda self, op, x: op.mean(), {}, r"mean needs the argument 'self'"),
        (lambda self, op, x: op.gelu(x, aproximate="tanh"), {}, r"gelu has no further argument 'aproximate'"),
        (lambda self, op, x: op.either("a", one=lambda: op.tanh(x)), {}, r"needs at least two"),
        (lambda self, op, x: op.tanh(x) if x else op.cos(x), {}, r"no truth value"),
        (lambda self, op, x: op.tanh(next(iter(x))), {}, r"cannot be iterated"),
        (lambda self, op, shape: op.tanh(shape), {}, r"may not be called 'shape'"),
        (lambda self, op, *x: op.tanh(x[0]), {}, r"must be plain names"),
        (lambda self, op, x: op.tanh(x).named("x"), {}, r"both a parameter and a named value"),
        (lambda self, op, x: op.tanh(x), {"dims": {"y": "N"}}, r"dims names 'y', which is not a parameter"),
        (lambda self, op, x: op.tanh(x), {"dims": {"x": "N-1"}}, r"'N-1' in dims 'N-1' is not a name"),
        (lambda self, op, x: op.tanh(x), {"stage": "later"}, r"stage 'later'"),
    ],
)
def test_a_malformed_rule_is_an_error_that_names_its_line(pattern, attributes, sentence):
    with pytest.raises(DsiError, match=sentence) as caught:
        compile_rule(rule(pattern, **attributes))
    assert re.match(PLACE, str(caught.value))


def test_what_is_no_rule_is_an_error():
    class NoRewrite(Rule):
        def pattern(self, op, x):
            return op.tanh(x)

    with pytest.raises(DsiError, match="no method 'rewrite'"):
        compile_rule(NoRewrite)
    with pytest.raises(DsiError, match="not a rule"):
        compile_rule(NoRewrite())
    with pytest.raises(DsiError, match="not a rule"):
        compile_rule(dict)


def test_a_malformed_rule_stops_before_anything_is_changed():
    good = rule(lambda self, op, x: op.tanh(x), lambda self, dsi, m: dsi.activation(m.x, "tanh"))
    bad = rule(lambda self, op, x, y: op.tanh(x))
    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    before = str(gm.graph)
    with pytest.raises(DsiError):
        apply_rules(gm, (good, bad), context)
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("rewrite", "sentence"),
    [
        (lambda self, dsi, m: (m.x, m.x), "returned 2 values, `pattern` 1"),
        (lambda self, dsi, m: None, "returned None, which is no value of the graph"),
        (lambda self, dsi, m: dsi.rmsnorm(m.x), "dsi.rmsnorm is no semantic operator"),
        (lambda self, dsi, m: m.y, "has no parameter 'y'"),
        (lambda self, dsi, m: m.tag("cast"), "has no tag 'cast'"),
    ],
)
def test_a_rewrite_that_cannot_be_is_an_error(rewrite, sentence):
    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    before = str(gm.graph)
    with pytest.raises(DsiError, match=sentence) as caught:
        apply_rules(gm, (rule(lambda self, op, x: op.tanh(x), rewrite),), context)
    assert re.match(PLACE, str(caught.value)) or "dsi.rmsnorm" in sentence
    assert str(gm.graph) == before


def test_a_check_that_fails_is_an_error_that_names_the_rule_and_the_node():
    def check(self, m):
        m.require(m.dtype("z"), "")

    gm, context = aten_graphs.traced(lambda x: x.tanh(), X)
    with pytest.raises(DsiError, match=r"`check` failed at tanh.*no parameter 'z'"):
        apply_rules(gm, (rule(lambda self, op, x: op.tanh(x), check=check),), context)


class Cast(Rule):
    def pattern(self, op, x, to):
        return op.tanh(op.maybe_cast(x, to, tag="before"))


def test_a_cast_is_recorded_and_never_ignored():
    class Kept(Cast):
        def rewrite(self, dsi, m):
            return dsi.aten.tanh(m.x)

    seen = []

    class Recorded(Cast):
        def rewrite(self, dsi, m):
            seen.append(m.cast("before"))
            return dsi.activation(m.x if m.cast("before") is None else dsi.aten.cast(m.x, m.cast("before")), "tanh")

    half = X.to(torch.bfloat16)
    for value in (half, X):
        gm, context = aten_graphs.traced(lambda x: x.float().tanh(), value)
        assert apply_rules(gm, (Recorded,), context)["recorded"] == 1
        torch.testing.assert_close(gm(value), value.float().tanh())
    assert seen == [torch.float32, None]
    gm, context = aten_graphs.traced(lambda x: x.float().tanh(), half)
    assert not apply_rules(gm, (Kept,), context), "a rewrite that loses the cast gives another dtype"


class Branches(Rule):
    def pattern(self, op, x, y):
        return op.either("how", plain=lambda: op.tanh(x), sum=lambda: op.cos(x + y))

    def rewrite(self, dsi, m):
        return dsi.aten.neg(dsi.aten.neg(dsi.aten.tanh(m.x) if m.y is None else dsi.aten.cos(dsi.aten.add(m.x, m.y))))


def test_either_tells_the_branch_and_an_unused_parameter_is_none():
    gm, _ = aten_graphs.traced(lambda x, y: x.tanh() * (x + y).cos(), X, X + 1)
    matches, _ = find(gm, Branches)
    found = {m.tag("how"): m.present("y") for m in matches}
    assert found == {"plain": False, "sum": True}


@pytest.mark.parametrize("fn", [lambda x: x * x, lambda x: x**2, lambda x: x.pow(2.0)])
def test_square_has_three_spellings(fn):
    squared = rule(lambda self, op, x: op.tanh(op.square(x)), lambda self, dsi, m: dsi.activation(dsi.aten.mul(m.x, m.x), "tanh"))
    gm, context = aten_graphs.traced(lambda x: fn(x).tanh(), X)
    assert apply_rules(gm, (squared,), context)["sketch"] == 1


def test_a_product_of_two_tensors_is_no_square():
    squared = rule(lambda self, op, x: op.tanh(op.square(x)))
    gm, context = aten_graphs.traced(lambda x, y: (x * y).tanh(), X, X + 1)
    assert not apply_rules(gm, (squared,), context)


def test_a_declared_literal_matches_no_tensor():
    scaled = rule(lambda self, op, x, c: op.tanh(x * c), lambda self, dsi, m: dsi.aten.tanh(dsi.aten.mul(m.x, m.c)), literals={"c": (2.0,)})
    gm, context = aten_graphs.traced(lambda x, y: (x * y).tanh(), X, X + 1)
    assert not apply_rules(gm, (scaled,), context)
    assert "literal" in context.report.misses["sketch"].reason
    gm, context = aten_graphs.traced(lambda x: (x * 3).tanh(), X)
    assert apply_rules(gm, (scaled,), context)["sketch"] == 1


@pytest.mark.parametrize(
    ("dims", "hits"),
    [
        ({"x": "A B C"}, 1),
        ({"x": "..."}, 1),
        ({"x": "... 5"}, 1),
        ({"x": "... 7"}, 0),
        ({"x": "A B"}, 0),
        ({"x": "A A C"}, 0),
        ({"x": "A B C", "y": "C"}, 1),
        ({"x": "A B C", "y": "B"}, 0),
        ({"x": "... C", "y": "~... C"}, 1),
        ({"x": "A B C", "y": "A*B"}, 0),
    ],
)
def test_named_dimensions_are_checked(dims, hits):
    summed = rule(lambda self, op, x, y: op.tanh(x) * y, lambda self, dsi, m: dsi.aten.mul(dsi.activation(m.x, "tanh"), m.y), dims=dims)
    gm, context = aten_graphs.traced(lambda x, y: x.tanh() * y, X, torch.randn(5))
    assert apply_rules(gm, (summed,), context)["sketch"] == hits


def test_products_of_dimensions_are_solved():
    class Merge(Rule):
        dims = {"x": "B G*N D", "y": "G"}

        def pattern(self, op, x, y):
            return op.tanh(x), op.cos(y)

        def rewrite(self, dsi, m):
            return dsi.activation(m.x, "tanh") if m.size("N") == 3 else dsi.keep, dsi.keep

    def fn(x, y):
        return x.tanh(), y.cos()

    for size, hits in ((6, 1), (7, 0)):
        gm, _ = aten_graphs.traced(fn, torch.randn(2, size, 5), torch.randn(2))
        matches, _ = find(gm, type("Both", (Merge,), {"pattern": lambda self, op, x, y: op.mul(op.sum(op.tanh(x), [0, 1, 2]), op.cos(y))}))
        assert not matches, "the graph has no such product"
        gm, _ = aten_graphs.traced(lambda x, y: x.tanh().sum([0, 1, 2]) * y.cos(), torch.randn(2, size, 5), torch.randn(2))
        matches, _ = find(gm, type("Both", (Merge,), {"pattern": lambda self, op, x, y: op.mul(op.sum(op.tanh(x), [0, 1, 2]), op.cos(y))}))
        assert len(matches) == hits


def test_keep_leaves_an_output_as_it_is():
    class Half(Rule):
        def pattern(self, op, x):
            inner = op.tanh(x)
            return op.silu(inner), inner

        def rewrite(self, dsi, m):
            return dsi.activation(dsi.activation(m.x, "tanh"), "silu"), dsi.keep

    def fn(x):
        inner = x.tanh()
        return F.silu(inner), inner

    gm, context = aten_graphs.traced(fn, X)
    assert apply_rules(gm, (Half,), context)["half"] == 1
    assert aten_graphs.targets(gm).count("aten.tanh.default") == 1
    torch.testing.assert_close(gm(X), fn(X))


def test_any_overload_can_be_matched_and_built():
    ceil = torch.ops.aten.ceil.default
    negated = rule(lambda self, op, x: op.call(ceil, -x), lambda self, dsi, m: dsi.aten.neg(dsi.call(torch.ops.aten.floor.default, m.x)))
    gm, context = aten_graphs.traced(lambda x: (-x).ceil(), X)
    assert apply_rules(gm, (negated,), context)["sketch"] == 1
    torch.testing.assert_close(gm(X), (-X).ceil())


def test_a_users_rule_runs_before_and_after_the_built_in_ones():
    class DoubleSilu(Rule):
        """On semantic operators: silu(silu(x)) is noted by spelling the outer one out."""

        dims = {"x": "..."}

        def pattern(self, op, x):
            return op.dsi.activation(op.dsi.activation(x, "silu"), "silu")

        def rewrite(self, dsi, m):
            inner = dsi.activation(m.x, "silu")
            return dsi.aten.mul(inner, dsi.aten.sigmoid(inner))

    gm, context = aten_graphs.traced(lambda x: F.silu(F.silu(x)), X)
    context.options = Options(rules=(DoubleSilu,))
    recognise(gm, context)
    assert context.report.hits["double_silu"] == 1
    torch.testing.assert_close(gm(X), F.silu(F.silu(X)))


def test_a_symbolic_size_is_built_as_a_value_of_the_graph():
    def flattened(number):
        return lambda self, dsi, m: dsi.aten.view(dsi.aten.view(m.x, [number(dsi, m), -1]), dsi.sizes(m.x))

    gm, context = aten_graphs.traced(lambda x: x.tanh().cos(), X, symbolic=True)
    base = rule(lambda self, op, x: op.tanh(x), lambda self, dsi, m: dsi.activation(m.x, "tanh"))
    wrong = type("Wrong", (base,), {"rewrite": flattened(lambda dsi, m: m.shape("x")[0])})
    with pytest.raises(DsiError, match=r"dsi\.size"):
        apply_rules(gm, (wrong,), context)
    right = type(
        "Right", (base,), {"rewrite": lambda self, dsi, m: dsi.activation(flattened(lambda dsi, m: dsi.size(m.x, 0))(self, dsi, m), "tanh")}
    )
    assert apply_rules(gm, (right,), context)["right"] == 1
    check_graph(gm, "aten", context.fake_mode)
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(gm(x), x.tanh().cos())
