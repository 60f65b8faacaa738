"""Anchors: the contractions and gathers that regions are built around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsi.ir import ops, quantised_ops
from dsi.ir.errors import Refusal
from torch import fx

from .convexity import Partition, Piece
from .dataflow import ANCHOR_KINDS, Flow, is_view


def place_anchors(flow: Flow, partition: Partition, legal: Callable[[Piece], Refusal | None]) -> None:
    """Make a piece of every anchor, one of linears that belong together (region rule 2). Anchors without a plan stay as they are."""
    groups: dict[tuple, list[Piece]] = {}
    for node in flow.core:
        kind = ANCHOR_KINDS.get(node.target) if flow.fusable(node) else None
        if kind is None:
            continue
        if kind == "linear":
            same = groups.setdefault(_group_key(flow, node), [])
            if any(_joins(partition, piece, node, legal) for piece in same):
                continue
        piece = Piece(kind, [node], {node})
        partition.add(piece)
        if refusal := _place(piece, node, legal):
            partition.remove(piece)
            flow.refuse(node, refusal)
        elif kind == "linear":
            same.append(piece)


def _place(piece: Piece, anchor: fx.Node, legal: Callable[[Piece], Refusal | None]) -> Refusal | None:
    """Plan `piece` with `anchor`: with the parts of it that are read stored, or with all of it where those are not (a few of its rows)."""
    refusal = legal(piece)
    if refusal is not None:
        before = piece.whole
        piece.whole = before | {anchor}
        if legal(piece) is None:
            return None
        piece.whole = before
    return refusal


def _joins(partition: Partition, piece: Piece, node: fx.Node, legal: Callable[[Piece], Refusal | None]) -> bool:
    """Add the linear `node` to the group `piece` if no path runs between them and the group can still be planned."""
    with partition.trying(piece, [node]) as trial:
        if partition.convex(piece) and _place(piece, node, legal) is None:
            trial.keep()
            piece.anchors.append(node)
    return trial.kept


def _group_key(flow: Flow, linear: fx.Node) -> tuple:
    """Linears with equal keys read the same rows: same input through the same views, same K, same dtypes and number format."""
    x, weight = linear.args[0], linear.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    inner = weight.meta["val"].shape[0 if linear.kwargs.get("kn") else 1]
    number_format = linear.kwargs.get("group", 0), linear.kwargs.get("activations", "")
    return (*_seen(x), str(inner), x.meta["val"].dtype, weight.meta["val"].dtype, linear.meta["val"].dtype, number_format)


def _seen(node: fx.Node) -> tuple[Any, ...]:
    steps: list[Any] = []
    while is_view(node):
        steps.append((node.target, repr(node.args[1:]), repr(node.kwargs)))
        node = node.args[0]  # type: ignore[assignment]
    return node, *steps


_MAIN_INPUTS = {
    ops.linear: (0,),
    quantised_ops.linear_int8: (0,),
    ops.attention: (0, 1, 2),
    ops.embedding: (1,),
    ops.kv_write: (1, 2),
}


def is_main_input(reader: fx.Node, argument: fx.Node) -> bool:
    """Whether `argument` is what `reader` contracts, gathers by or writes; not a weight, a bias, a mask, a table or a cache."""
    main = _MAIN_INPUTS[reader.target]  # type: ignore[index]
    return not any(a is argument for i, a in enumerate(reader.args) if i not in main)
