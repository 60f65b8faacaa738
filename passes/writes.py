"""What Dynamo's graph, which is not functional, may write to."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def may_write(node: fx.Node) -> bool:
    """Whether `node`, of Dynamo's graph, which is not functional, may write to a tensor. Doubt counts as yes."""
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") or node.target in ("__setitem__", "__delitem__")
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", "") or ""
    if module == "_operator":
        return name in ("setitem", "delitem") or (name.startswith("i") and hasattr(operator, name[1:]))
    # torch.nn.functional takes `inplace` by position too.
    return name.endswith("_") or not module.startswith(("torch", "math", "builtins")) or any(a is True for a in node.args)


def written_by(node: fx.Node) -> list[Any]:
    """The arguments that a node which may write may write to."""
    if "out" in node.kwargs:
        return [node.kwargs["out"]]
    module = "torch" if node.op == "call_method" else getattr(node.target, "__module__", "") or ""
    if node.args and not isinstance(node.target, torch._ops.OpOverload) and module.startswith(("torch", "_operator")):
        return [node.args[0]]
    return list(node.all_input_nodes)
