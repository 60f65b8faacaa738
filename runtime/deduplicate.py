"""Equal operators of an expanded graph computed once: layers that share a mask each convert it, and Inductor would do so for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def deduplicate(gm: fx.GraphModule) -> int:
    """Merges operators with the same target and arguments into the first of them; returns how many went.

    An operator that writes, draws random numbers, touches memory that the graph writes anywhere, or makes memory that the graph returns,
    stays: a caller may write to one of two equal results.
    """
    written = _written_storages(gm.graph)
    returned = set().union(*(_storages(node) for node in gm.graph.output_node().all_input_nodes))
    first: dict[Any, fx.Node] = {}
    gone = 0
    for node in list(gm.graph.nodes):
        if (
            node.op != "call_function"
            or not _pure(node.target)
            or any(_storages(value) & written for value in (node, *node.all_input_nodes))
            or _storages(node) & returned
        ):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
            gone += 1
    if gone:
        gm.recompile()
    return gone


def _pure(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not _UNREPEATABLE & set(target.tags)


def _storages(node: fx.Node) -> set[StorageWeakRef]:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) else (values,)
    return {StorageWeakRef(value.untyped_storage()) for value in tensors if isinstance(value, torch.Tensor)}


def _written_storages(graph: fx.Graph) -> set[StorageWeakRef]:
    written: set[StorageWeakRef] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for number, argument in enumerate(node.target._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                    for given in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(given, fx.Node):
                            written |= _storages(given)
    return written


def _hashable(value: Any) -> Any:
    """A literal with its type (1, 1.0 and True are equal but not the same argument), a node as itself."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items()))
    return type(value), repr(value)
