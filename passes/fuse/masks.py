"""Masks that one attention reads, and that are cheaper computed where they are used than by a kernel of their own.

A mask of positions alone (`arange(keys) <= position`) is a comparison a score, and needs loads of a value a row at most; a kernel for it
costs a launch, and attention reads what it has written. A mask that several attentions read is computed once for all of them, outside.
"""

from __future__ import annotations

import torch
from dsi.ir import ops
from dsi.ir import tile as t
from dsi.ir.views import argument
from torch import fx

from .convexity import Partition, Piece
from .dataflow import ANCHOR_KINDS, Flow, is_factory, is_tensor

MOST = 8  # operators of such a mask


def mask_alone(flow: Flow, partition: Partition, node: fx.Node, piece: Piece) -> tuple[list[fx.Node], list[fx.Node]]:
    """What computes the bool mask `node` of the attention of `piece`, and nothing else, in graph order, and the factories that this reads;
    ([], []) where it is no such mask."""
    readers = list(flow.uses(node))
    if piece.kind != "attention" or len(readers) != 1 or not is_tensor(node) or node.meta["val"].dtype != torch.bool:
        return [], []
    reader, shown = readers[0]
    if reader.target is not ops.attention or argument(reader, 3, "mask") is not shown:
        return [], []
    found, factories, stack = {node}, dict[fx.Node, None](), [node]
    while stack:
        for dep in flow.deps[stack.pop()]:
            if dep in found or not is_tensor(dep) or not flow.fusable(dep):
                continue
            if is_factory(dep):
                factories[dep] = None
            elif partition.free(dep) and dep.target not in ANCHOR_KINDS and all(user in found for user, _ in flow.uses(dep)):
                found.add(dep)
                stack.append(dep)
    return (sorted(found, key=flow.position.__getitem__), list(factories)) if len(found) <= MOST else ([], [])


def hides_by_position(plan: t.Plan | None) -> bool:
    """Whether the mask of an attention's plan reads nothing that differs from key to key."""
    if not isinstance(plan, t.AttentionPlan) or plan.mask is None:
        return False
    coords = [coord for part in t.parts_of(plan.mask) if isinstance(part, t.Load) for coord in part.coords]
    return not any(isinstance(coord, t.Expr) or t.J in coord.free_symbols for coord in coords)
