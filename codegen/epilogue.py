"""The epilogue of a linear region as row plans of its own, which read finished products.

Where a library computes the products, what the region does with them is elementwise work over rows and columns, and norms over groups of
columns: row plans. A column that is read through a permutation is a load at another place, since nothing has to lie in one program's tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import sympy
from dsi.ir import tile as t
from dsi.ir.errors import refuse
from dsi.ir.index_map import Space

At = tuple[tuple[sympy.Symbol, sympy.Expr], ...]  # what symbols stand for


def epilogue(plan: t.LinearPlan, segment: t.Segment, products: Mapping[int, int]) -> t.RowPlan:
    """The row plan of one segment. `products`: the input that holds the product [rows, N] with each weight, by the weight's input.

    Refuses norms over groups of different sizes in one segment: rows of a row plan have one length.
    """
    rows, size = sympy.sympify(plan.rows), sympy.sympify(segment.size)
    lengths = {sympy.sympify(reduction.size) for reduction in segment.reductions}
    if len(lengths) > 1:
        raise refuse(f"norms over groups of {' and '.join(sorted(map(str, lengths)))} columns in one segment are no row plan")
    columns = lengths.pop() if lengths else size
    groups = size / columns
    space = Space({t.R: rows * groups, t.C: columns})
    at = {t.R: space.floordiv(t.R, groups), t.C: space.mod(t.R, groups) * columns + t.C}

    def window(index: int, here: dict[sympy.Symbol, sympy.Expr]) -> t.Expr:
        found = segment.windows[index]
        return t.Load(products[found.weight], (here[t.R], space.substitute(found.n, here)), plan.x_dtype)

    move = _Moved(space, window)
    start = tuple(sorted(at.items(), key=lambda item: str(item[0])))
    stores = tuple(
        replace(store, coords=tuple(move.coordinate(c, start) for c in store.coords), value=move(store.value, start))
        for store in segment.stores
    )
    reductions = tuple(replace(r, body=move(r.body, start), over=t.C, size=columns) for r in segment.reductions)
    return t.RowPlan(rows * groups, columns, stores, reductions)


class _Moved:
    """Expressions with other values for their symbols, each shared subexpression moved once."""

    def __init__(self, space: Space, window: Callable[[int, dict[sympy.Symbol, sympy.Expr]], t.Expr]):
        self.space, self.window = space, window
        self._known: dict[tuple[int, At], t.Expr] = {}
        self._memos: dict[At, dict] = {}

    def __call__(self, expr: t.Expr, at: At) -> t.Expr:
        key = (id(expr), at)
        if key not in self._known:
            self._known[key] = self._move(expr, at)
        return self._known[key]

    def index(self, expr: sympy.Basic, at: At) -> sympy.Basic:
        return self.space.substitute(sympy.sympify(expr), dict(at), self._memos.setdefault(at, {}))

    def coordinate(self, coord: sympy.Expr | t.Expr, at: At) -> sympy.Expr | t.Expr:
        return self(coord, at) if isinstance(coord, t.Expr) else self.index(coord, at)

    def _move(self, expr: t.Expr, at: At) -> t.Expr:
        if isinstance(expr, t.Window):
            return self.window(expr.index, dict(at))
        if isinstance(expr, t.Load):
            return replace(expr, coords=tuple(self.coordinate(c, at) for c in expr.coords))
        if isinstance(expr, t.Op):
            return replace(expr, args=tuple(self(a, at) for a in expr.args))
        if isinstance(expr, t.Index):
            return replace(expr, expr=self.index(expr.expr, at))
        if isinstance(expr, t.Test):
            return replace(expr, condition=self.index(expr.condition, at))
        if isinstance(expr, t.Permuted):
            there = {**dict(at), expr.symbol: self.index(expr.source, at)}
            return self(expr.body, tuple(sorted(there.items(), key=lambda item: str(item[0]))))
        return expr  # a literal, or a statistic of the row
