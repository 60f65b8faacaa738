"""Fuse: what lies between two all-reduces is grouped into regions, by the ten region rules (docs/design.md)."""

from __future__ import annotations

import operator

import torch
from dsi.ir.context import Context
from dsi.ir.custom import custom_of
from dsi.ir.errors import Refusal
from dsi.ir.source import source_line
from dsi.quantize.ops import quantize_weight
from torch import fx

from .convexity import Partition, Piece
from .dataflow import Flow, is_effect, is_factory, is_tensor, share_sizes, spell_alike
from .grouping import place_anchors
from .growth import Grower
from .outline import Outliner, execution_order, label_of, roles_of
from .unfuse import unfuse

__all__ = ["fuse", "unfuse"]


def fuse(gm: fx.GraphModule, context: Context) -> None:
    """Turn the functional graph `gm` into calls of regions and leftover operators, in place.

    Every region is one `call_module` node (see `dsi.ir.region.Region`) whose value is a tuple; the regions are appended to
    `context.report.regions` in the order in which they run, and every operator that is in none to `context.report.unfused` with the reason.
    """
    share_sizes(gm.graph)
    spell_alike(gm.graph)
    flow = Flow.of(gm.graph)
    partition = Partition(flow)
    grower = Grower(flow, partition)
    place_anchors(flow, partition, grower.legal)
    grower.grow_epilogues()
    grower.merge("embedding")
    grower.grow_prologues()
    grower.grow_rows()
    order = _affordable(grower, context)
    _report_leftovers(partition, context)
    Outliner(gm, grower, context).run(order)


def _affordable(grower: Grower, context: Context) -> list[Piece | fx.Node]:
    """The execution order, after pieces for which there is no fuel have been given up. Plans are made once more, of the final outputs."""
    partition = grower.partition
    for piece in [item for item in execution_order(partition) if isinstance(item, Piece)]:
        label = label_of(piece, grower.candidate(piece).nodes, roles_of(grower, piece))
        where = source_line(piece.first)
        if not context.fuel.take(f"fuse {piece.kind} region: {label}{f' at {where}' if where else ''}"):
            _give_up(grower, piece, Refusal("the fuel is spent (DSI_FUEL)", rule="fuse"))
    while refused := [(p, refusal) for p in partition.pieces if (refusal := grower.legal(p)) is not None]:
        for piece, refusal in refused:
            _give_up(grower, piece, refusal)
    return execution_order(partition)


def _give_up(grower: Grower, piece: Piece, refusal: Refusal) -> None:
    grower.partition.remove(piece)
    for member in piece.members:
        grower.flow.refusals.pop(member, None)
        grower.flow.refuse(member, refusal)


def _has_tensors(node: fx.Node) -> bool:
    """Whether `node`'s value is a tensor, or several in a tuple."""
    value = node.meta.get("val")
    return is_tensor(node) or (isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value))


def _report_leftovers(partition: Partition, context: Context) -> None:
    flow = partition.flow
    for node in flow.core:
        if node.op != "call_function" or not _has_tensors(node) or node in partition.provider or not partition.needed(node):
            continue
        if is_effect(node) or node.target in (operator.getitem, quantize_weight):
            continue
        if (own := custom_of(node.target)) is not None:
            context.report.custom[own.name] += 1  # it is left to the kernel that its user gave
            continue
        refusal = flow.refusals.get(node)
        reason = flow.outside[node]
        if reason is None and refusal is None:
            reason = "it makes a tensor for an operator outside of regions" if is_factory(node) else "nothing reads it"
        if reason is not None:
            refusal = Refusal(reason, node.name, source_line(node), "fuse")
        assert refusal is not None
        sentence = f"{node.target} stays an ATen operator: {refusal.reason}"
        context.report.unfused.append(Refusal(sentence, refusal.node, refusal.where, refusal.rule))
