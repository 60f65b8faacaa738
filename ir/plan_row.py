"""Plans of regions without a contraction: embeddings, norms, pointwise work, over rows and columns."""

from __future__ import annotations

import sympy
from torch import fx

from .digits import Atoms, Digit, Renderer, digits_of, linear_form, mixed_radix
from .index_map import ONE, Space, product
from .pull import Contraction, Moment, Puller, args_of, fail, fake, sizes_of
from .tile import C, Expr, R, Reduction, RowPlan, Statistic, Store
from .translate import Translator, leaves, outputs_of, store, written_part


def plan_row(body: fx.GraphModule) -> RowPlan:
    """The plan of a body without an anchor. Raises `Refused`."""
    return _Planner(body).plan()


class _Planner:
    def __init__(self, body: fx.GraphModule):
        self.space = Space()
        self.pull = Puller(body, self.space)
        self.outputs = outputs_of(body)
        self.rows: sympy.Expr = ONE
        self.columns: sympy.Expr = ONE
        self.reductions: list[Reduction] = []
        self._statistics: dict[tuple, int] = {}

    def plan(self) -> RowPlan:
        pulled = [self._pull(number, node) for number, node in enumerate(self.outputs)]
        norms = [m for _, _, moments in pulled for m in moments]
        if norms:
            *lead, self.columns = sizes_of(fake(args_of(norms[0].node)[0]))
            self.rows = product(lead)
        else:
            part, _, _ = written_part(self.pull, self.outputs[0])
            sizes = sizes_of(fake(part))
            self.rows, self.columns = product(sizes[:-1]), sizes[-1] if sizes else ONE
        stores = tuple(self._store(number, node, *pulled[number]) for number, node in enumerate(self.outputs))
        return RowPlan(self.rows, self.columns, stores, tuple(self.reductions))

    def _pull(self, number: int, node: fx.Node) -> tuple[Atoms, Expr, list[Moment]]:
        part, _, _ = written_part(self.pull, node)
        atoms = Atoms(self.space, sizes_of(fake(part)), f"o{number}_")
        while True:
            value = self.pull.at(part, atoms.coords)
            _, moments, _ = leaves(self.pull, value)
            again, cut = atoms.split(e for m in moments for e in m.lead)
            if cut is not None:
                raise fail(node, f"{node.name} cuts a dimension of {atoms.atoms[cut.args[0]]} elements into pieces of {cut.args[1]}", 1)
            if not again:
                return atoms, value, moments

    def _flat_row(self, moment: Moment) -> sympy.Expr:
        flat, stride = [], ONE
        sizes = sizes_of(fake(args_of(moment.node)[0]))[:-1]
        for c, n in zip(reversed(moment.lead), reversed(sizes), strict=True):
            flat.append(c * stride)
            stride = stride * n
        return self.space.join(sympy.Add(*flat))

    def _digits(self, node: fx.Node, atoms: Atoms, moments: list[Moment]) -> dict[sympy.Symbol, Digit]:
        direct = [m for m in moments if not (m.lead and any(c.free_symbols - atoms.atoms.keys() & self.space.sizes.keys() for c in m.lead))]
        for moment in direct:
            # The rows of the output are those of the norm; whatever is left, in order, are its columns.
            form = linear_form(self._flat_row(moment), atoms.atoms)
            order = mixed_radix(form[0], atoms.atoms) if form is not None and form[1] == 0 else None
            if order is None or order[1] != self.rows:
                continue
            columns = [a for c in reversed(atoms.coords) for a in _low_first(c, atoms) if a not in order[0]]
            if product(atoms.atoms[a] for a in columns) == self.columns:
                return {**digits_of(R, order[0], atoms.atoms), **digits_of(C, columns, atoms.atoms)}
        if direct:
            raise fail(node, f"{node.name} does not hold every row of {direct[0].node.name} once", 3)
        part, _, _ = written_part(self.pull, node)
        sizes = sizes_of(fake(part))
        for i in range(len(sizes) + 1):
            if product(sizes[:i]) == self.rows and product(sizes[i:]) == self.columns:
                digits = {}
                for base, coords in ((R, atoms.coords[:i]), (C, atoms.coords[i:])):
                    digits.update(digits_of(base, [a for c in reversed(coords) for a in _low_first(c, atoms)], atoms.atoms))
                return digits
        shape = f"[{', '.join(map(str, sizes))}]"
        raise fail(node, f"{node.name} {shape} has not the {self.rows} rows of {self.columns} columns of the region's other values", 3)

    def _store(self, number: int, node: fx.Node, atoms: Atoms, value: Expr, moments: list[Moment]) -> Store:
        digits = self._digits(node, atoms, moments)
        space = Space({R: self.rows, C: self.columns})
        render = Renderer(space, digits)

        def moment(leaf: Moment) -> Expr:
            body = self.pull.moments[leaf.node, leaf.lead]
            if body.size != self.columns:
                raise fail(leaf.node, f"{leaf.node.name} reduces {body.size} elements, the region has {self.columns} columns", 6)
            lead = tuple(render(c) for c in leaf.lead)
            if any(c.free_symbols & {C, *self.space.sizes} for c in lead):
                raise fail(leaf.node, f"{leaf.node.name} has another value for each column of {node.name}", 6)
            key = (leaf.node, lead)
            if key not in self._statistics:
                inner = Renderer(space, {**digits, **digits_of(C, [body.over], {body.over: body.size})})
                reduced = Translator(inner, contraction, moment)(body.body)
                self._statistics[key] = len(self.reductions)
                self.reductions.append(Reduction(body.kind, reduced, C, self.columns, body.eps))
            return Statistic(self._statistics[key], leaf.which)

        def contraction(leaf: Contraction) -> Expr:
            raise AssertionError(leaf)

        return store(self.pull, number, node, atoms.coords, value, Translator(render, contraction, moment))


def _low_first(coordinate: sympy.Expr, atoms: Atoms) -> list[sympy.Symbol]:
    """The atoms of one dimension, lowest place first."""
    form = linear_form(coordinate, atoms.atoms)
    assert form is not None
    digits = mixed_radix(form[0], atoms.atoms)
    assert digits is not None
    return digits[0]
