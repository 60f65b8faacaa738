"""Atoms and digits: how the dimensions of an output are made of the flat indices of a kernel, and back.

Each dimension of an output starts as one *atom*, a symbol with a range. Where a coordinate cuts it by floor division or modulo it is
split in two. Once no coordinate cuts an atom, a flat index of the kernel (the row r, the column c) is a mixed-radix number whose digits
are atoms; writing the atoms as digits of the flat indices turns every expression over atoms into one over the flat indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from .index_map import ONE, ZERO, FloorDiv, Mod, Space, product, quotient


@dataclass(frozen=True)
class Digit:
    """(base // place) mod size; the modulo is not needed at the top."""

    base: sympy.Symbol
    place: sympy.Expr
    size: sympy.Expr
    top: bool


class Atoms:
    """The dimensions of one output, as sums of atoms of `space`."""

    def __init__(self, space: Space, sizes: Sequence[sympy.Expr], prefix: str = "o"):
        self.space = space
        self._prefix = prefix
        self._count = 0
        self.coords: list[sympy.Expr] = []
        self.atoms: dict[sympy.Symbol, sympy.Expr] = {}
        for size in sizes:
            self.coords.append(ZERO if size == 1 else self._new(size))

    def _new(self, size: sympy.Expr) -> sympy.Symbol:
        symbol = sympy.Symbol(f"{self._prefix}{self._count}_", integer=True, nonnegative=True)
        self._count += 1
        self.atoms[symbol] = size
        return self.space.add(symbol, size)

    def split(self, exprs: Iterable[sympy.Expr]) -> tuple[bool, sympy.Expr | None]:
        """Splits the atoms that the expressions cut. Returns whether any was split, and a cut that no split can follow (its size does not
        divide the atom's), None if there is none."""
        for expr in exprs:
            for cut in _cuts(expr, self.atoms):
                symbol, by = cut.args
                high = quotient(self.atoms[symbol], by)
                if high is None:
                    return False, cut
                self._split(symbol, high, by)
                return True, None
        return False, None

    def _split(self, symbol: sympy.Symbol, high: sympy.Expr, low: sympy.Expr) -> None:
        del self.atoms[symbol]
        parts = (self._new(high) if high != 1 else ZERO) * low + (self._new(low) if low != 1 else ZERO)
        self.coords = [self.space.substitute(c, {symbol: parts}) for c in self.coords]


def _cuts(expr: sympy.Basic, atoms: dict[sympy.Symbol, sympy.Expr]) -> Iterable[sympy.Expr]:
    """Floor divisions and modulos of a bare atom within `expr`."""
    if isinstance(expr, FloorDiv | Mod) and expr.args[0] in atoms:
        yield expr
    for argument in expr.args:
        yield from _cuts(argument, atoms)


def linear_form(expr: sympy.Expr, symbols: Iterable[sympy.Symbol]) -> tuple[dict[sympy.Symbol, sympy.Expr], sympy.Expr] | None:
    """`expr` as sum of coefficient * symbol, and the rest without these symbols; None if it is not such a sum."""
    wanted = set(symbols)
    form: dict[sympy.Symbol, sympy.Expr] = {}
    rest = ZERO
    for term in sympy.Add.make_args(expr):
        found = term.free_symbols & wanted
        if not found:
            rest = rest + term
            continue
        factors = sympy.Mul.make_args(term)
        bare = [f for f in factors if f in wanted]
        if len(bare) != 1 or len(found) != 1:
            return None
        form[bare[0]] = form.get(bare[0], ZERO) + product(f for f in factors if f is not bare[0])
    return form, rest


def mixed_radix(
    form: dict[sympy.Symbol, sympy.Expr], sizes: dict[sympy.Symbol, sympy.Expr]
) -> tuple[list[sympy.Symbol], sympy.Expr] | None:
    """The symbols from the lowest digit up, and the product of their sizes, if `form` is a number with exactly these digits; else None."""
    order, place, left = [], ONE, dict(form)
    while left:
        nxt = next((s for s, c in left.items() if c == place), None)
        if nxt is None:
            return None
        del left[nxt]
        order.append(nxt)
        place = place * sizes[nxt]
    return order, place


def digits_of(base: sympy.Symbol, order: Sequence[sympy.Symbol], sizes: dict[sympy.Symbol, sympy.Expr]) -> dict[sympy.Symbol, Digit]:
    """The symbols, lowest first, as digits of `base`."""
    result, place = {}, ONE
    for i, symbol in enumerate(order):
        result[symbol] = Digit(base, place, sizes[symbol], i == len(order) - 1)
        place = place * sizes[symbol]
    return result


class Renderer:
    """Writes expressions over atoms as expressions over the flat indices that the atoms are digits of.

    Neighbouring digits with matching coefficients are joined, so that `h * D + d` of a column reads `c` again.
    """

    def __init__(self, space: Space, digits: dict[sympy.Symbol, Digit]):
        self.space = space
        self.digits = digits
        self._memo: dict[sympy.Basic, sympy.Basic] = {}

    def __call__(self, expr: sympy.Basic) -> sympy.Basic:
        if expr.is_Integer or not (expr.free_symbols & self.digits.keys()):
            return expr
        if expr not in self._memo:
            self._memo[expr] = self._render(expr)
        return self._memo[expr]

    def _render(self, expr: sympy.Basic) -> sympy.Basic:
        if isinstance(expr, sympy.Expr) and (expr.is_Add or expr.is_Symbol or expr.is_Mul):
            return self._sum(expr)
        args = [self(a) for a in expr.args]
        if isinstance(expr, FloorDiv):
            return self.space.floordiv(*args)
        if isinstance(expr, Mod):
            return self.space.mod(*args)
        if isinstance(expr, sympy.logic.boolalg.BooleanFunction | sympy.core.relational.Relational):
            return self.space.relation(expr.func, args)
        return expr.func(*args)

    def _sum(self, expr: sympy.Expr) -> sympy.Expr:
        parts = []
        for term in sympy.Add.make_args(expr):
            factors = sympy.Mul.make_args(term)
            parts.append(sympy.Mul(*(self._digit(self.digits[f]) if f in self.digits else self(f) for f in factors)))
        return self.space.join(sympy.Add(*parts))

    def _digit(self, digit: Digit) -> sympy.Expr:
        value = self.space.floordiv(digit.base, digit.place)
        return value if digit.top else self.space.mod(value, digit.size)
