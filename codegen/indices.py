"""Prints index expressions and element offsets, and keeps statements where they belong: each once, and before a loop if no step changes
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import sympy
from dsi.ir import tile as t

from .builder import Block, Builder
from .integers import ATOM, PRODUCT, RELATION, Quotient, Remainder, interval, normalise, write
from .layout import Guard, Interner, Point, Text, Tile

INT32 = 2**31 - 1


class IndexPrinter:
    """Writes statements into `block` for index expressions over one `tile`, each once."""

    def __init__(self, builder: Builder, block: Block, tile: Tile, parent: Self | None = None, hoist: bool = False):
        self.builder, self.block, self.tile, self.parent, self.hoist = builder, block, tile, parent, hoist
        self.interner: Interner = parent.interner if parent else Interner()
        self.uses: Counter[int] = Counter()
        self._exposed: dict[tuple[int, Point], bool] = {}
        self.values: dict[tuple[int, Point, Guard], Text] = {}

    # ------------------------------------------------------------------------------------------------------------ structure

    def on(self, tile: Tile) -> Self:
        """A printer into the same block for another tile."""
        return type(self)(self.builder, self.block, tile, self)

    @contextmanager
    def loop(self, header: str, tile: Tile, first: Sequence[str] = ()) -> Iterator[Self]:
        """A loop whose body prints over `tile`; what does not depend on the symbols that the tile binds anew is written before the loop."""
        body = Block(self.block)
        for line in first:
            body.line(line)
        yield type(self)(self.builder, body, tile, self, hoist=True)
        self.block.attach(header, body)

    def statement(self, code: str, axes: frozenset[int], hint: str) -> Text:
        """The name of `code`, written as a statement unless it already is one."""
        if code.isidentifier():
            return Text(code, axes)
        name = self.block.name_of(code)
        if name is None:
            name = self.builder.names.new(hint)
            self.block.assign(name, code)
        return Text(name, axes)

    def _outer(self, symbols: Iterable[sympy.Symbol]) -> Self | None:
        """The printer before this one's loop, if something over `symbols` is the same in every step of it."""
        if not self.hoist or self.parent is None:
            return None
        mine, outer = self.tile, self.parent.tile
        same = all(mine.bound.get(s) == outer.bound.get(s) and mine.fixed.get(s) == outer.fixed.get(s) for s in symbols)
        return self.parent if same and len(mine.shape) == len(outer.shape) else None

    # ------------------------------------------------------------------------------------------------------------- integers

    def index(self, expr: sympy.Basic, point: Point = ()) -> sympy.Basic:
        """`expr` at a point, normalised under the tile's ranges."""
        expr = sympy.sympify(expr)
        if point:
            expr = expr.xreplace(dict(point))
        if self.tile.fixed:
            expr = expr.xreplace(self.tile.fixed)
        return normalise(expr, self.tile.limits)

    def axes_of(self, expr: sympy.Basic) -> frozenset[int]:
        return frozenset().union(*(self.tile.bound[s].axes for s in expr.free_symbols if s in self.tile.bound))

    def integer(self, expr: sympy.Basic, strength: int = RELATION) -> str:
        """Source of a normalised index expression or relation."""
        return write(expr, self.atom, strength)

    def atom(self, expr: sympy.Basic) -> str:
        """The name of a symbol, quotient or remainder."""
        if expr.is_Symbol:
            return self.tile.bound[expr].code if expr in self.tile.bound else self.builder.size(expr)
        outer = self._outer(expr.free_symbols)
        if outer is not None:
            return outer.atom(expr)
        x, n = expr.args
        over, sign, word = (
            self.integer(x, PRODUCT),
            "//" if isinstance(expr, Quotient) else "%",
            "div" if isinstance(expr, Quotient) else "mod",
        )
        by = self.integer(n, ATOM)
        hint = f"{x}_{word}_{n}" if x.is_Symbol and n.is_Atom else f"i_{word}_{n}" if n.is_Atom else "i"
        return self.statement(f"{over} {sign} {by}", self.axes_of(expr), hint).code

    def wide(self, expr: sympy.Basic) -> str:
        """The name of an atom held in 64 bits."""
        outer = self._outer(expr.free_symbols)
        if outer is not None:
            return outer.wide(expr)
        name = self.atom(expr)
        tensor = bool(expr.free_symbols & set(self.tile.bound))
        code = f"{name}.to(tl.int64)" if tensor else f"tl.cast({name}, tl.int64)"
        return self.statement(code, self.axes_of(expr), f"{name.split('[')[0]}_wide").code

    def offset(self, coords: Sequence[sympy.Expr], tensor: t.Tensor) -> tuple[list[str], frozenset[int]]:
        """Terms of the element offset of `coords` (of dimensions that are not gathered) in `tensor`, and the axes it varies along."""
        total = normalise(sum((c * s for c, s in coords), sympy.Integer(0)), self.tile.limits)
        if total == 0:
            return [], frozenset()
        wide = self.may_exceed(tensor)
        terms = []
        parts = sorted(sympy.Add.make_args(total), key=self._place)
        for term in parts:
            _, top = interval(term, self.tile.limits)
            atoms = [a for a in sympy.Mul.make_args(term) if not a.is_number]
            if wide and atoms and (top is None or top > INT32 // max(4, len(parts))):
                chosen = next((a for a in atoms if self.axes_of(a)), atoms[0])
                chosen = chosen if not chosen.is_Pow else chosen.base
                if not (chosen.is_Symbol or isinstance(chosen, (Quotient, Remainder))):
                    chosen = next(iter(sorted(chosen.atoms(sympy.Symbol, Quotient, Remainder), key=sympy.default_sort_key)))
                terms.append(write(term, self._widening(chosen), PRODUCT))
            else:
                terms.append(self.integer(term, PRODUCT))
        return terms, self.axes_of(total)

    def _place(self, term: sympy.Expr) -> tuple:
        """Sorts the terms of an offset: those that a program has one value of, then by the axes they vary along, then constants."""
        axes = sorted(self.axes_of(term))
        return term.is_Integer, not axes and not term.free_symbols & set(self.tile.bound), axes, sympy.default_sort_key(term)

    def _widening(self, chosen: sympy.Basic) -> Callable[[sympy.Basic], str]:
        return lambda expr: self.wide(expr) if expr == chosen else self.atom(expr)

    def may_exceed(self, tensor: t.Tensor) -> bool:
        """Whether an offset in the tensor may need more than 32 bits (also where its size is not known)."""
        extent = 0
        for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
            size, stride = sympy.sympify(size), sympy.sympify(stride)
            if not (size.is_Integer and stride.is_Integer):
                return True
            extent += max(int(size) - 1, 0) * int(stride)
        return extent > INT32
