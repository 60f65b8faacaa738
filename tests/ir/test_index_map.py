"""Index arithmetic: whatever is simplified has the value that it had, for every point and every size."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from dsi.ir.digits import Atoms, Renderer, digits_of, linear_form, mixed_radix
from dsi.ir.evaluate import evaluate_index
from dsi.ir.index_map import FloorDiv, Mod, Space, nonnegative, quotient, view_coordinates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def point(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


a, b, c, r = (point(name) for name in "abcr")
n = sympy.Symbol("n", integer=True, positive=True)
m = sympy.Symbol("m", integer=True, positive=True)
N = sympy.Integer
POINTS = {a: N(3), b: N(4), c: N(12), r: n * 4}
PERIODS = [N(1), N(2), N(3), N(4), N(6), N(8), N(12), n, 2 * n, 4 * n]

leaves = st.sampled_from([("symbol", s) for s in POINTS]) | st.integers(-6, 12).map(lambda v: ("integer", v))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(st.just("add"), inner, inner)
        | st.tuples(st.just("times"), inner, st.sampled_from([N(1), N(2), N(3), N(4), N(12), n]))
        | st.tuples(st.just("div"), inner, st.sampled_from(PERIODS))
        | st.tuples(st.just("mod"), inner, st.sampled_from(PERIODS))
    ),
    max_leaves=6,
)


def build(space: Space, tree: Any) -> sympy.Expr | None:
    """The tree as an expression; None where it takes a modulo of what may be negative by a period that is no number."""
    kind, first, *rest = tree
    if kind == "symbol":
        return first
    if kind == "integer":
        return N(first)
    left = build(space, first)
    right = build(space, rest[0]) if kind == "add" else rest[0]
    if left is None or right is None:
        return None
    if kind == "add":
        return space.join(left + right)
    if kind == "times":
        return left * right
    if kind == "div":
        return space.floordiv(left, right)
    bounds = space.bounds(left)
    if bounds is None or not (nonnegative(bounds[0]) or (bounds[0].is_Integer and right.is_Integer)):
        return None
    return space.mod(left, right)


def value(tree: Any, at: dict[sympy.Symbol, torch.Tensor]) -> torch.Tensor:
    kind, first, *rest = tree
    if kind == "symbol":
        return at[first]
    if kind == "integer":
        return torch.tensor(first)
    left = value(first, at)
    if kind == "add":
        return left + value(rest[0], at)
    right = int(rest[0].subs(n, int(at[n])))
    return left * right if kind == "times" else left // right if kind == "div" else left % right


@SETTINGS
@given(trees)
def test_simplified_arithmetic_keeps_its_value(tree: Any) -> None:
    space = Space(POINTS)
    expr = build(space, tree)
    if expr is None:
        return
    bounds = space.bounds(expr)
    for size in (1, 2, 3):
        ranges = [torch.arange(int(s.subs(n, size))) for s in POINTS.values()]
        grid = dict(zip(POINTS, torch.meshgrid(*ranges, indexing="ij"), strict=True))
        expected = value(tree, {**grid, n: torch.tensor(size)})
        assert bool((evaluate_index(expr, grid, {n: size}) == expected).all()), f"{expr}, n = {size}"
        if bounds is not None:
            low, high = (int(e.subs(n, size)) for e in bounds)
            assert low <= int(expected.min()) and int(expected.max()) <= high, f"{bounds}, n = {size}"


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (lambda s: s.floordiv(b + 4 * a, N(4)), a),
        (lambda s: s.mod(b + 4 * a, N(4)), b),
        (lambda s: s.join(4 * s.floordiv(c, N(4)) + s.mod(c, N(4))), c),
        (lambda s: s.join(6 * s.floordiv(c, N(6)) + 2 * s.mod(s.floordiv(c, N(2)), N(3)) + s.mod(c, N(2))), c),
        (lambda s: s.mod(s.mod(c, N(8)), N(4)), Mod(c, 4)),
        (lambda s: s.floordiv(s.floordiv(c, N(2)), N(3)), FloorDiv(c, 6)),
        (lambda s: s.floordiv(a * n * 4 + r, 4 * n), a),
        (lambda s: s.mod(a * n * 4 + r, 4 * n), r),
        (lambda s: s.mod(6 * a + 2 * r, 2 * n), 2 * Mod(3 * a + r, n)),
        (lambda s: s.mod(s.mod(c, N(4)) + 2, N(4)), Mod(c + 2, 4)),
    ],
)
def test_what_layers_need_is_simplified(expr: Any, expected: sympy.Expr) -> None:
    assert expr(Space(POINTS)) == expected


def test_an_int_of_unknown_sign_is_not_taken_for_a_size() -> None:
    free = sympy.Symbol("u", integer=True)
    assert not nonnegative(free)
    assert nonnegative(n - 1) and not nonnegative(n - 2) and nonnegative(n * m - n)


def test_quotients_are_exact_or_none() -> None:
    assert quotient(12 * n * m, 4 * n) == 3 * m
    assert quotient(6 * n, N(4)) is None and quotient(n, m) is None and quotient(n + 4, N(4)) is None


SHAPES = [
    ((2, 3, 4), (6, 4)),
    ((6, 4), (2, 3, 2, 2)),
    ((4, 6), (6, 4)),
    ((2, 1, 6), (12,)),
    ((12,), (1, 3, 1, 4)),
    ((2, 6, 2), (4, 6)),
    ((1,), ()),
]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_views_are_row_major(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    space = Space()
    symbols = [space.add(point(f"p{i}"), N(size)) for i, size in enumerate(new)]
    coords = view_coordinates(space, [N(s) for s in old], [N(s) for s in new], symbols)
    assert coords is not None
    x = torch.arange(torch.Size(old).numel()).reshape(old)
    env = {
        s: torch.arange(size).reshape([-1 if i == d else 1 for d in range(len(new))])
        for i, (s, size) in enumerate(zip(symbols, new, strict=True))
    }
    assert torch.equal(x[tuple(evaluate_index(e, env, {}) for e in coords)].expand(new), x.reshape(new))


def test_views_of_unequal_size_have_no_map() -> None:
    assert view_coordinates(Space(), [n, N(4)], [m, N(4)], [a, b]) is None


def test_equal_dimensions_pass_untouched() -> None:
    space = Space({a: n, b: m, c: N(12)})
    coords = view_coordinates(space, [n, m, N(3), N(4)], [n, m, N(12)], [a, b, c])
    assert coords == [a, b, FloorDiv(c, 4), Mod(c, 4)]


def test_digits_read_as_the_flat_index_again() -> None:
    space = Space({r: n * m, c: N(12)})
    atoms = Atoms(space, [n, N(3), m, N(4)])
    batch, head, row, channel = atoms.coords
    render = Renderer(space, {**digits_of(r, [row, batch], atoms.atoms), **digits_of(c, [channel, head], atoms.atoms)})
    assert render(batch * m + row) == r and render(head * 4 + channel) == c
    assert render(batch) == FloorDiv(r, m) and render(channel) == Mod(c, 4)
    assert render(head * 12 + 4 + channel) == 12 * FloorDiv(c, 4) + Mod(c, 4) + 4


def test_atoms_split_where_they_are_cut() -> None:
    space = Space()
    atoms = Atoms(space, [N(12)])
    (whole,) = atoms.coords
    assert atoms.split([space.floordiv(whole, N(5))]) == (False, FloorDiv(whole, 5))
    assert atoms.split([space.mod(whole, N(4))]) == (True, None)
    form = linear_form(atoms.coords[0], atoms.atoms)
    assert form is not None
    assert sorted(map(int, atoms.atoms.values())) == [3, 4] and mixed_radix(form[0], atoms.atoms) is not None
