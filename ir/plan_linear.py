"""Plans of regions around linears: one group of products with a common input, its prologue, and an epilogue a segment of columns."""

from __future__ import annotations

from torch import fx

from .digits import Atoms
from .linear_anchors import Anchors
from .linear_epilogue import Epilogue, SegmentDraft
from .linear_prologue import Prologue
from .pull import args_of, fail, fake, sizes_of
from .semantics import LINEARS
from .tile import Expr, LinearPlan
from .translate import leaves, outputs_of, written_part


def plan_linear(body: fx.GraphModule) -> LinearPlan:
    """The plan of a body whose anchors are its linears. Raises `Refused`."""
    return _Planner(body).plan()


class _Planner:
    def __init__(self, body: fx.GraphModule):
        self.body = body
        self.anchors = Anchors(body)
        self.prologue = Prologue(self.anchors)
        self.segments: list[SegmentDraft] = []

    def plan(self) -> LinearPlan:
        outputs = outputs_of(self.body)
        anchors, prologue = self.anchors, self.prologue
        x = self._input()
        for number, node in enumerate(outputs):
            self._output(number, node)
        if not self.segments:
            raise fail(anchors.linears[0], f"no output of the region reads {anchors.linears[0].name}", 3)
        segments = tuple(segment.finished() for segment in self.segments)
        reductions, stores = tuple(prologue.reductions), tuple(prologue.stores)
        return LinearPlan(anchors.rows, anchors.inner, x, anchors.x_dtype, segments, reductions, stores, anchors.activations)

    def _input(self) -> Expr:
        """The common input of all linears."""
        first, *others = self.anchors.linears
        x = args_of(first)[0]
        self.anchors.add(first)
        value = self.prologue.value(first, x)
        for linear in others:
            self.anchors.add(linear)
            own = args_of(linear)[0]
            if own is not x and self.prologue.value(linear, own) != value:
                raise fail(linear, f"{linear.name} reads {own.name}, another input than {first.name} reads ({x.name})", 2)
        return value

    def _output(self, number: int, node: fx.Node) -> None:
        part, _, _ = written_part(self.anchors.pull, node)
        atoms = Atoms(self.anchors.space, sizes_of(fake(part)), f"o{number}_")
        while True:
            value = self.anchors.pull.at(part, atoms.coords)
            direct, _, through = leaves(self.anchors.pull, value)
            for leaf in (*direct, *through):
                if leaf.node.target not in LINEARS:
                    raise fail(leaf.node, f"{leaf.node.name} is a second contraction", 7)
            places = {leaf: self.anchors.place(leaf) for leaf in (*direct, *through)}
            again, cut = atoms.split(e for place in places.values() for e in place)
            if cut is not None:
                raise fail(node, f"{node.name} cuts a dimension of {atoms.atoms[cut.args[0]]} elements into pieces of {cut.args[1]}", 1)
            if not again:
                break
        if not direct and not through:
            self.prologue.row_store(number, node)
            return
        Epilogue(self.anchors, self.segments, number, node, atoms, value, places, direct).run()
