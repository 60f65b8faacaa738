"""From pulled expressions to a plan's: atoms become flat indices, anchors become windows, moments become statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
from torch import fx

from .digits import Renderer
from .index_map import size_of
from .pull import Contraction, Coords, Moment, Puller, args_of, fail, fake
from .tile import Const, Expr, Index, Load, Op, Store, Test, children
from .views import ALIASING, SPLITS, keyword

Leaf = Callable[[fx.Node, Coords], Expr]


class Translator:
    """Rewrites expressions over atoms. `contraction` and `moment` give what stands for the leaves, or refuse."""

    def __init__(self, render: Renderer, contraction: Callable[[Contraction], Expr], moment: Callable[[Moment], Expr]):
        self.render = render
        self.contraction = contraction
        self.moment = moment
        self._memo: dict[int, tuple[Expr, Expr]] = {}

    def __call__(self, expr: Expr) -> Expr:
        found = self._memo.get(id(expr))
        if found is None:
            found = self._memo[id(expr)] = (expr, self._translate(expr))  # keeps `expr` alive, so that its id stays its own
        return found[1]

    def coordinate(self, coordinate: sympy.Expr | Expr) -> sympy.Expr | Expr:
        """A coordinate of a load or store."""
        return self(coordinate) if isinstance(coordinate, Expr) else self.render(coordinate)

    def _translate(self, expr: Expr) -> Expr:
        if isinstance(expr, Load):
            return Load(expr.input, tuple(self.coordinate(c) for c in expr.coords), expr.dtype)
        if isinstance(expr, Op):
            args = tuple(self(a) for a in expr.args)
            if expr.name == "where" and isinstance(args[0], Const):
                return args[1] if args[0].value else args[2]
            return Op(expr.name, args, expr.dtype)
        if isinstance(expr, Index):
            return Index(self.render(expr.expr), expr.dtype)
        if isinstance(expr, Test):
            condition = self.render(expr.condition)
            return Const(condition is sympy.true, torch.bool) if condition in (sympy.true, sympy.false) else Test(condition)
        if isinstance(expr, Contraction):
            return self.contraction(expr)
        if isinstance(expr, Moment):
            return self.moment(expr)
        return expr


def leaves(pull: Puller, expr: Expr) -> tuple[list[Contraction], list[Moment], list[Contraction]]:
    """The contractions and moments that `expr` reads, in order; last, the contractions that it reads through moments."""
    direct: dict[Contraction, None] = {}
    moments: dict[Moment, None] = {}
    through: dict[Contraction, None] = {}
    seen: set[tuple[int, bool]] = set()

    def walk(part: Expr, below: bool) -> None:
        if (id(part), below) in seen:
            return
        seen.add((id(part), below))
        if isinstance(part, Contraction):
            (through if below else direct)[part] = None
        elif isinstance(part, Moment):
            moments[part] = None
            walk(pull.moments[part.node, part.lead].body, True)
        for child in children(part):
            walk(child, below)

    walk(expr, False)
    return list(direct), list(moments), list(through)


def outputs_of(body: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a body returns. Refuses what no kernel can return: an input, a view of one or of another output, overlapping
    memory."""
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    returned = args_of(output)[0]
    if not isinstance(returned, tuple | list) or not returned:
        raise fail(output, "a region returns a tuple of at least one value")
    for i, node in enumerate(returned):
        if not isinstance(node, fx.Node):
            raise fail(output, f"output {i} is {node!r}, no value of the region")
        value = fake(node)
        if node in returned[:i]:
            raise fail(node, f"{node.name} is returned twice", 8)
        if any(size_of(s) == 0 and size_of(n) != 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            raise fail(node, f"{node.name} repeats the same memory along a dimension (an expand), which belongs outside of the region", 8)
        owner = node
        while True:
            if owner.op == "placeholder":
                what = "an input of the region" if owner is node else f"a view of the region's input {owner.name}"
                raise fail(node, f"{node.name} is {what}, so it belongs outside of the region", 8)
            if owner is not node and owner in returned:
                raise fail(node, f"{node.name} is a view of another output, {owner.name}, so it belongs outside of the region", 8)
            if owner.target not in ALIASING and owner.target not in SPLITS:
                break
            owner = args_of(owner)[0]
    return list(returned)


def written_part(pull: Puller, node: fx.Node) -> tuple[fx.Node, int | None, int | None]:
    """What an output's points are points of: (value node, written dimension, input number of the cache) of a `kv_write`, else (node,
    None, None)."""
    if node.target is not torch.ops.dsi.kv_write.default:
        return node, None, None
    cache, _, new = args_of(node)[:3]
    if cache.op != "placeholder":
        raise fail(node, f"{node.name} writes into {cache.name}, which is no input of the region", 9)
    dim: int = keyword(node, "dim")
    return new, dim + fake(cache).dim() if dim < 0 else dim, pull.inputs[cache]


def store(pull: Puller, number: int, node: fx.Node, coords: Sequence[sympy.Expr], value: Expr, translate: Translator) -> Store:
    """Output `number` with the value pulled at `coords` (of what `written_part` names), translated."""
    _, dim, base = written_part(pull, node)
    at: list[sympy.Expr | Expr] = [translate.coordinate(c) for c in coords]
    if dim is not None:
        pos = args_of(node)[1]
        position = pull.at(pos, (coords[dim],))
        if leaves(pull, position)[0]:
            raise fail(node, f"{node.name} writes at positions that depend on the region's anchor", 9)
        at[dim] = translate(position)
    return Store(number, tuple(at), translate(value), fake(node).dtype, base)
