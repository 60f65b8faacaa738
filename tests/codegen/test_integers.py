"""Index arithmetic: simplification keeps values, ranges hold, and what is printed computes the same."""

from __future__ import annotations

import math

import pytest
import sympy
import torch.utils._sympy.functions as torch_functions
from dsi.codegen.integers import Quotient, Remainder, interval, normalise, within, write
from hypothesis import given, settings
from hypothesis import strategies as st

R, C, N = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "rcn")
SIZES = {R: 12, C: 24, N: 5}  # exclusive bounds; n is positive
LIMITS = {symbol: (sympy.Integer(size),) for symbol, size in SIZES.items()}


def expressions(depth: int = 3) -> st.SearchStrategy[sympy.Expr]:
    leaves = st.sampled_from([R, C, N, sympy.Integer(1), sympy.Integer(7)])
    if depth == 0:
        return leaves
    inner = expressions(depth - 1)
    divisors = st.sampled_from([sympy.Integer(1), sympy.Integer(2), sympy.Integer(3), sympy.Integer(8), N + 1])
    return st.one_of(
        leaves,
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, st.integers(1, 6)).map(lambda p: p[0] * p[1]),
        st.tuples(inner, divisors).map(lambda p: sympy.floor(p[0] / p[1])),
        st.tuples(inner, divisors).map(lambda p: sympy.Mod(p[0], p[1])),
        st.tuples(inner, divisors).map(lambda p: torch_functions.FloorDiv(*p)),
        st.tuples(inner, divisors, divisors).map(lambda p: torch_functions.ModularIndexing(*p)),
    )


def with_pieces() -> st.SearchStrategy[sympy.Expr]:
    # Not nested: sympy itself fails on functions of pieces within pieces.
    inner = expressions(2)
    pieces = st.tuples(inner, inner, inner).map(lambda p: sympy.Piecewise((p[0], p[1] < p[2]), (p[2] + p[0], True)))
    return st.one_of(expressions(), pieces)


POINTS = st.fixed_dictionaries({s: st.integers(1 if s == N else 0, size - 1) for s, size in SIZES.items()})


def at(expr: sympy.Basic, point: dict[sympy.Symbol, int]) -> int:
    return int(expr.xreplace({s: sympy.Integer(v) for s, v in point.items()}))


@settings(max_examples=300, deadline=None)
@given(with_pieces(), POINTS)
def test_normal_form_has_the_same_value(expr, point):
    assert at(normalise(expr, LIMITS), point) == at(expr, point)


@settings(max_examples=200, deadline=None)
@given(with_pieces(), POINTS)
def test_intervals_hold(expr, point):
    normal = normalise(expr, LIMITS)
    low, high = interval(normal, LIMITS)
    value = at(normal, point)
    assert (low is None or low <= value) and (high is None or value <= high)
    for size in (7, 30):
        assert not within(normal, sympy.Integer(size), LIMITS) or 0 <= value < size


class _Language:
    """Stands in for triton.language in printed text."""

    where = staticmethod(lambda condition, yes, no: yes if condition else no)


@settings(max_examples=200, deadline=None)
@given(with_pieces(), POINTS)
def test_printed_text_computes_the_value(expr, point):
    def atom(e):
        if e.is_Symbol:
            return str(e)
        sign = "//" if isinstance(e, Quotient) else "%"
        return f"(({write(e.args[0], atom)}) {sign} ({write(e.args[1], atom)}))"

    text = write(normalise(expr, LIMITS), atom)
    assert eval(text, {"tl": _Language, **{str(s): v for s, v in point.items()}}) == at(expr, point)


@pytest.mark.parametrize(
    "expr, simple",
    [
        (sympy.floor(R / 4) * 4 + sympy.Mod(R, 4), R),
        (sympy.floor(R / N) * N * 64 + sympy.Mod(R, N) * 64, 64 * R),
        (sympy.floor(R / 12), sympy.Integer(0)),
        (sympy.Mod(C, 24), C),
        (sympy.Mod(8 * R + sympy.Mod(C, 8), 8), Remainder(C, 8)),
        (torch_functions.Mod(C - torch_functions.Mod(C, 8) + torch_functions.Mod(R, 4), 8), Remainder(R, 4)),
        (sympy.floor((8 * R + sympy.Mod(C, 8)) / 8), R),
        (sympy.Mod(C, 8) < 8, sympy.true),
        (sympy.Mod(C, 8) + 8 < 8, sympy.false),
        (sympy.Eq(sympy.Mod(2 * R + 1, 2), 0), sympy.false),
    ],
)
def test_simplifications_that_kernels_rely_on(expr, simple):
    assert normalise(expr, LIMITS) == simple


def test_a_symbolic_bound_is_used():
    """r < s0 * s1: r // (s0 * s1) is 0, and r // s1 stays below s0."""
    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    limits = {R: (s0 * s1,)}
    assert normalise(torch_functions.FloorDiv(R, s0 * s1), limits) == 0
    assert within(Quotient(R, s1), s0, limits) and within(Remainder(R, s1), s1, limits)
    assert not within(Quotient(R, s0), s0, limits)


def test_an_unknown_function_is_named():
    with pytest.raises(NotImplementedError, match="gcd"):
        write(sympy.Function("gcd")(R, C), str)


# ------------------------------------------------------------------------------------------------- sizes, which may be subtracted

S, T = (sympy.Symbol(name, integer=True, positive=True) for name in ("s12", "s75"))  # as torch makes them


def of_sizes(depth: int = 2) -> st.SearchStrategy[sympy.Expr]:
    leaves = st.sampled_from([S, T, -S, S - 3, S - T, 2 * T + 1])
    if depth == 0:
        return leaves
    inner = of_sizes(depth - 1)
    return st.one_of(
        leaves,
        st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
        st.tuples(inner, st.sampled_from([2, 3, 4, T])).map(lambda p: torch_functions.FloorDiv(*p)),
        st.tuples(inner, st.sampled_from([2, 3, 4, T])).map(lambda p: torch_functions.PythonMod(*p)),
        st.tuples(inner, st.integers(-3, 3)).map(lambda p: p[0] * p[1]),
    )


@settings(max_examples=200, deadline=None)
@given(of_sizes(), st.integers(1, 13), st.integers(1, 13))
def test_differences_of_sizes_are_divided_as_in_python(expr, s, t):
    def in_c(part: sympy.Basic) -> int:
        """A quotient or remainder as Triton computes it: rounded towards 0."""
        x, n = (at(number, {}) if not isinstance(number, int) else number for number in map(value, part.args))
        return int(math.copysign(abs(x) // n, x)) if isinstance(part, Quotient) else int(math.fmod(x, n))

    def value(part: sympy.Basic) -> sympy.Integer:
        if part.is_Symbol:
            return sympy.Integer({S: s, T: t}[part])
        if isinstance(part, (Quotient, Remainder)):
            return sympy.Integer(in_c(part))
        return part.func(*map(value, part.args)) if part.args else part

    assert int(value(normalise(expr))) == at(expr, {S: s, T: t})
