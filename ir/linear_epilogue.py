"""What a linear region computes behind its products: each output's columns, the windows of weights that it reads there, and its groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from .digits import Atoms, Renderer, digits_of, linear_form, mixed_radix
from .index_map import ONE, ZERO, FloorDiv, Mod, Space, product
from .linear_anchors import Anchors
from .pull import Contraction, Moment, args_of, fail
from .tile import C, Expr, Permuted, R, Reduction, Scale, Segment, Statistic, Store, WeightWindow, Window
from .translate import Translator, leaves, store

LARGEST_GROUP = 512  # columns that one program can hold whole: twice the largest head size in common use


@dataclass
class SegmentDraft:
    """A segment in the making."""

    size: int
    windows: list[WeightWindow]
    stores: list[Store] = field(default_factory=list)
    hold: int = 1
    reductions: list[Reduction] = field(default_factory=list)
    statistics: dict[tuple, int] = field(default_factory=dict)  # (norm node, its leading coordinates in r and c) -> reduction number

    def finished(self) -> Segment:
        """The segment as it is."""
        return Segment(sympy.Integer(self.size), tuple(self.windows), tuple(self.stores), self.hold, tuple(self.reductions))


class Epilogue:
    """One output of a linear region, over atoms: its rows, its columns, the segment it belongs to."""

    def __init__(
        self,
        anchors: Anchors,
        segments: list[SegmentDraft],
        number: int,
        node: fx.Node,
        atoms: Atoms,
        value: Expr,
        places: dict[Contraction, tuple[sympy.Expr, sympy.Expr]],
        direct: list[Contraction],
    ):
        self.anchors, self.pull, self.space = anchors, anchors.pull, anchors.space
        self.segments = segments
        self.number, self.node, self.atoms, self.value, self.places = number, node, atoms, value, places
        self.direct = direct

    def run(self) -> None:
        """Add the output to the segment that it belongs to, an own one if need be. Raises `Refused`."""
        row_order = self._rows()
        columns = [a for a in self.atoms.atoms if a not in row_order]
        candidates = [leaf for leaf in self.direct if self._covers(self.places[leaf][1], columns)]
        if not candidates:
            leaf = (self.direct or list(self.places))[0]
            reason = f"{self.node.name} reads column {self.places[leaf][1]} of {leaf.node.name}, which does not number its own columns"
            raise fail(self.node, reason, 3)
        form = linear_form(self.places[candidates[0]][1], columns)
        assert form is not None
        self.order = sorted(columns, key=lambda a: int(form[0][a]))
        sizes = self.atoms.atoms
        size = int(product(sizes[a] for a in columns))
        space = Space({R: self.anchors.rows, C: sympy.Integer(size)})
        self.render = Renderer(space, {**digits_of(R, row_order, sizes), **digits_of(C, self.order, sizes)})
        self.segment = self._segment(size, candidates)
        self.known: list[tuple[Contraction, int]] = []  # leaves that have a window of their own
        for leaf in candidates:
            found = self._find(leaf)
            if found is not None:
                self.known.append((leaf, found))
        translate = Translator(self.render, self._window, self._statistic)
        self.translate = translate
        self.segment.stores.append(store(self.pull, self.number, self.node, self.atoms.coords, self.value, translate))

    def _rows(self) -> list[sympy.Symbol]:
        (row, _), *others = self.places.values()
        leaf = next(iter(self.places))
        for other in others:
            if other[0] != row:
                raise fail(self.node, f"{self.node.name} mixes rows {row} and {other[0]} of {leaf.node.name}", 3)
        form = linear_form(row, self.atoms.atoms)
        digits = mixed_radix(form[0], self.atoms.atoms) if form is not None and form[1] == 0 else None
        if any(cut.free_symbols & self.atoms.atoms.keys() for cut in row.atoms(FloorDiv, Mod)):  # a size may be a quotient
            raise fail(self.node, f"{self.node.name} regroups dimensions of {leaf.node.name} so that they are cut: its row is {row}", 1)
        if digits is None or digits[1] != self.anchors.rows:
            raise fail(
                self.node,
                f"{self.node.name} reads row {row} of {leaf.node.name}, which is not every one of its {self.anchors.rows} rows once",
                3,
            )
        return digits[0]

    def _covers(self, column: sympy.Expr, columns: list[sympy.Symbol]) -> bool:
        """Whether `column` is a sum over all column atoms that gives every point a column of its own."""
        form = linear_form(column, self.atoms.atoms)
        if form is None or form[0].keys() != set(columns) or not form[1].is_Integer:
            return False
        reach = 0
        for scale, size in sorted(((form[0][a], self.atoms.atoms[a]) for a in columns), key=lambda e: (not e[0].is_Integer, str(e))):
            if not (scale.is_Integer and size.is_Integer and scale > 0):
                return False
        for scale, size in sorted((int(form[0][a]), int(self.atoms.atoms[a])) for a in columns):
            if scale <= reach:
                return False
            reach += scale * (size - 1)
        return True

    def _segment(self, size: int, candidates: list[Contraction]) -> SegmentDraft:
        for segment in self.segments:
            if segment.size == size and any(self._weight_window(leaf) in segment.windows for leaf in candidates):
                return segment
        segment = SegmentDraft(size, [self._weight_window(candidates[0])])
        self.segments.append(segment)
        return segment

    def _weight_window(self, leaf: Contraction) -> WeightWindow:
        weight = self.anchors.weights[leaf.node]
        scale = weight.scale
        if scale is not None:
            coords = (self.space.substitute(c, {weight.symbol: leaf.at[-1]}) for c in scale.coords)
            scale = Scale(scale.input, tuple(map(self.render, coords)), scale.group)
        return WeightWindow(weight.input, self.render(self.places[leaf][1]), weight.kn, scale)

    def _find(self, leaf: Contraction) -> int | None:
        window = self._weight_window(leaf)
        return self.segment.windows.index(window) if window in self.segment.windows else None

    def _window(self, leaf: Contraction) -> Expr:
        """A window of the segment, a permuted one, or a new one."""
        if leaf not in self.places:  # met only where a moment's body is pulled again
            self.places[leaf] = self.anchors.place(leaf)
            if self.places[leaf][0] != next(iter(self.places.values()))[0]:
                raise fail(self.node, f"{self.node.name} mixes rows of {leaf.node.name}", 3)
        found = self._find(leaf)
        if found is not None:
            return Window(found)
        mine = self.anchors.weights[leaf.node]
        for other, index in self.known:
            theirs = self.anchors.weights[other.node]
            if (theirs.input, theirs.kn, theirs.scale and theirs.scale.input) == (mine.input, mine.kn, mine.scale and mine.scale.input):
                partner = self._partner(self.places[leaf][1], self.places[other][1])
                if partner is not None:
                    hold, source = partner
                    self._hold(hold, f"{self.node.name}, by a permutation,", 4)
                    return Permuted(Window(index), C, self.render(source), torch.float32)
        if not self._covers(self.places[leaf][1], self.order):
            reason = (
                f"{self.node.name} reads column {self.places[leaf][1]} of {leaf.node.name}, neither its own column nor one in its group"
            )
            raise fail(self.node, reason, 4)
        self.segment.windows.append(self._weight_window(leaf))
        self.known.append((leaf, len(self.segment.windows) - 1))
        return Window(len(self.segment.windows) - 1)

    def _partner(self, column: sympy.Expr, own: sympy.Expr) -> tuple[int, sympy.Expr] | None:
        """(group size, column of the segment) if weight row `column` is in the same aligned group of columns as `own`, for the smallest
        such group."""
        form = linear_form(own, self.order)
        assert form is not None
        rest, place, high = column - form[1], ONE, ZERO
        for a in self.order:
            rest = rest - form[0][a] * a
            high = high + place * a
            place = place * self.atoms.atoms[a]
        place = ONE
        for a in self.order:
            if form[0][a] != place:
                return None
            rest, high = rest + place * a, high - place * a
            place = place * self.atoms.atoms[a]
            others = self.atoms.atoms.keys() - set(self.order[: self.order.index(a) + 1])
            if not (rest.free_symbols & others) and self.space.within(rest, place):
                return int(place), high + rest
        return None

    def _hold(self, hold: int, by: str, rule: int) -> None:
        if hold > LARGEST_GROUP or hold == self.anchors.all_columns:
            group = f"all {hold} columns of the anchor" if hold == self.anchors.all_columns else f"a group of {hold} columns"
            raise fail(self.node, f"{by} works on {group}, which no program owns", rule)
        both = math.lcm(self.segment.hold, hold)
        if both != max(self.segment.hold, hold):
            raise fail(self.node, f"{self.node.name} groups columns by {hold}, another output of its segment by {self.segment.hold}", 4)
        self.segment.hold = both

    def _statistic(self, leaf: Moment) -> Expr:
        """A norm over a held group of columns."""
        body = self.pull.moments[leaf.node, leaf.lead]
        if not any(leaves(self.pull, body.body)[::2]):
            raise fail(leaf.node, f"the epilogue reads {leaf.node.name}, a reduction of region inputs", 4)
        if body.size == self.anchors.all_columns:
            raise fail(leaf.node, f"{leaf.node.name} reduces all {body.size} columns of the anchor", 6)
        low, place = [], ONE
        for a in self.order:
            if place == body.size:
                break
            low.append(a)
            place = place * self.atoms.atoms[a]
        if place != body.size or any(c.free_symbols & set(low) for c in leaf.lead):
            raise fail(leaf.node, f"{leaf.node.name} reduces {body.size} columns that are no aligned group", 6)
        lead = tuple(self.render(c) for c in leaf.lead)
        key = (leaf.node, lead)
        if key not in self.segment.statistics:
            position, place = ZERO, ONE
            for a in low:
                position = position + place * a
                place = place * self.atoms.atoms[a]
            reduced = self.translate(self.pull.at(args_of(leaf.node)[0], (*leaf.lead, position)))
            self._hold(int(place), leaf.node.name, 6)
            self.segment.statistics[key] = len(self.segment.reductions)
            self.segment.reductions.append(Reduction(body.kind, reduced, C, place, body.eps))
        return Statistic(self.segment.statistics[key], leaf.which)
