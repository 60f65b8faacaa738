"""Plans of regions around linears: one group of products with a common input, its prologue, and an epilogue a segment of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from .digits import Atoms, Renderer, digits_of, linear_form, mixed_radix
from .index_map import ONE, ZERO, FloorDiv, Mod, Space, product
from .pull import Contraction, Moment, Puller, args_of, fail, fake, sizes_of
from .semantics import LINEARS, dsi
from .tile import C, Expr, K, LinearPlan, Load, Permuted, R, Reduction, Scale, Segment, Statistic, Store, WeightWindow, Window
from .translate import Translator, leaves, outputs_of, store, written_part
from .views import keyword

LARGEST_GROUP = 512  # columns that one program can hold whole: twice the largest head size in common use


@dataclass(frozen=True)
class _Weight:
    """Channel n of a linear is row `row(n)` of weight input `input`. The coordinates of `scale` are in n, too."""

    input: int
    kn: bool
    symbol: sympy.Symbol
    row: sympy.Expr
    scale: Scale | None = None


@dataclass
class _Segment:
    """A segment in the making."""

    size: int
    windows: list[WeightWindow]
    stores: list[Store] = field(default_factory=list)
    hold: int = 1
    reductions: list[Reduction] = field(default_factory=list)
    statistics: dict[tuple, int] = field(default_factory=dict)  # (norm node, its leading coordinates in r and c) -> reduction number


def plan_linear(body: fx.GraphModule) -> LinearPlan:
    """The plan of a body whose anchors are its linears. Raises `Refused`."""
    return _Planner(body).plan()


class _Planner:
    def __init__(self, body: fx.GraphModule):
        self.body = body
        self.space = Space()
        self.pull = Puller(body, self.space)
        self.linears = [n for n in body.graph.nodes if n.op == "call_function" and n.target in LINEARS]
        first = self.linears[0]
        *lead, self.inner = sizes_of(fake(args_of(first)[0]))
        self.rows = product(lead)
        self.x_dtype = fake(args_of(first)[0]).dtype
        self.activations: str = keyword(first, "activations", "")
        self.x: Expr | None = None
        self.reductions: list[Reduction] = []
        self._statistics: dict[tuple, int] = {}
        self.weights: dict[fx.Node, _Weight] = {}
        self.all_columns = 0
        self.segments: list[_Segment] = []
        self.row_stores: list[Store] = []

    def plan(self) -> LinearPlan:
        outputs = outputs_of(self.body)
        for linear in self.linears:
            self._anchor(linear)
        for number, node in enumerate(outputs):
            self._output(number, node)
        if not self.segments:
            raise fail(self.linears[0], f"no output of the region reads {self.linears[0].name}", 3)
        assert self.x is not None
        segments = tuple(
            Segment(sympy.Integer(s.size), tuple(s.windows), tuple(s.stores), s.hold, tuple(s.reductions)) for s in self.segments
        )
        return LinearPlan(
            self.rows, self.inner, self.x, self.x_dtype, segments, tuple(self.reductions), tuple(self.row_stores), self.activations
        )

    # ------------------------------------------------------------------------------------------------------------------- anchors

    def _anchor(self, linear: fx.Node) -> None:
        x, weight = args_of(linear)[:2]
        first = self.linears[0]
        if fake(weight).dtype != (torch.int8 if linear.target is dsi.linear_int8.default else fake(x).dtype):
            raise fail(linear, f"{linear.name} multiplies {_short(fake(x).dtype)} by a weight of {_short(fake(weight).dtype)}", 2)
        if fake(x).dtype != self.x_dtype or sizes_of(fake(x))[-1] != self.inner or product(sizes_of(fake(x))[:-1]) != self.rows:
            raise fail(linear, f"{linear.name} and {first.name} differ in dtype, rows or inner size, so they are no common anchor", 2)
        if keyword(linear, "activations", "") != self.activations:
            raise fail(linear, f"{linear.name} and {first.name} differ in what they round the common input to", 2)
        self.weights[linear] = self._weight(linear, weight)
        columns = sizes_of(fake(linear))[-1]
        if not columns.is_Integer or not self.inner.is_Integer:
            raise fail(linear, f"{linear.name} has a symbolic number of channels", 1)
        self.all_columns += int(columns)
        if linear is not first and x is args_of(first)[0]:
            return
        value = self._prologue(linear, x)
        if self.x is not None and value != self.x:
            raise fail(linear, f"{linear.name} reads {x.name}, another input than {first.name} reads ({args_of(first)[0].name})", 2)
        self.x = value

    def _weight(self, linear: fx.Node, weight: fx.Node) -> _Weight:
        kn = bool(linear.kwargs.get("kn", False))
        n = self.space.add(sympy.Symbol(f"n{len(self.weights)}_", integer=True, nonnegative=True), sizes_of(fake(linear))[-1])
        k = self.space.add(K, self.inner)
        value = self.pull.at(weight, (k, n) if kn else (n, k))
        if isinstance(value, Load) and len(value.coords) == 2:
            for stored_kn, (inner, row) in ((False, value.coords[::-1]), (True, value.coords)):
                if inner == k and isinstance(row, sympy.Expr) and k not in row.free_symbols:
                    return _Weight(value.input, stored_kn, n, row, self._scale(linear, n, k))
        raise fail(linear, f"the weight {weight.name} of {linear.name} is no input of the region, nor a slice of one", 2)

    def _scale(self, linear: fx.Node, n: sympy.Expr, k: sympy.Expr) -> Scale | None:
        if linear.target is not dsi.linear_int8.default:
            return None
        scales, group = args_of(linear)[2], keyword(linear, "group", 0)
        value = self.pull.at(scales, (n, self.space.floordiv(k, sympy.Integer(group))) if group else (n,))
        coords = [c for c in value.coords if isinstance(c, sympy.Expr)] if isinstance(value, Load) else []
        if not isinstance(value, Load) or len(coords) != len(value.coords) or value.dtype not in (torch.float32, torch.float16):
            reason = f"the scales {scales.name} of {linear.name} are no fp32 or fp16 input of the region, nor a slice of one"
            raise fail(linear, reason, 2)
        return Scale(value.input, tuple(coords), group if any(k in c.free_symbols for c in coords) else 0)

    # ------------------------------------------------------------------------------------------------------------------ prologue

    def _prologue(self, anchor: fx.Node, x: fx.Node) -> Expr:
        """A value of rows x inner elements at row r, inner k."""
        atoms = Atoms(self.space, sizes_of(fake(x)), f"x{len(self.row_stores)}_{len(self.weights)}_")
        translate = self._prologue_translator(x, atoms, len(atoms.coords) - 1)
        value = self.pull.at(x, atoms.coords)
        inside, _, through = leaves(self.pull, value)
        for contraction in (*inside, *through):
            if contraction.node is anchor or contraction.node.target not in LINEARS:
                raise fail(anchor, f"{anchor.name} contracts the result of another contraction, {contraction.node.name}", 7)
            raise fail(anchor, f"{anchor.name} contracts a value computed from {contraction.node.name}, another linear of the region", 7)
        return translate(value)

    def _prologue_translator(self, node: fx.Node, atoms: Atoms, leading: int) -> Translator:
        """Dimensions before `leading` are digits of r, the others of k."""
        space = Space({R: self.rows, K: self.inner})
        digits = {}
        for base, part in ((R, atoms.coords[:leading]), (K, atoms.coords[leading:])):
            order = [c for c in reversed(part) if c != 0]
            digits.update(digits_of(base, order, atoms.atoms))
        render = Renderer(space, digits)

        def moment(leaf: Moment) -> Expr:
            body = self.pull.moments[leaf.node, leaf.lead]
            lead = tuple(render(c) for c in leaf.lead)
            if body.size != self.inner:
                raise fail(leaf.node, f"{leaf.node.name} reduces {body.size} elements, and its linear contracts {self.inner}", 5)
            if any(K in c.free_symbols for c in lead):
                raise fail(leaf.node, f"{leaf.node.name} is taken along another dimension than its linear contracts", 5)
            key = (leaf.node, lead)
            if key not in self._statistics:
                inner = Renderer(space, {**digits, **digits_of(K, [body.over], {body.over: body.size})})
                reduced = Translator(inner, translate.contraction, translate.moment)(body.body)
                self._statistics[key] = len(self.reductions)
                self.reductions.append(Reduction(body.kind, reduced, K, self.inner, body.eps))
            return Statistic(self._statistics[key], leaf.which)

        def contraction(leaf: Contraction) -> Expr:
            raise fail(node, f"{node.name} is computed from {leaf.node.name}, another contraction", 7)

        translate = Translator(render, contraction, moment)
        return translate

    def _row_store(self, number: int, node: fx.Node) -> None:
        """An output that no anchor enters: a value of the prologue that escapes."""
        part, _, _ = written_part(self.pull, node)
        sizes = sizes_of(fake(part))
        leading = next((i for i in range(len(sizes) + 1) if product(sizes[:i]) == self.rows and product(sizes[i:]) == self.inner), None)
        if leading is None:
            shape = f"[{', '.join(map(str, sizes))}]"
            raise fail(
                node, f"{node.name} {shape} depends on no anchor and is not one value a row and inner index ({self.rows} x {self.inner})", 8
            )
        # Where a size-1 dimension may go to either side, the choice does not matter.
        atoms = Atoms(self.space, sizes, f"p{number}_")
        translate = self._prologue_translator(node, atoms, leading)
        self.row_stores.append(store(self.pull, number, node, atoms.coords, self.pull.at(part, atoms.coords), translate))

    # ------------------------------------------------------------------------------------------------------------------ epilogue

    def _place(self, leaf: Contraction) -> tuple[sympy.Expr, sympy.Expr]:
        """(flat row, weight row) of a linear's element, over atoms."""
        flat, stride = [], ONE
        sizes = sizes_of(fake(leaf.node))
        for c, n in zip(reversed(leaf.at[:-1]), reversed(sizes[:-1]), strict=True):
            flat.append(c * stride)
            stride = stride * n
        weight = self.weights[leaf.node]
        return self.space.join(sympy.Add(*flat)), self.space.substitute(weight.row, {weight.symbol: leaf.at[-1]})

    def _output(self, number: int, node: fx.Node) -> None:
        part, _, _ = written_part(self.pull, node)
        atoms = Atoms(self.space, sizes_of(fake(part)), f"o{number}_")
        while True:
            value = self.pull.at(part, atoms.coords)
            direct, _, through = leaves(self.pull, value)
            for leaf in (*direct, *through):
                if leaf.node.target not in LINEARS:
                    raise fail(leaf.node, f"{leaf.node.name} is a second contraction", 7)
            places = {leaf: self._place(leaf) for leaf in (*direct, *through)}
            again, cut = atoms.split(e for place in places.values() for e in place)
            if cut is not None:
                raise fail(node, f"{node.name} cuts a dimension of {atoms.atoms[cut.args[0]]} elements into pieces of {cut.args[1]}", 1)
            if not again:
                break
        if not direct and not through:
            self._row_store(number, node)
            return
        _Epilogue(self, number, node, atoms, value, places, direct).run()


class _Epilogue:
    """One output of a linear region, over atoms: its rows, its columns, the segment it belongs to."""

    def __init__(
        self,
        planner: _Planner,
        number: int,
        node: fx.Node,
        atoms: Atoms,
        value: Expr,
        places: dict[Contraction, tuple[sympy.Expr, sympy.Expr]],
        direct: list[Contraction],
    ):
        self.planner, self.pull, self.space = planner, planner.pull, planner.space
        self.number, self.node, self.atoms, self.value, self.places = number, node, atoms, value, places
        self.direct = direct

    def run(self) -> None:
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
        space = Space({R: self.planner.rows, C: sympy.Integer(size)})
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
        if row.has(FloorDiv, Mod):
            raise fail(self.node, f"{self.node.name} regroups dimensions of {leaf.node.name} so that they are cut: its row is {row}", 1)
        if digits is None or digits[1] != self.planner.rows:
            raise fail(
                self.node,
                f"{self.node.name} reads row {row} of {leaf.node.name}, which is not every one of its {self.planner.rows} rows once",
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

    def _segment(self, size: int, candidates: list[Contraction]) -> _Segment:
        for segment in self.planner.segments:
            if segment.size == size and any(self._weight_window(leaf) in segment.windows for leaf in candidates):
                return segment
        segment = _Segment(size, [self._weight_window(candidates[0])])
        self.planner.segments.append(segment)
        return segment

    def _weight_window(self, leaf: Contraction) -> WeightWindow:
        weight = self.planner.weights[leaf.node]
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
            self.places[leaf] = self.planner._place(leaf)
            if self.places[leaf][0] != next(iter(self.places.values()))[0]:
                raise fail(self.node, f"{self.node.name} mixes rows of {leaf.node.name}", 3)
        found = self._find(leaf)
        if found is not None:
            return Window(found)
        mine = self.planner.weights[leaf.node]
        for other, index in self.known:
            theirs = self.planner.weights[other.node]
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
        if hold > LARGEST_GROUP or hold == self.planner.all_columns:
            group = f"all {hold} columns of the anchor" if hold == self.planner.all_columns else f"a group of {hold} columns"
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
        if body.size == self.planner.all_columns:
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
