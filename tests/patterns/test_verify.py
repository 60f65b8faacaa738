"""`verify`: every rule computes what its pattern computes, and a wrong copy of it is found out."""

from __future__ import annotations

import pytest
import torch
from dsi.passes import normalise, recognise
from dsi.patterns.mutants import changed, mutants
from dsi.patterns.rule import Rule, compile_rule
from dsi.patterns.rules import RULES
from dsi.patterns.sampling import assignments
from dsi.patterns.verify import VerificationError, verify

# Copies that compute the same, and why.
EQUIVALENT = {
    ("NoOpCopy", "check removed"),  # what it checks is strides; a copy has the values of its source whatever they are
    ("RmsNormLength", "dsi.rms_norm.default: argument cast changed"),  # it takes no half precision, and there is nothing to round
}


def test_every_rule_of_the_stages_is_verified_here():
    assert set(RULES) == {*normalise.RULES, *recognise.RULES, *recognise.TIDY}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_rule(rule):
    result = verify(rule)
    assert result.accepted[rule.name()] > 0
    assert rule.name() in str(result)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_wrong_copies_are_found(rule):
    for mutant in mutants(rule):
        if (rule.__name__, mutant.fault) in EQUIVALENT:
            continue
        with pytest.raises(VerificationError, match="is wrong"):
            verify(mutant.rule)


def test_mutants_cover_the_literals_of_a_rewrite():
    faults = {m.fault for rule in RULES if rule.__name__ == "RmsNorm" for m in mutants(rule)}
    assert {f"dsi.rms_norm.default: argument {name} changed" for name in ("eps", "offset", "cast")} <= faults


@pytest.mark.parametrize("literal", [True, 3, 1e-6, 0.5, -0.5, 0.0, "gelu_tanh", "before", "half", torch.float32, [1, 0]])
def test_a_changed_literal_is_another_of_its_kind(literal):
    other = changed(literal)
    assert type(other) is type(literal)
    assert other != literal


class Scaled(Rule):
    dims = {"x": "... D"}
    literals = {"c": (2.0, 3.0)}

    def pattern(self, op, x, c):
        return op.tanh(x / c) * c

    def rewrite(self, dsi, m):
        return dsi.aten.mul(dsi.activation(dsi.aten.div(m.x, m.c), "tanh"), m.c)


def test_a_right_rule_of_ones_own():
    assert verify(Scaled).accepted == {"scaled": 72}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda self, dsi, m: dsi.aten.mul(dsi.activation(dsi.aten.div(m.x, m.c), "tanh"), m.c * 1.001), "in float64"),
        (lambda self, dsi, m: dsi.aten.cast(m.x, torch.float64), "the replacement float64"),
        (lambda self, dsi, m: dsi.aten.unsqueeze(m.x, 0), "the replacement float32"),
        (lambda self, dsi, m: dsi.rms_norm(m.x), "its rewrite fails"),
    ],
)
def test_a_wrong_rule_is_told_with_line_branches_and_sample(fault, sentence):
    wrong = type("Wrong", (Scaled,), {"rewrite": fault})
    with pytest.raises(VerificationError, match=sentence) as caught:
        verify(wrong)
    text = str(caught.value)
    assert text.startswith("test_verify.py:")
    assert "rule wrong is wrong" in text
    assert "seed" in text


class Clamped(Rule):
    dims = {"x": "... D"}
    literals = {"c": (2.0, 20.0)}

    def pattern(self, op, x, c):
        return op.call(torch.ops.aten.clamp.default, x, -20.0, c)

    def rewrite(self, dsi, m):
        return dsi.call(torch.ops.aten.clamp.default, m.x, max=m.c)


def test_a_bound_that_is_dropped_is_found_beyond_it():
    with pytest.raises(VerificationError, match=r"in float64 .* far seed"):
        verify(Clamped)


class Unshifted(Rule):
    dims = {"x": "... D"}

    def pattern(self, op, x):
        wide = op.exp(x)
        return wide / op.sum(wide, [-1], True)

    def rewrite(self, dsi, m):
        return dsi.call(torch.ops.aten._softmax.default, m.x, -1, False)


def test_what_the_pattern_overflows_with_may_be_finite():
    assert verify(Unshifted).accepted == {"unshifted": 72}


def test_rounding_to_half_too_early_is_found():
    def rewrite(self, dsi, m):
        narrow = dsi.aten.cast(m.x, torch.bfloat16)
        return dsi.aten.cast(dsi.aten.mul(dsi.activation(dsi.aten.div(narrow, m.c), "tanh"), m.c), torch.float32)

    class Wide(Scaled):
        dtypes = {"x": torch.float32}

    assert verify(Wide)
    with pytest.raises(VerificationError, match="exact result"):
        verify(type("Early", (Wide,), {"rewrite": rewrite}))


def test_one_wrong_branch_is_found():
    class Branch(Rule):
        dims = {"x": "..."}

        def pattern(self, op, x):
            return op.either("kind", a=lambda: op.tanh(x), b=lambda: op.silu(x), c=lambda: op.relu(x))

        def rewrite(self, dsi, m):
            return dsi.activation(m.x, {"a": "tanh", "b": "silu", "c": "tanh"}[m.tag("kind")])

    with pytest.raises(VerificationError, match="kind = c"):
        verify(Branch)


def test_a_parameter_that_nothing_says_how_to_sample_is_an_error():
    class Unsaid(Rule):
        def pattern(self, op, x):
            return op.tanh(x)

        def rewrite(self, dsi, m):
            return dsi.activation(m.x, "tanh")

    with pytest.raises(VerificationError, match="what to verify x with"):
        verify(Unsaid)


def test_a_check_that_refuses_everything_verifies_nothing():
    never = type("Never", (Scaled,), {"check": lambda self, m: m.require(False, "never")})
    with pytest.raises(VerificationError, match=r"refused each of .* samples, the last because never"):
        verify(never)


def test_a_branch_that_is_never_accepted_is_an_error():
    class Dead(Rule):
        dims = {"x": "..."}

        def pattern(self, op, x):
            return op.either("kind", tanh=lambda: op.tanh(x), silu=lambda: op.silu(x))

        def check(self, m):
            m.require(m.tag("kind") == "tanh", "only tanh")

        def rewrite(self, dsi, m):
            return dsi.activation(m.x, "tanh")

    with pytest.raises(VerificationError, match="kind = silu; the last was refused because only tanh"):
        verify(Dead)


def test_all_branches_are_enumerated():
    class Nested(Rule):
        dims = {"x": "..."}

        def pattern(self, op, x):
            inner = op.maybe_cast(x, torch.float32, tag="cast")
            return op.either("kind", a=lambda: op.tanh(inner), b=lambda: op.either("sub", c=lambda: op.cos(x), d=lambda: op.sin(inner)))

    found = {tuple(sorted(c.items())) for c in assignments(compile_rule(type("N", (Nested,), {"rewrite": lambda s, d, m: m.x})), 99)}
    assert found == {
        (("cast", "cast"), ("kind", "a")),
        (("cast", "none"), ("kind", "a")),
        (("kind", "b"), ("sub", "c")),
        (("cast", "cast"), ("kind", "b"), ("sub", "d")),
        (("cast", "none"), ("kind", "b"), ("sub", "d")),
    }
