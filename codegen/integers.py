"""Index arithmetic: sympy integers brought into one form, simplified under known ranges, and printed as Triton source.

Every coordinate is a non-negative integer, so floor division and modulo need no care about signs. Sizes are computed by the model, which
may divide a difference of them; that is brought up first, since Triton divides as C does. Coordinates arrive as sympy's `floor` and `Mod`
or as torch's `FloorDiv` and friends; here both become `Quotient` and `Remainder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy


class Quotient(sympy.Function):
    """floor(x / n) for x >= 0, n > 0."""

    nargs = (2,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, x, n):
        if n == 1 or x == 0:
            return x
        if x.is_Integer and n.is_Integer:
            return sympy.Integer(int(x) // int(n))
        whole, rest = _split(x, n)
        if whole != 0:
            return whole + cls(rest, n)
        if isinstance(x, Quotient):
            return cls(x.args[0], x.args[1] * n)
        return None


class Remainder(sympy.Function):
    """x mod n for x >= 0, n > 0."""

    nargs = (2,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, x, n):
        if n == 1 or x == 0:
            return sympy.Integer(0)
        if x.is_Integer and n.is_Integer:
            return sympy.Integer(int(x) % int(n))
        whole, rest = _split(x, n)
        if whole != 0:
            return cls(rest, n)
        if isinstance(x, Remainder) and _divides(n, x.args[1]):
            return cls(x.args[0], n)
        return None


def _divides(n: sympy.Expr, x: sympy.Expr) -> bool:
    ratio = sympy.cancel(x / n)
    return bool(ratio.is_integer) and not ratio.has(sympy.floor) and sympy.denom(ratio) == 1


def _split(x: sympy.Expr, n: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """x = n * whole + rest, with the terms that n plainly divides in `whole` and no negative term left in `rest`."""
    if not (x.is_Add or x.is_Mul or x.is_Integer or x == n):
        return sympy.Integer(0), x
    whole, rest = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(x):
        if _divides(n, term):
            whole += sympy.cancel(term / n)
        else:
            rest += term
    if any(term.could_extract_minus_sign() for term in (*sympy.Add.make_args(rest), *sympy.Add.make_args(whole))):
        return sympy.Integer(0), x
    return whole, rest


# What is known of a symbol: every entry is an exclusive bound.
Limits = Mapping[sympy.Symbol, tuple[sympy.Expr, ...]]


Range = tuple[int | None, int | None]


def interval(expr: sympy.Basic, limits: Limits) -> Range:
    """The smallest and the largest value of `expr` where every symbol is >= 0 and below its limits; None where not known."""
    if expr.is_Integer:
        return int(expr), int(expr)
    if expr.is_Symbol:
        known = [int(limit) - 1 for limit in limits.get(expr, ()) if limit.is_Integer]
        return 0, min(known) if known else None
    if isinstance(expr, Quotient):
        (low, high), n = interval(expr.args[0], limits), expr.args[1]
        by = int(n) if n.is_Integer else 1
        return (
            low // by if low is not None and by > 1 else min(low, 0) if low is not None else None
        ), high // by if high is not None else None
    if isinstance(expr, Remainder):
        (low, high), n = interval(expr.args[0], limits), expr.args[1]
        tops = [top for top in (high, int(n) - 1 if n.is_Integer else None) if top is not None]
        return (0 if low is not None and low >= 0 else None), min(tops) if tops else None
    if expr.is_Add:
        return _combine(sum, sum, [interval(part, limits) for part in expr.args])
    if expr.is_Mul:
        factor, rest = expr.as_coeff_Mul()
        if not factor.is_Integer:
            return None, None
        parts = [interval(part, limits) for part in sympy.Mul.make_args(rest)]
        if any(low is None or low < 0 for low, _ in parts):
            if len(parts) > 1:
                return None, None
            low, high = parts[0]
        else:
            highs = [high for _, high in parts]
            low, high = int(sympy.prod([low for low, _ in parts])), None if None in highs else int(sympy.prod(highs))
        ends = [None if end is None else int(factor) * end for end in (low, high)]
        return (ends[0], ends[1]) if factor > 0 else (ends[1], ends[0])
    if isinstance(expr, sympy.Piecewise):
        return _combine(min, max, [interval(value, limits) for value, _ in expr.args])
    return None, None


def _combine(low: Callable[[list[int]], int], high: Callable[[list[int]], int], ranges: list[Range]) -> Range:
    lows = [bottom for bottom, _ in ranges if bottom is not None]
    highs = [top for _, top in ranges if top is not None]
    return (low(lows) if len(lows) == len(ranges) else None), (high(highs) if len(highs) == len(ranges) else None)


def within(expr: sympy.Basic, size: sympy.Expr, limits: Limits) -> bool:
    """Whether 0 <= expr < size is known."""
    low, high = interval(expr, limits)
    if low is None or low < 0:
        return False
    if size.is_Integer:
        return high is not None and high < int(size)
    if expr.is_Symbol:
        return size in limits.get(expr, ())
    if isinstance(expr, Remainder):
        return expr.args[1] == size or within(expr.args[0], size, limits)
    if isinstance(expr, Quotient) and expr.args[0].is_Symbol:
        # r // n < m where r < m * n
        return any(sympy.expand(size * expr.args[1] - limit) == 0 for limit in limits.get(expr.args[0], ()))
    return False


def normalise(expr: sympy.Basic, limits: Limits | None = None) -> sympy.Basic:
    """`expr` over `Quotient` and `Remainder` only, simplified under `limits` (symbol -> exclusive bounds)."""
    limits = limits or {}
    if not isinstance(expr, sympy.Basic):
        expr = sympy.sympify(expr)
    if expr.is_Atom:
        return expr
    args = [normalise(arg, limits) for arg in expr.args]
    kind = type(expr).__name__
    if kind in ("floor", "ceiling"):
        inner = sympy.together(args[0])
        top, bottom = sympy.fraction(inner)
        if bottom == 1:
            return normalise(top, limits) if top != expr else top
        return _quotient(sympy.expand(top) if kind == "floor" else sympy.expand(top + bottom - 1), bottom, limits)
    if kind in ("FloorDiv", "CleanDiv", "IntTrueDiv", "Quotient"):
        return _quotient(args[0], args[1], limits)
    if kind in ("Mod", "PythonMod", "Remainder"):
        return _remainder(args[0], args[1], limits)
    if kind == "CeilDiv":
        return _quotient(args[0] + args[1] - 1, args[1], limits)
    if kind == "ModularIndexing":
        return _remainder(_quotient(args[0], args[1], limits), args[2], limits)
    if kind == "Identity":
        return args[0]
    if expr.is_Relational:
        return _relation(expr, args, limits)
    rebuilt = expr.func(*args)
    return fold(sympy.expand(rebuilt)) if rebuilt.is_Add or rebuilt.is_Mul else rebuilt


def _relation(expr: sympy.Basic, args: list[sympy.Basic], limits: Limits) -> sympy.Basic:
    """A relation, decided where the ranges of its two sides allow it."""
    args = _whole(args)
    low, high = interval(fold(args[0] - args[1]), limits)
    kind = type(expr).__name__
    above, below = low is not None and low > 0, high is not None and high < 0  # left - right is positive, negative
    not_below, not_above = low is not None and low >= 0, high is not None and high <= 0
    always = {"StrictLessThan": below, "LessThan": not_above, "StrictGreaterThan": above, "GreaterThan": not_below}
    never = {"StrictLessThan": not_below, "LessThan": above, "StrictGreaterThan": not_above, "GreaterThan": below}
    apart, equal = above or below, low == high == 0
    if always.get(kind, equal if kind == "Equality" else apart):
        return sympy.true
    if never.get(kind, apart if kind == "Equality" else equal):
        return sympy.false
    return expr.func(*args)


def _whole(sides: Sequence[sympy.Basic]) -> list[sympy.Basic]:
    """Both sides of a relation without fractions: sympy divides by common factors when it builds one."""
    if all(term.as_coeff_Mul()[0].is_Integer and not term.has(sympy.Pow) for side in sides for term in sympy.Add.make_args(side)):
        return list(sides)
    (left, below), (right, under) = (sympy.fraction(sympy.together(side)) for side in sides)
    if not (below.is_positive and under.is_positive):
        raise NotImplementedError(f"no whole form of a relation between {sides[0]} and {sides[1]}")
    return [sympy.expand(left * under), sympy.expand(right * below)]


def _raised(x: sympy.Expr, n: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """(y, k) with x = y - n * k and y >= 0, for a sum of sizes that may be negative, such as the -s in -s % 4, by which s reaches a
    multiple of 4; (x, 0) for what is known not to be, and for coordinates."""
    if x.is_nonnegative or not x.free_symbols or not all(_is_size(symbol) for symbol in x.free_symbols):
        return x, sympy.Integer(0)
    x = sympy.expand(x)
    below = [-term for term in sympy.Add.make_args(x) if term.could_extract_minus_sign()]
    # y - y % n is not negative.
    below = [term for term in below if not (isinstance(term, Remainder) and x.coeff(term.args[0]).is_positive)]
    return sympy.expand(x + n * sympy.Add(*below)), sympy.Add(*below)


def _is_size(symbol: sympy.Symbol) -> bool:
    """Whether a symbol is a size of torch's, which are positive or of unknown sign: coordinates may be 0."""
    return bool(symbol.is_positive) or not symbol.is_nonnegative


def _quotient(x: sympy.Expr, n: sympy.Expr, limits: Limits) -> sympy.Expr:
    x, below = _raised(x, n)
    result = Quotient(x, n) - below
    for part in result.atoms(Quotient):
        if within(part.args[0], part.args[1], limits):
            result = result.xreplace({part: sympy.Integer(0)})
    return result


def _remainder(x: sympy.Expr, n: sympy.Expr, limits: Limits) -> sympy.Expr:
    for rest in x.atoms(Remainder) if x.is_Add else ():
        # y - y % n is a multiple of n.
        if rest.args[1] == n and x.coeff(rest) == -1 and x.coeff(rest.args[0]) == 1:
            x = x - rest.args[0] + rest
    result = Remainder(_raised(x, n)[0], n)
    if isinstance(result, Remainder) and within(result.args[0], result.args[1], limits):
        return result.args[0]
    return result


def fold(expr: sympy.Expr) -> sympy.Expr:
    """`expr` with a * n * (x // n) + a * (x % n) put back together as a * x."""
    while expr.is_Add:
        for rest in expr.atoms(Remainder):
            x, n = rest.args
            factor = expr.coeff(rest)
            quotient = Quotient(x, n)
            if factor == 0 or not isinstance(quotient, Quotient):
                continue
            if sympy.expand(expr.coeff(quotient) - factor * n) == 0:
                expr = sympy.expand(expr - factor * rest - factor * n * quotient + factor * x)
                break
        else:
            return expr
    return expr


# Binding strengths of Python operators, as far as printed here.
ATOM, PRODUCT, SUM, RELATION = 3, 2, 1, 0


def write(expr: sympy.Basic, atom: Callable[[sympy.Basic], str], strength: int = RELATION) -> str:
    """Triton source of a normalised integer or relation. `atom` gives the text of symbols, quotients and remainders (as names or in
    full)."""
    text, own = _write(expr, atom)
    return f"({text})" if own < strength else text


_RELATIONS = {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">="}


def _write(expr: sympy.Basic, atom: Callable[[sympy.Basic], str]) -> tuple[str, int]:
    if expr.is_Integer:
        return str(int(expr)), ATOM if expr >= 0 else SUM
    if expr.is_Symbol or isinstance(expr, (Quotient, Remainder)):
        return atom(expr), ATOM
    if expr in (sympy.true, sympy.false):
        return str(bool(expr)), ATOM
    if expr.is_Add:
        text = ""
        for term in sorted(expr.args, key=lambda t: (t.is_Integer, t.could_extract_minus_sign(), sympy.default_sort_key(t))):
            minus = term.could_extract_minus_sign() and bool(text)
            part = write(-term if minus else term, atom, PRODUCT if minus else SUM)
            text = f"{text} {'-' if minus else '+'} {part}" if text else part
        return text, SUM
    if expr.is_Mul:
        factors = sorted(expr.args, key=lambda t: (t.is_number, sympy.default_sort_key(t)))
        if factors[-1] == -1:
            return "-" + write(sympy.Mul(*factors[:-1]), atom, ATOM), SUM
        return " * ".join(write(factor, atom, ATOM if position else PRODUCT) for position, factor in enumerate(factors)), PRODUCT
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return " * ".join([write(expr.base, atom, ATOM)] * int(expr.exp)), PRODUCT
    kind = type(expr).__name__
    if kind in _RELATIONS:
        left, right = (write(arg, atom, SUM) for arg in _whole(expr.args))
        return f"{left} {_RELATIONS[kind]} {right}", RELATION
    if kind in ("And", "Or"):
        joined = f" {'&' if kind == 'And' else '|'} ".join(f"({write(arg, atom)})" for arg in sorted(expr.args, key=sympy.default_sort_key))
        return joined, RELATION
    if kind == "ITE":
        condition, yes, no = expr.args
        return _write(sympy.Or(sympy.And(condition, yes), sympy.And(sympy.Not(condition), no)), atom)
    if kind == "Not":
        return f"(({write(expr.args[0], atom)}) == 0)", ATOM
    if kind in ("Max", "Min"):
        text = write(expr.args[0], atom)
        for arg in expr.args[1:]:
            text = f"tl.{'maximum' if kind == 'Max' else 'minimum'}({text}, {write(arg, atom)})"
        return text, ATOM
    if kind == "Piecewise":
        *pieces, (last, _) = expr.args
        text = write(last, atom)
        for value, condition in reversed(pieces):
            text = f"tl.where({write(condition, atom)}, {write(value, atom)}, {text})"
        return text, ATOM
    raise NotImplementedError(f"no Triton form of the index expression {expr} ({kind})")
