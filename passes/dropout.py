"""Dropout that is off gives back the very tensor that it was given, and a write to one is a write to the other.

PyTorch's tracing takes it for a copy, so that a residual added in place behind it (`h = dropout(x); h += y`) would be lost on `x`. Where
the memory around such a call is written to, the call goes before the graph is traced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.randomness import is_random
from torch import fx

from .writes import may_write, written_by

WRITTEN_THROUGH = "dsi_written_through_dropout"
"""Key of a GraphModule's meta: calls went, so that Dynamo's values no longer say what shares memory with what."""

_DROPOUTS = (F.dropout, torch.dropout)


def idle_dropout_gone(gm: fx.GraphModule) -> None:
    """Replace, in Dynamo's graph, every dropout that is off by its input, if what one of them takes or gives is written to."""
    idle = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _DROPOUTS and not is_random(node)]
    if not idle:
        return
    writers = (node for node in gm.graph.nodes if node not in idle and may_write(node))
    written = {memory for node in writers for memory in _memory(written_by(node))}
    if not any(written & {*_memory(node), *_memory(_first(node))} for node in idle):
        return
    for node in idle:
        node.replace_all_uses_with(_first(node))
        gm.graph.erase_node(node)
    gm.meta[WRITTEN_THROUGH] = True


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)


def _memory(value: Any) -> list[int]:
    """What a node's tensor lies in, by an identity; [] where there is none. Of a list of nodes, all."""
    if isinstance(value, list | tuple):
        return [memory for one in value for memory in _memory(one)]
    held = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return [held.untyped_storage()._cdata] if isinstance(held, torch.Tensor) and held.layout == torch.strided else []
