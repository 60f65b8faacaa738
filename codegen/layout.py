"""How values lie in a tile: which block variable stands for each symbol, along which axes it varies, what masks the axes have; and
expressions as keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy
from dsi.ir import tile as t

from .integers import ATOM

if TYPE_CHECKING:
    from .columns import Columns

Point = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
Guard = tuple[sympy.Basic, ...]
# The subscript that lays a 1-d block variable along one axis of a tile of 0 to 3 axes.
SUBSCRIPTS = {0: (), 1: ("",), 2: ("[:, None]", "[None, :]"), 3: ("[:, None, None]", "[None, :, None]", "[None, None, :]")}


@dataclass(frozen=True)
class Text:
    """Source of a value: the axes it varies along (none: a scalar), how strongly it binds, and the number if it is a literal."""

    code: str
    axes: frozenset[int] = frozenset()
    strength: int = ATOM
    number: float | int | bool | None = None

    def at(self, strength: int) -> str:
        return f"({self.code})" if self.strength < strength else self.code


@dataclass(frozen=True)
class Bound:
    """The block variable that stands for a symbol, and the axes it varies along."""

    code: str
    axes: frozenset[int] = frozenset()


@dataclass
class Tile:
    """The layout of a tile: source text of each axis's size; symbols; masks by axis (source text, only where needed).

    `fixed` replaces symbols before anything is printed (a dimension of size 1; a column by its position in a part). `accumulators` are
    the anchor's sums by window and part, `statistics` those of row statistics. `columns` and `part` say how the tile's columns are laid
    out, and `group_start` is the source (1-d) of where each column's group starts within the tile ("" where there is one group). `thin`:
    values of two bytes along these axes alone are loaded once for every point of the tile.
    """

    shape: tuple[str, ...]
    bound: dict[sympy.Symbol, Bound]
    masks: dict[int, str] = field(default_factory=dict)
    fixed: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    limits: dict[sympy.Symbol, tuple[sympy.Expr, ...]] = field(default_factory=dict)
    accumulators: dict[tuple[int, int], Text] = field(default_factory=dict)
    statistics: dict[tuple[int, str], Text] = field(default_factory=dict)
    columns: Columns | None = None
    part: int = 0
    group_start: str = ""
    thin: frozenset[int] = frozenset()

    def dims(self, axes: Iterable[int]) -> str:
        wanted = set(axes)
        return "[" + ", ".join(size if axis in wanted else "1" for axis, size in enumerate(self.shape)) + "]"


class Interner:
    """Numbers structurally equal expressions alike, without walking a shared subexpression twice."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[t.Expr, int]] = {}
        self._numbers: dict[object, int] = {}
        self._symbols: dict[int, frozenset[sympy.Symbol]] = {}

    def number(self, expr: t.Expr) -> int:
        known = self._by_id.get(id(expr))
        if known is not None:
            return known[1]
        if isinstance(expr, t.Op):
            key: object = ("op", expr.name, tuple(self.number(a) for a in expr.args), expr.dtype)
        elif isinstance(expr, t.Load):
            key = (
                "load",
                expr.input,
                tuple(self.number(c) if isinstance(c, t.Expr) else sympy.sympify(c) for c in expr.coords),
                expr.dtype,
            )
        elif isinstance(expr, t.Permuted):
            key = ("permuted", self.number(expr.body), expr.symbol, expr.source)
        elif isinstance(expr, t.Const):
            key = ("const", repr(expr.value), expr.dtype)
        else:
            key = expr
        number = self._numbers.setdefault(key, len(self._numbers))
        self._by_id[id(expr)] = (expr, number)
        if number not in self._symbols:
            parts = t.children(expr)
            own: set[sympy.Symbol] = set()
            for part in parts:
                own |= self.symbols(part)
            if isinstance(expr, t.Load):
                own |= {s for c in expr.coords if not isinstance(c, t.Expr) for s in sympy.sympify(c).free_symbols}
            elif isinstance(expr, t.Index):
                own |= expr.expr.free_symbols
            elif isinstance(expr, t.Test):
                own |= expr.condition.free_symbols
            elif isinstance(expr, t.Permuted):
                own |= expr.source.free_symbols
            elif isinstance(expr, t.Statistic):
                own |= {t.R}
            elif isinstance(expr, t.Window):
                own |= {t.R, t.C}
            self._symbols[number] = frozenset(own)
        return number

    def symbols(self, expr: t.Expr) -> frozenset[sympy.Symbol]:
        """The symbols that an expression depends on."""
        return self._symbols[self.number(expr)]


def moved(expr: t.Permuted, point: Point) -> Point:
    """The point, over the plan's symbols, at which a permuted body is taken if the whole is taken at `point`."""
    after = {**dict(point), expr.symbol: expr.source.xreplace(dict(point))}
    return tuple(sorted(after.items(), key=lambda item: str(item[0])))
