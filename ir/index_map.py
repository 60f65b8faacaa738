"""Integer index expressions: sums of products over symbols of known range, with floor division and modulo.

A coordinate is a sympy expression over *point symbols* (each in [0, size)) and *size symbols* (a batch, a length; positive). `Space`
holds the ranges and builds simplified expressions; nothing here decides anything about a symbolic size by its current value. What may
occur in an expression: integers, symbols, `Add`, `Mul`, torch's `FloorDiv` and `Mod` (of values that are >= 0), `Piecewise`, `Max` and
`Min`.

An expression that is not simplified is still right; a failed proof costs a refusal somewhere else, never a wrong index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

__all__ = ["FloorDiv", "Max", "Min", "Mod", "Space", "nonnegative", "product", "quotient", "size_of"]

ZERO = sympy.Integer(0)
ONE = sympy.Integer(1)


def size_of(value: object) -> sympy.Expr:
    """A dimension, stride or integer argument (int, SymInt or sympy) as a sympy expression. Adds no guard."""
    node = getattr(value, "node", None)
    return node.expr if node is not None and not isinstance(value, int) else sympy.sympify(value)


def product(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    """The product of the sizes, 1 if there are none."""
    total = ONE
    for size in sizes:
        total = total * size
    return total


@lru_cache(maxsize=65536)
def quotient(term: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """term / divisor where it is plainly an integer expression (every factor of the divisor is among the term's factors), else None."""
    if divisor == 1:
        return term
    if term == 0:
        return ZERO
    number, rest = term.as_coeff_Mul()
    by_number, by_rest = divisor.as_coeff_Mul()
    if not (number.is_Integer and by_number.is_Integer) or number % by_number:
        return None
    powers = dict(rest.as_powers_dict())
    if by_rest != 1:
        for base, exponent in by_rest.as_powers_dict().items():
            left = powers.get(base, ZERO) - exponent
            if not left.is_Integer or left < 0:
                return None
            powers[base] = left
    if any(not e.is_Integer or e < 0 for e in powers.values()):
        return None
    return sympy.Mul(number / by_number, *(base**exponent for base, exponent in powers.items()))


@lru_cache(maxsize=65536)
def nonnegative(expr: sympy.Expr) -> bool:
    """Whether `expr` >= 0 wherever every size is. False means: not proved."""
    if expr.is_Integer:
        return bool(expr >= 0)
    # Sizes are at least 1: where one is 0 there is no point to speak of. An int that a user passes is no size, and may be negative.
    shifted = sympy.expand(expr.xreplace({s: s + 1 for s in expr.free_symbols if s.is_positive}))
    for term in sympy.Add.make_args(shifted):
        number, rest = term.as_coeff_Mul()
        if number < 0 or not (rest == 1 or rest.is_nonnegative):
            return False
    return True


class Space:
    """The ranges of a set of point symbols, and simplification under them. Expressions of one space share its memo."""

    def __init__(self, sizes: dict[sympy.Symbol, sympy.Expr] | None = None):
        self.sizes: dict[sympy.Symbol, sympy.Expr] = dict(sizes or {})
        self._bounds: dict[sympy.Expr, tuple[sympy.Expr, sympy.Expr] | None] = {}
        self._floordiv: dict[tuple[sympy.Expr, sympy.Expr], sympy.Expr] = {}
        self._mod: dict[tuple[sympy.Expr, sympy.Expr], sympy.Expr] = {}

    def add(self, symbol: sympy.Symbol, size: sympy.Expr) -> sympy.Symbol:
        """Declares that `symbol` lies in [0, size)."""
        self.sizes[symbol] = size
        return symbol

    # ------------------------------------------------------------------------------------------------------------------ ranges

    def bounds(self, expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
        """(least, greatest) value of `expr` over all points, as expressions in the sizes; None where not derived."""
        if expr not in self._bounds:
            self._bounds[expr] = self._derive_bounds(expr)
        return self._bounds[expr]

    def _derive_bounds(self, expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
        if expr.is_Integer:
            return expr, expr
        if expr.is_Symbol:
            return (ZERO, self.sizes[expr] - 1) if expr in self.sizes else (expr, expr)
        if not (expr.free_symbols & self.sizes.keys()):
            return expr, expr
        if expr.is_Add:
            low, high = ZERO, ZERO
            for term in expr.args:
                part = self.bounds(term)
                if part is None:
                    return None
                low, high = low + part[0], high + part[1]
            return low, high
        if expr.is_Mul:
            number, rest = expr.as_coeff_Mul()
            high = ONE
            low = ONE
            for factor in sympy.Mul.make_args(rest):
                part = self.bounds(factor)
                if part is None or not nonnegative(part[0]):
                    return None
                low, high = low * part[0], high * part[1]
            return (number * low, number * high) if number > 0 else (number * high, number * low)
        if isinstance(expr, FloorDiv):
            part = self.bounds(expr.args[0])
            if part is None:
                return None
            low, high = (self.floordiv(p, expr.args[1]) for p in part)
            return low, high
        if isinstance(expr, Mod):
            part = self.bounds(expr.args[0])
            if part is not None and nonnegative(part[0]) and nonnegative(expr.args[1] - 1 - part[1]):
                return part
            return ZERO, expr.args[1] - 1
        if isinstance(expr, sympy.Piecewise):
            parts = [p for p in (self.bounds(value) for value, _ in expr.args) if p is not None and p[0].is_Integer and p[1].is_Integer]
            if len(parts) < len(expr.args):
                return None
            return min(p[0] for p in parts), max(p[1] for p in parts)
        return None

    def within(self, expr: sympy.Expr, size: sympy.Expr) -> bool:
        """Whether 0 <= expr < size at every point. False means: not proved."""
        part = self.bounds(expr)
        return part is not None and nonnegative(part[0]) and nonnegative(sympy.expand(size - 1 - part[1]))

    # ------------------------------------------------------------------------------------------------------------- arithmetic

    def floordiv(self, expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        """expr // by, for `by` >= 1."""
        key = (expr, by)
        if key not in self._floordiv:
            self._floordiv[key] = self._make_floordiv(expr, by)
        return self._floordiv[key]

    def mod(self, expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        """expr mod by (>= 0), for `by` >= 1. The expression is brought into the non-negative range first, as `Mod` asks."""
        key = (expr, by)
        if key not in self._mod:
            self._mod[key] = self._make_mod(expr, by)
        return self._mod[key]

    def _split(self, expr: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """expr = by * whole + rest."""
        whole, rest = [], []
        for term in sympy.Add.make_args(sympy.expand(expr) if expr.is_Mul and any(a.is_Add for a in expr.args) else expr):
            part = quotient(term, by)
            if part is not None:
                whole.append(part)
            elif term.is_Integer and by.is_Integer:
                whole.append(term // by)
                rest.append(term % by)
            else:
                rest.append(term)
        return sympy.Add(*whole), sympy.Add(*rest)

    def _make_floordiv(self, expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        if by == 1 or expr == 0:
            return expr
        if expr == by:
            return ONE
        if expr.is_Integer and by.is_Integer:
            return expr // by
        whole, rest = self._split(expr, by)
        if rest == 0 or self.within(rest, by):
            return whole
        if self.within(-rest - 1, by):  # -by <= rest < 0
            return whole - 1
        part = self.bounds(rest)
        if part is None or not nonnegative(part[0]):
            whole, rest = ZERO, expr
        common, rest_by, rest_reduced = self._common(rest, by)
        if common != 1 and rest_by is not None and rest_reduced is not None:
            return whole + self.floordiv(rest_reduced, rest_by)
        if isinstance(rest, FloorDiv):
            return whole + self.floordiv(rest.args[0], rest.args[1] * by)
        if isinstance(rest, Mod):
            over = quotient(rest.args[1], by)
            if over is not None:
                return whole + self.mod(self.floordiv(rest.args[0], by), over)
        return whole + FloorDiv(rest, by, evaluate=False)

    def _make_mod(self, expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        if by == 1 or expr == by:
            return ZERO
        if expr.is_Integer and by.is_Integer:
            return expr % by
        _, rest = self._split(expr, by)
        if rest.is_Add:
            # (x % m + y) % n is (x + y) % n where n divides m: equal modulo n, and no smaller, as an addend of `Mod` must not be.
            rest = sympy.Add(*(t.args[0] if isinstance(t, Mod) and quotient(t.args[1], by) is not None else t for t in rest.args))
            _, rest = self._split(rest, by)
        if rest == 0 or self.within(rest, by):
            return rest
        if self.within(-rest - 1, by):
            return rest + by
        part = self.bounds(rest)
        if part is None:
            rest = expr
        elif not nonnegative(part[0]):
            # Bring it up by a whole number of periods: enough if the least value is known as a number or as a multiple of the period.
            lift = -self.floordiv(part[0], by) if part[0].is_Integer and by.is_Integer else None
            rest = rest + lift * by if lift is not None else expr
        common, by_reduced, rest_reduced = self._common(rest, by)
        if common != 1 and by_reduced is not None and rest_reduced is not None:
            return common * self.mod(rest_reduced, by_reduced)
        if isinstance(rest, Mod) and quotient(rest.args[1], by) is not None:
            return self.mod(rest.args[0], by)
        return Mod(rest, by, evaluate=False)

    @staticmethod
    def _common(rest: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr | None, sympy.Expr | None]:
        """A common factor of all terms of `rest` and of `by`, with both divided by it."""
        numbers = [t.as_coeff_Mul()[0] for t in (*sympy.Add.make_args(rest), by)]
        common = sympy.Integer(math.gcd(*map(int, numbers))) if all(n.is_Integer for n in numbers) else ONE
        for factor in sympy.Mul.make_args(by.as_coeff_Mul()[1]):
            if factor != 1 and all(quotient(t, common * factor) is not None for t in sympy.Add.make_args(rest)):
                common = common * factor
        if common == 1:
            return ONE, None, None
        parts = [quotient(t, common) for t in sympy.Add.make_args(rest)]
        by_part = quotient(by, common)
        if by_part is None or any(p is None for p in parts):
            return ONE, None, None
        return common, by_part, sympy.Add(*parts)

    def join(self, expr: sympy.Expr) -> sympy.Expr:
        """`expr` with digits put together again: n*(x // n) + x % n -> x, n*((x // m) % n') + ... likewise."""
        while expr.is_Add:
            for term in expr.args:
                joined = self._join_one(expr, term)
                if joined is not None:
                    expr = joined
                    break
            else:
                return expr
        return expr

    def _join_one(self, expr: sympy.Expr, term: sympy.Expr) -> sympy.Expr | None:
        """One lower digit a * (x % m) or a * ((x // p) % m) with its next higher digit: a * ((x // p) % (m * n)) or a * (x // p)."""
        mods = [f for f in sympy.Mul.make_args(term) if isinstance(f, Mod)]
        if len(mods) != 1:
            return None
        low = mods[0]
        scale = quotient(term, low)
        if scale is None:
            return None
        base, m = low.args
        for other in expr.args:
            if other is term:
                continue
            higher = quotient(other, scale * m)
            if higher is None:
                continue
            rest = expr - term - other
            if higher == self.floordiv(base, m):
                return rest + scale * base
            if isinstance(higher, Mod) and higher.args[0] == self.floordiv(base, m):
                return rest + scale * self.mod(base, m * higher.args[1])
        return None

    # ---------------------------------------------------------------------------------------------------------------- substitution

    def substitute(self, expr: sympy.Basic, values: dict[sympy.Symbol, sympy.Expr], memo: dict | None = None) -> sympy.Basic:
        """`expr` (of any space) with symbols replaced by expressions of this space, simplified again. Relations and booleans too."""
        memo = {} if memo is None else memo
        return self._substitute(expr, values, memo)

    def _substitute(self, expr: sympy.Basic, values: dict[sympy.Symbol, sympy.Expr], memo: dict) -> sympy.Basic:
        if expr.is_Symbol:
            return values.get(expr, expr)
        if not expr.args or not (expr.free_symbols & values.keys()):
            return expr
        if expr in memo:
            return memo[expr]
        args = [self._substitute(a, values, memo) for a in expr.args]
        if isinstance(expr, FloorDiv):
            result = self.floordiv(args[0], args[1])
        elif isinstance(expr, Mod):
            result = self.mod(args[0], args[1])
        elif expr.is_Add:
            result = self.join(sympy.Add(*args))
        elif isinstance(expr, sympy.logic.boolalg.BooleanFunction | sympy.core.relational.Relational):
            result = self.relation(expr.func, args)
        else:
            result = expr.func(*args)
        memo[expr] = result
        return result

    def relation(self, func: type, args: Sequence[sympy.Basic]) -> sympy.Basic:
        """A relation between integers of this space, decided where the ranges decide it; else left as it stands."""
        if issubclass(func, sympy.core.relational.Relational):
            left, right = args
            if func is sympy.StrictLessThan:
                if self._never_negative(right - left - 1):
                    return sympy.true
                if self._never_negative(left - right):
                    return sympy.false
            return func(left, right, evaluate=False)
        return func(*args)

    def _never_negative(self, expr: sympy.Expr) -> bool:
        part = self.bounds(sympy.expand(expr))
        return part is not None and nonnegative(sympy.expand(part[0]))


def view_coordinates(
    space: Space, old: Sequence[sympy.Expr], new: Sequence[sympy.Expr], at: Sequence[sympy.Expr]
) -> list[sympy.Expr] | None:
    """Coordinates in a tensor of sizes `old` of the element at `at` in its view of sizes `new` (same elements in row-major order).

    Dimensions are matched in the smallest groups of equal product, so that nothing is flattened that need not be. None where the sizes do
    not multiply to the same expression.
    """
    result: list[sympy.Expr] = [ZERO] * len(old)
    olds = [i for i, n in enumerate(old) if n != 1]
    news = [j for j, n in enumerate(new) if n != 1]
    while olds and news:
        matched = _first_group([old[i] for i in olds], [new[j] for j in news])
        if matched is None:
            return None
        i_count, j_count = matched
        if i_count == 1 and j_count == 1:
            result[olds[0]] = at[news[0]]
        else:
            flat, stride = [], ONE
            for j in reversed(news[:j_count]):
                flat.append(stride * at[j])
                stride = stride * new[j]
            position = space.join(sympy.Add(*flat))
            stride = ONE
            for place, i in enumerate(reversed(olds[:i_count])):
                digit = space.floordiv(position, stride)
                result[i] = digit if place == i_count - 1 else space.mod(digit, old[i])
                stride = stride * old[i]
        olds, news = olds[i_count:], news[j_count:]
    return None if olds or news else result


def _first_group(old: list[sympy.Expr], new: list[sympy.Expr]) -> tuple[int, int] | None:
    """The least (i, j), by i + j, whose leading products agree."""
    old_products: dict[sympy.Expr, int] = {}
    total = ONE
    for i, n in enumerate(old):
        total = total * n
        old_products.setdefault(total, i + 1)
    best, total = None, ONE
    for j, n in enumerate(new):
        total = total * n
        if total in old_products and (best is None or old_products[total] + j + 1 < sum(best)):
            best = (old_products[total], j + 1)
    return best
