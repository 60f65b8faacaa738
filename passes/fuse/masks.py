"""Masks that one attention reads, and that are cheaper computed where they are used than by a kernel of their own.

A mask of positions alone (`arange(keys) <= position`) is a comparison a score, and needs loads of a value a row at most; a kernel for it
costs a launch, and attention reads what it has written. A mask that several attentions read is computed once for all of them, outside.
"""

from __future__ import annotations

import sympy
import torch
from dsi.ir import ops
from dsi.ir.views import argument
from torch import fx

from .convexity import Partition, Piece
from .dataflow import ANCHOR_KINDS, Flow, is_factory, is_tensor

MOST = 8  # operators of such a mask


def mask_of_positions(flow: Flow, partition: Partition, node: fx.Node, piece: Piece) -> list[fx.Node]:
    """What computes the bool mask `node` that the attention of `piece` alone reads, in graph order; [] where it is no such mask, or where
    it reads more than a value for each of its rows."""
    readers = list(flow.uses(node))
    if piece.kind != "attention" or len(readers) != 1 or not is_tensor(node) or node.meta["val"].dtype != torch.bool:
        return []
    reader, shown = readers[0]
    if reader.target is not ops.attention or argument(reader, 3, "mask") is not shown:
        return []
    found, stack = {node}, [node]
    while stack:
        for dep in flow.deps[stack.pop()]:
            if dep in found or not is_tensor(dep) or is_factory(dep):
                continue
            inside = flow.fusable(dep) and partition.free(dep) and dep.target not in ANCHOR_KINDS
            if inside and all(user in found for user, _ in flow.uses(dep)):
                found.add(dep)
                stack.append(dep)
            elif not _a_value_a_row(flow, dep, node):
                return []
    return sorted(found, key=flow.position.__getitem__) if len(found) <= MOST else []


def _a_value_a_row(flow: Flow, dep: fx.Node, mask: fx.Node) -> bool:
    """Whether `dep` surely has no more elements than the mask has rows of keys."""
    keys = mask.meta["val"].shape[-1] if mask.meta["val"].dim() else 1
    keys = sympy.Integer(keys) if isinstance(keys, int) else keys.node.expr
    ratio = sympy.cancel(flow.numel(dep) * keys / flow.numel(mask))
    return flow.numel(dep) == 1 or bool(ratio.is_number and ratio <= 1)
