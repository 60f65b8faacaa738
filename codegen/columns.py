"""How the columns of a linear segment are laid out in tiles.

Rope mixes pairs of columns half a head (or one column) apart. Instead of moving values between the lanes of a tile, a segment's groups of
`hold` columns are cut into *parts* such that partners have the same position in different parts: each part has an accumulator of its own,
and a permuted value is just another part's. A tile position is named by u: column u of part p is hold * (u // lanes) + offset + p * lanes
+ u % lanes. Half-split rope has two parts of half a head; interleaved rope has hold 2, and so parts of even and of odd columns; channels
that rope leaves alone are a set of columns of their own.

Where no cut into parts explains a permutation, tiles hold whole groups and the accumulator is gathered (`tl.gather` compiles for every
layout, but takes many registers: a 64 x 128 tile spills). Norms over groups need whole groups too; these are padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy
from dsi.ir import tile as t

from .integers import Limits, Quotient, Remainder, normalise
from .printer import Point, moved

U = sympy.Symbol("u", integer=True, nonnegative=True)
MOST_PARTS = 16  # tried
MOST_PARTS_TOGETHER = 4  # with an accumulator each in one tile


@dataclass(frozen=True)
class Columns:
    """Some of a segment's columns: of every group of `hold`, `lanes` columns in each of `parts` parts, from `offset` on. `held`: tiles
    hold whole groups."""

    size: sympy.Expr
    hold: int
    lanes: int
    parts: int = 1
    offset: int = 0
    held: bool = False

    @property
    def padded(self) -> int:
        """Lanes of a group with padding, in a tile that holds whole groups."""
        return 1 << (self.lanes - 1).bit_length() if self.held else 1

    @property
    def positions(self) -> sympy.Expr:
        """Columns of each part."""
        return sympy.sympify(self.size) if self.lanes == self.hold else sympy.sympify(self.size) / self.hold * self.lanes

    def groups(self, block_n: int) -> int:
        """Groups in a tile of `block_n` positions."""
        return max(block_n // self.padded, 1)

    def width(self, block_n: int) -> int:
        """Positions that one program owns, padding apart."""
        return self.lanes * self.groups(block_n) if self.held else block_n

    def programs(self, block_n: int) -> sympy.Expr:
        """Programs that share the segment's columns."""
        return ceil_div(self.positions, self.width(block_n))

    def column(self, part: int) -> sympy.Expr:
        """The column at position u of a part."""
        if self.lanes == self.hold:
            return U
        return self.hold * Quotient(U, self.lanes) + self.offset + part * self.lanes + Remainder(U, self.lanes)

    def limits(self) -> dict[sympy.Symbol, tuple[sympy.Expr, ...]]:
        return {U: (self.positions,)}

    def part_of(self, column: sympy.Expr, limits: Limits) -> int | None:
        """The part whose position u is `column`, None if there is none."""
        for part in range(self.parts):
            if normalise(column - self.column(part), limits) == 0:
                return part
        return None


def ceil_div(size: sympy.Expr, by: int) -> sympy.Expr:
    """ceil(size / by), as a plain number where the size is one."""
    size = sympy.sympify(size)
    return sympy.Integer(-(-int(size) // by)) if size.is_Integer else Quotient(size + by - 1, by)


# By identity: hashing a segment walks its expressions as trees, which shared subexpressions can make very large.
_known: dict[int, tuple[t.Segment, tuple[Columns, ...]]] = {}


def columns_of(segment: t.Segment) -> tuple[Columns, ...]:
    """A segment's columns as sets that are computed apart.

    The finest even cut of the groups that explains every permuted value as another part's decides: parts that read one another are one
    set, runs of parts that no one else reads another (the channels behind those that rope turns). Norms over groups keep all parts
    together. Where no cut explains the permutations, there is one set of whole groups.
    """
    known = _known.get(id(segment))
    if known is None:
        if len(_known) > 1000:
            _known.clear()
        known = _known[id(segment)] = (segment, _cut(segment))
    return known[1]


def cuts_of(plan: t.LinearPlan) -> list[tuple[int, t.Segment, Columns]]:
    """(segment number, segment, columns) of everything that programs share out, in the order of programs.

    A segment whose columns stand alone is cut into as many runs as the others have parts, where it can be, so that each program has the
    same amount of a weight to read: where q and k are halves of heads side by side, v is two runs of columns.
    """
    found = [(number, segment, columns) for number, segment in enumerate(plan.segments) for columns in columns_of(segment)]
    most = max(columns.parts for _, _, columns in found)
    result = []
    for number, segment, columns in found:
        size = columns.size
        alone = columns.parts == 1 and not columns.held and columns.lanes == columns.hold
        if alone and most > 1 and size.is_Integer and int(size) % most == 0:
            columns = Columns(size, int(size), int(size) // most, most)
        result.append((number, segment, columns))
    return result


def _cut(segment: t.Segment) -> tuple[Columns, ...]:
    size, hold = sympy.sympify(segment.size), int(segment.hold)
    norms = bool(segment.reductions)
    for parts in range(1, (MOST_PARTS_TOGETHER if norms else MOST_PARTS) + 1) if size.is_Integer else (1,):
        if hold % parts or (parts > 1 and any(int(r.size) != hold for r in segment.reductions)):
            continue
        # Parts of whole runs of a group's columns; or of every so-manieth column.
        for group in (hold,) if norms or parts in (1, hold) else (hold, parts):
            together = Columns(size, group, group // parts, parts, held=norms)
            found = [_partners(segment, together, part) for part in range(parts)]
            partners = [part for part in found if part is not None]
            if len(partners) < parts:
                continue
            sets = [] if norms else _sets(together, partners)
            if sets:
                return tuple(sets)
            if norms or parts <= MOST_PARTS_TOGETHER:
                return (together,)
    return (Columns(size, hold, hold, held=True),)


def _partners(segment: t.Segment, columns: Columns, part: int) -> frozenset[int] | None:
    """The parts whose windows a part's stores read; None where a permutation leads to no part's position."""
    limits = columns.limits()
    here = {t.C: columns.column(part)}
    roots = [*(store.value for store in segment.stores), *(reduction.body for reduction in segment.reductions)]
    found = {part}
    for column in _permuted(roots, here, limits):
        other = columns.part_of(normalise(column.xreplace(here), limits), limits)
        if other is None:
            return None
        found.add(other)
    return frozenset(found)


def _sets(columns: Columns, partners: list[frozenset[int]]) -> list[Columns]:
    """Parts that read one another, and runs of parts that read only themselves; [] where the former are not next to each other."""
    sets: list[Columns] = []
    part = 0
    while part < columns.parts:
        last = part
        reach = part
        while last <= reach and last < columns.parts:
            if min(partners[last]) < part:
                return []
            reach = max(reach, *partners[last])
            last += 1
        count = reach - part + 1
        if count > MOST_PARTS_TOGETHER:
            return []
        if count == 1:
            while (
                part + count < columns.parts
                and partners[part + count] == {part + count}
                and not any(part + count in other for other in partners[part + count + 1 :])
            ):
                count += 1
            sets.append(replace(columns, lanes=columns.lanes * count, parts=1, offset=part * columns.lanes))
        else:
            sets.append(replace(columns, parts=count, offset=part * columns.lanes))
        part += count
    return sets


def _permuted(roots: list[t.Expr], here: dict[sympy.Symbol, sympy.Expr], limits: Limits) -> Iterator[sympy.Expr]:
    """The columns, over c, at which windows are read through a permutation, as far as tests that are decided for this part lead there."""
    seen: set[tuple[int, Point]] = set()
    stack: list[tuple[t.Expr, Point]] = [(root, ()) for root in roots]
    while stack:
        expr, point = stack.pop()
        if (id(expr), point) in seen:
            continue
        seen.add((id(expr), point))
        if isinstance(expr, t.Window) and dict(point).get(t.C, t.C) != t.C:
            yield dict(point)[t.C]
        if isinstance(expr, t.Op) and expr.name == "where" and isinstance(expr.args[0], t.Test):
            decided = normalise(expr.args[0].condition.xreplace(dict(point)).xreplace(here), limits)
            branches = expr.args[1:] if decided not in (sympy.true, sympy.false) else (expr.args[1 if decided == sympy.true else 2],)
            stack.extend((branch, point) for branch in branches)
        elif isinstance(expr, t.Permuted):
            stack.append((expr.body, moved(expr, point)))
        else:
            stack.extend((part, point) for part in t.children(expr))
