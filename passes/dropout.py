"""Dropout that is off gives back the very tensor that it was given, and a write to one is a write to the other.

PyTorch's tracing takes it for a copy, so that a residual added in place behind it (`h = dropout(x); h += y`) would be lost on `x`. Where
the memory around such a call is written to, the call goes before the graph is traced.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

WRITTEN_THROUGH = "dsi_written_through_dropout"
"""Key of a GraphModule's meta: calls went, so that Dynamo's values no longer say what shares memory with what."""

_SWITCH = {F.dropout: "training", torch.dropout: "train"}
_WRITING = {operator.setitem, *(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow"))}


def idle_dropout_gone(gm: fx.GraphModule) -> None:
    """Replace, in Dynamo's graph, every dropout that is off by its input, if what one of them takes or gives is written to."""
    idle = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _SWITCH and _is_off(node)]
    if not idle:
        return
    written = {memory for node in gm.graph.nodes if _writes(node) for memory in _memory(_first(node))}
    if not any(written & {*_memory(node), *_memory(_first(node))} for node in idle):
        return
    for node in idle:
        node.replace_all_uses_with(_first(node))
        gm.graph.erase_node(node)
    gm.meta[WRITTEN_THROUGH] = True


def _is_off(node: fx.Node) -> bool:
    arguments = {**dict(zip(("input", "p", _SWITCH[node.target]), node.args, strict=False)), **node.kwargs}  # type: ignore[index]
    p = arguments.get("p", 0.5)
    return arguments.get(_SWITCH[node.target], True) is False or (isinstance(p, int | float) and p == 0)  # type: ignore[index]


def _writes(node: fx.Node) -> bool:
    """Whether a call writes to its first argument."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.target in _WRITING or getattr(node.target, "__name__", "").endswith("_") or bool(node.kwargs.get("inplace"))


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)


def _memory(value: Any) -> list[int]:
    """What a node's tensor lies in, by an identity; [] where there is none. Of a list of nodes, all."""
    if isinstance(value, list | tuple):
        return [memory for one in value for memory in _memory(one)]
    held = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return [held.untyped_storage()._cdata] if isinstance(held, torch.Tensor) and held.layout == torch.strided else []
