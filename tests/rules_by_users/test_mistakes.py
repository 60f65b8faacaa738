"""Mistakes in users' rules: each is a sentence that names the rule, and none a wrong number."""

import pytest
import torch
from torch import Tensor, nn

import dsi

aten = torch.ops.aten


class Clamp(dsi.Rule):
    """clamp(x, low)   ->   relu, which is so for 0 alone"""

    dims = {"x": "... N"}
    literals = {"low": (0, 0.0)}

    def pattern(self, op, x, low):
        return op.call(aten.clamp.default, x, low)

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, "relu")


class ClampSampled(Clamp):
    literals = {}

    def sample(self, s):
        return {**s.defaults(), "low": 0}


class ClampOfZero(Clamp):
    def check(self, m):
        m.require(m.low == 0, f"the bound is {m.low}")


class ClampMin(Clamp):
    def rewrite(self, dsi, m):
        return dsi.call(aten.clamp_min.default, m.x, m.low)


class Clamped(nn.Module):
    def __init__(self, low):
        super().__init__()
        self.linear, self.low = nn.Linear(4, 4), low

    def forward(self, x):
        return self.linear(x).clamp(min=self.low)


def explained(rule, low):
    return dsi.explain(Clamped(low).eval(), torch.randn(3, 4), options={"rules": [rule]})


def hits(rule, low):
    return explained(rule, low).hits[rule.name()]


@pytest.mark.parametrize("rule", [Clamp, ClampSampled])
def test_a_literal_of_the_graph_is_verified_too(rule):
    dsi.verify(rule)  # right with what it lists
    assert hits(rule, 0) == 1
    with pytest.raises(Exception, match=rf"rule {rule.name()} is wrong: .*low 1"):
        hits(rule, 1)


def test_a_literal_that_a_rule_does_not_list_is_taken_where_the_rule_is_right():
    assert hits(ClampMin, 1) == 1 and hits(ClampOfZero, 0) == 1
    report = explained(ClampOfZero, 1)
    assert not report.hits["clamp_of_zero"] and "the bound is 1" in str(report.misses["clamp_of_zero"])


class OfEven(ClampMin):
    """Says yes in the graph and no to every sample, whose sizes are odd but for one."""

    def check(self, m):
        m.require(m.low == 0 or m.shape("x")[-1] % 4 == 0, "the size is no multiple of 4")


def test_a_literal_that_no_sample_can_be_verified_with_is_refused():
    report = explained(OfEven, 1)
    assert not report.hits["of_even"]
    assert "it cannot be verified with low = 1: each sample was refused, the last because the size is no" in str(report.misses["of_even"])


class SecondAxis(dsi.Rule):
    """Right for three dimensions, of which the second is the last but one."""

    dims = {"x": "... N"}

    def pattern(self, op, x):
        return op.call(aten.cumsum.default, x, 1)

    def rewrite(self, dsi, m):
        return dsi.call(aten.cumsum.default, m.x, -2)


def test_leading_dimensions_are_of_several_numbers():
    with pytest.raises(dsi.VerificationError, match="second_axis is wrong"):
        dsi.verify(SecondAxis)


class Answers(Clamp):
    def check(self, m):
        return m.low == 0


class Asks(Clamp):
    def check(self, m):
        m.tag("other")


class Computes(Clamp):
    def pattern(self, op, x, low):
        return torch.clamp(x, low)


class Samples(Clamp):
    def sample(self, s):
        return {"x": s.nothing}


class Mish(Clamp):
    def rewrite(self, dsi, m):
        return dsi.activation(m.x, "mish")


class Two(Clamp):
    def rewrite(self, dsi, m):
        return m.x, m.x


@pytest.mark.parametrize(
    "rule, sentence",
    [
        (Answers, r"rule answers: `check` returned True, .*m\.require"),
        (Asks, r"rule asks is wrong: its check fails: .*has no tag 'other'"),
        (Computes, r"rule Computes: `pattern` failed, .* TypeError"),
        (Samples, r"rule samples is wrong: its sample fails: AttributeError"),
        (Mish, r"'mish' is no activation that dsi has \(known: gelu_erf"),
        (Two, r"rule two is wrong: `rewrite` returned 2 values, `pattern` 1"),
    ],
)
def test_a_mistake_is_a_sentence(rule, sentence):
    with pytest.raises(dsi.DsiError, match=sentence):
        dsi.register(rule)


class Gelu(Clamp):
    """Called as one of dsi's own."""


def test_hits_are_counted_by_names_that_are_unique():
    with pytest.raises(dsi.DsiError, match="a rule of dsi's own is called 'gelu'"):
        dsi.register(Gelu)
    for other in (Gelu, type("Clamp", (ClampOfZero,), {})):
        with pytest.raises(Exception, match=r"(a rule of dsi's own is|two rules are) called"):
            dsi.explain(Clamped(0).eval(), torch.randn(3, 4), options={"rules": [Clamp, other]})


def test_rules_are_a_list():
    with pytest.raises(dsi.DsiError, match=r"option 'rules' = .*Clamp.*a list of classes derived from dsi\.Rule"):
        dsi.Options.parse({"rules": Clamp})


# ----------------------------------------------------------------------------------------------------------- operators that write


def grown(x: Tensor) -> Tensor:
    return x.add_(1.0) * 2.0


def grown_copy(x: Tensor) -> Tensor:
    return x.clone().add_(1.0) * 2.0


grown_op, grown_copy_op = (dsi.custom_op(f"mistakes::{f.__name__}", f) for f in (grown, grown_copy))


class ByAnOperatorThatWrites(dsi.Rule):
    dims = {"x": "... N"}

    def pattern(self, op, x):
        return (x + 1.0) * 2.0

    def rewrite(self, dsi, m):
        return dsi.call(grown_op, m.x)


class InPlace(ByAnOperatorThatWrites):
    def rewrite(self, dsi, m):
        return dsi.aten.mul(dsi.call(aten.add_.Tensor, m.x, 1.0), 2.0)


def test_a_rewrite_writes_to_nothing():
    with pytest.raises(dsi.VerificationError, match="its rewrite writes to x"):
        dsi.verify(ByAnOperatorThatWrites)
    with pytest.raises(dsi.VerificationError, match=r"aten\.add_\.Tensor writes to its argument"):
        dsi.verify(InPlace)


@torch.no_grad()
def test_a_reference_that_writes_to_an_argument_is_refused_in_a_model():
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: grown_copy_op(x) + x, backend="dsi", options={"executor": "reference"})
    torch.testing.assert_close(compiled(x), (x + 1) * 2 + x)
    with pytest.raises(Exception, match="mistakes::grown: the reference writes to an argument"):
        torch.compile(lambda x: grown_op(x) + x, backend="dsi", options={"executor": "reference"})(x)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"executor": "reference"}])
def test_so_is_one_whose_shapes_are_said_by_another_function(options):
    op = dsi.custom_op(f"mistakes::grown_with_a_fake_{len(options)}", grown, fake=torch.empty_like)
    with pytest.raises(Exception, match=r"with_a_fake_.: the reference writes to an argument"):
        torch.compile(lambda x: op(x) + x, backend="dsi", options=options)(torch.randn(3, 4))
    with pytest.raises(dsi.DsiError, match="writes to an argument"):
        op(torch.randn(3, 4))


def parts(x: Tensor) -> list[Tensor]:
    y = x * 2
    return [x, y, y.view(-1)]


def number(x: Tensor) -> int:
    return x.dim()


def nothing(x: Tensor) -> None:
    return None


def test_results_are_tensors_each_in_memory_of_its_own():
    x = torch.randn(2, 3)
    first, second, third = dsi.custom_op("mistakes::parts", parts)(x)
    assert len({t.data_ptr() for t in (x, first, second, third)}) == 4 and torch.equal(third, 2 * x.flatten())
    for function in (number, nothing):
        with pytest.raises(dsi.DsiError, match="an operator's results are tensors"):
            dsi.custom_op(f"mistakes::{function.__name__}", function)
    for kernel in ({"kernel": 3}, {"fake": 3}):
        with pytest.raises(dsi.DsiError, match="is 3, which is no function"):
            dsi.custom_op("mistakes::other", parts, **kernel)
