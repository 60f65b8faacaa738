"""What a linear region computes before its products: their common input at a row and an inner index, with the statistics of its norms."""

from __future__ import annotations

from torch import fx

from .digits import Atoms, Renderer, digits_of
from .index_map import Space, product
from .linear_anchors import Anchors
from .pull import Contraction, Moment, fail, fake, sizes_of
from .semantics import LINEARS
from .tile import Expr, K, R, Reduction, Statistic, Store
from .translate import Translator, leaves, store, written_part


class Prologue:
    """Values over rows and inner indices: the `reductions` that they need, and the `stores` of those that leave the region."""

    def __init__(self, anchors: Anchors):
        self.anchors, self.pull = anchors, anchors.pull
        self.reductions: list[Reduction] = []
        self.stores: list[Store] = []
        self._statistics: dict[tuple, int] = {}

    def value(self, anchor: fx.Node, x: fx.Node) -> Expr:
        """A value of rows x inner elements at row r, inner k."""
        atoms = Atoms(self.anchors.space, sizes_of(fake(x)), f"x{len(self.stores)}_{len(self.anchors.weights)}_")
        translate = self._translator(x, atoms, len(atoms.coords) - 1)
        value = self.pull.at(x, atoms.coords)
        inside, _, through = leaves(self.pull, value)
        for contraction in (*inside, *through):
            if contraction.node is anchor or contraction.node.target not in LINEARS:
                raise fail(anchor, f"{anchor.name} contracts the result of another contraction, {contraction.node.name}", 7)
            raise fail(anchor, f"{anchor.name} contracts a value computed from {contraction.node.name}, another linear of the region", 7)
        return translate(value)

    def _translator(self, node: fx.Node, atoms: Atoms, leading: int) -> Translator:
        """Dimensions before `leading` are digits of r, the others of k."""
        space = Space({R: self.anchors.rows, K: self.anchors.inner})
        digits = {}
        for base, part in ((R, atoms.coords[:leading]), (K, atoms.coords[leading:])):
            order = [c for c in reversed(part) if c != 0]
            digits.update(digits_of(base, order, atoms.atoms))
        render = Renderer(space, digits)

        def moment(leaf: Moment) -> Expr:
            body = self.pull.moments[leaf.node, leaf.lead]
            lead = tuple(render(c) for c in leaf.lead)
            if body.size != self.anchors.inner:
                raise fail(leaf.node, f"{leaf.node.name} reduces {body.size} elements, and its linear contracts {self.anchors.inner}", 5)
            if any(K in c.free_symbols for c in lead):
                raise fail(leaf.node, f"{leaf.node.name} is taken along another dimension than its linear contracts", 5)
            key = (leaf.node, lead)
            if key not in self._statistics:
                inner = Renderer(space, {**digits, **digits_of(K, [body.over], {body.over: body.size})})
                reduced = Translator(inner, translate.contraction, translate.moment)(body.body)
                self._statistics[key] = len(self.reductions)
                self.reductions.append(Reduction(body.kind, reduced, K, self.anchors.inner, body.eps))
            return Statistic(self._statistics[key], leaf.which)

        def contraction(leaf: Contraction) -> Expr:
            raise fail(node, f"{node.name} is computed from {leaf.node.name}, another contraction", 7)

        translate = Translator(render, contraction, moment)
        return translate

    def row_store(self, number: int, node: fx.Node) -> None:
        """An output that no anchor enters: a value of the prologue that escapes."""
        part, _, _ = written_part(self.pull, node)
        sizes = sizes_of(fake(part))
        rows, inner = self.anchors.rows, self.anchors.inner
        leading = next((i for i in range(len(sizes) + 1) if product(sizes[:i]) == rows and product(sizes[i:]) == inner), None)
        if leading is None:
            shape = f"[{', '.join(map(str, sizes))}]"
            reason = f"{node.name} {shape} depends on no anchor and is not one value a row and inner index ({rows} x {inner})"
            raise fail(node, reason, 8)
        # Where a size-1 dimension may go to either side, the choice does not matter.
        atoms = Atoms(self.anchors.space, sizes, f"p{number}_")
        translate = self._translator(node, atoms, leading)
        self.stores.append(store(self.pull, number, node, atoms.coords, self.pull.at(part, atoms.coords), translate))
