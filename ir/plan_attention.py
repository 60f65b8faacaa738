"""Plans of regions around one attention: its operands as expressions of the inputs, its result through an epilogue."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from .digits import Atoms, Digit, Renderer, digits_of, linear_form, mixed_radix
from .index_map import ZERO, FloorDiv, Mod, Space
from .pull import Contraction, Coords, Moment, Puller, args_of, fail, fake, sizes_of
from .tile import AttentionPlan, B, D, E, Expr, G, H, J, S, Store, Window
from .translate import Translator, leaves, outputs_of, store, written_part
from .views import argument

ATTENTION = torch.ops.dsi.attention.default


def plan_attention(body: fx.GraphModule) -> AttentionPlan:
    """The plan of a body with exactly one `dsi.attention`. Raises `Refused`."""
    return _Planner(body).plan()


class _Planner:
    def __init__(self, body: fx.GraphModule):
        self.body = body
        anchors = [n for n in body.graph.nodes if n.op == "call_function" and n.target is ATTENTION]
        if len(anchors) > 1:
            raise fail(anchors[1], f"{anchors[1].name} is a second contraction beside {anchors[0].name}", 7)
        self.anchor = anchors[0]
        q, k, v = self.anchor.args[:3]
        self.batch, heads, self.queries, head_size = sizes_of(fake(q))
        kv_heads, self.keys, value_size = (sizes_of(fake(n))[d] for n, d in ((k, 1), (k, 2), (v, 3)))
        fixed = (heads, kv_heads, head_size, value_size)
        if not all(n.is_Integer for n in fixed):
            raise fail(self.anchor, f"{self.anchor.name} has a symbolic number of heads or channels", 1)
        self.heads, self.kv_heads, self.head_size, self.value_size = (int(n) for n in fixed)
        if fake(k).dtype != fake(q).dtype or fake(v).dtype != fake(q).dtype:
            raise fail(self.anchor, f"{self.anchor.name} has operands of different dtypes", 2)
        sizes = {B: self.batch, H: heads, G: kv_heads, S: self.queries, J: self.keys, D: head_size, E: value_size}
        self.space = Space(sizes)
        self.pull = Puller(body, self.space)

    def plan(self) -> AttentionPlan:
        a = self.anchor
        outputs = outputs_of(self.body)
        q, k, v = args_of(a)[:3]
        mask, bias, sinks = argument(a, 3, "mask"), argument(a, 4, "bias"), argument(a, 5, "sinks")
        operands = [self._operand(n, at) for n, at in ((q, (B, H, S, D)), (k, (B, G, J, D)), (v, (B, G, J, E)))]
        scores = [None if n is None else self._operand(n, self._score_coordinates(n)) for n in (mask, bias)]
        stores = tuple(self._output(number, node) for number, node in enumerate(outputs))
        keywords: dict[str, Any] = a.kwargs
        return AttentionPlan(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            queries=self.queries,
            keys=self.keys,
            head_size=self.head_size,
            value_size=self.value_size,
            q=operands[0],
            k=operands[1],
            v=operands[2],
            mask=scores[0],
            bias=scores[1],
            scale=float(keywords["scale"]),
            causal=bool(keywords.get("causal", False)),
            window=int(keywords.get("window", 0)),
            softcap=float(keywords.get("softcap", 0.0)),
            stores=stores,
            dtype=fake(q).dtype,
            sinks=None if sinks is None else self._operand(sinks, (H,)),
        )

    def _score_coordinates(self, node: fx.Node) -> Coords:
        """Coordinates of a tensor that broadcasts to the scores [batch, heads, queries, keys]."""
        sizes = sizes_of(fake(node))
        whole = (self.batch, sympy.Integer(self.heads), self.queries, self.keys)[4 - len(sizes) :]
        result = []
        for n, full, symbol in zip(sizes, whole, (B, H, S, J)[4 - len(sizes) :], strict=True):
            if n != 1 and n != full:
                raise fail(
                    self.anchor, f"{node.name} has a dimension of {n} where the scores have {full}, which may or may not be equal", 1
                )
            result.append(ZERO if n == 1 else symbol)
        return tuple(result)

    def _operand(self, node: fx.Node, coords: Coords) -> Expr:
        value = self.pull.at(node, tuple(ZERO if n == 1 else c for n, c in zip(sizes_of(fake(node)), coords, strict=True)))
        direct, moments, through = leaves(self.pull, value)
        if direct or through:
            raise fail(self.anchor, f"{node.name} is computed from {(direct + through)[0].node.name}, another contraction", 7)
        if moments:
            raise fail(moments[0].node, f"{moments[0].node.name} is a reduction, which attention recomputes for no operand", 5)
        return value

    # ------------------------------------------------------------------------------------------------------------------ epilogue

    def _output(self, number: int, node: fx.Node) -> Store:
        part, _, _ = written_part(self.pull, node)
        atoms = Atoms(self.space, sizes_of(fake(part)), f"o{number}_")
        while True:
            value = self.pull.at(part, atoms.coords)
            direct, moments, _ = leaves(self.pull, value)
            if moments:
                raise fail(moments[0].node, f"{moments[0].node.name} reduces the result of {self.anchor.name}", 6)
            again, cut = atoms.split(e for leaf in direct for e in leaf.at)
            if cut is not None:
                raise fail(node, f"{node.name} cuts a dimension of {atoms.atoms[cut.args[0]]} elements into pieces of {cut.args[1]}", 1)
            if not again:
                break
        if not direct:
            raise fail(node, f"{node.name} does not depend on {self.anchor.name}", 8)
        if len(direct) > 1:
            raise fail(node, f"{node.name} reads {self.anchor.name} at {direct[0].at} and {direct[1].at}", 4)
        digits = self._digits(node, direct[0], atoms)
        sizes = {B: self.batch, H: sympy.Integer(self.heads), S: self.queries, E: sympy.Integer(self.value_size)}
        render = Renderer(Space(sizes), digits)

        def moment(leaf: Moment) -> Expr:
            raise AssertionError(leaf)

        translate = Translator(render, lambda leaf: Window(0), moment)
        return store(self.pull, number, node, atoms.coords, value, translate)

    def _digits(self, node: fx.Node, leaf: Contraction, atoms: Atoms) -> dict[sympy.Symbol, Digit]:
        """The output's atoms as digits of b, h, s and e: each atom in exactly one, each of these whole."""
        digits: dict[sympy.Symbol, Digit] = {}
        wholes = (self.batch, sympy.Integer(self.heads), self.queries, sympy.Integer(self.value_size))
        for base, whole, coordinate in zip((B, H, S, E), wholes, leaf.at, strict=True):
            if whole == 1:
                continue
            if coordinate.has(FloorDiv, Mod):
                raise fail(node, f"{node.name} regroups dimensions of {leaf.node.name} so that they are cut: its {base} is {coordinate}", 1)
            form = linear_form(coordinate, atoms.atoms)
            order = mixed_radix(form[0], atoms.atoms) if form is not None and form[1] == 0 else None
            if order is None or order[1] != whole or digits.keys() & set(order[0]):
                raise fail(
                    node, f"{node.name} reads {leaf.node.name} at {base} = {coordinate}, which is not each of its {whole} entries once", 3
                )
            digits.update(digits_of(base, order[0], atoms.atoms))
        left = atoms.atoms.keys() - digits.keys()
        if left:
            raise fail(node, f"{node.name} repeats {leaf.node.name} along a dimension of {atoms.atoms[min(left, key=str)]}", 3)
        return digits
