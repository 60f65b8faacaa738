"""Which operators read or write memory that others see: mutations, collectives, and views that share storage."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Share their input's storage although their schema does not say so.
_SILENT_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default, aten.reshape.default})


@cache
def has_effect(target: Any) -> bool:
    """Whether a node with this target is a barrier that no match may span: a mutation, a collective, or an operator that is not known to be
    pure.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or target.namespace == "_c10d_functional" or target is torch.ops.dsi.all_reduce.default
    return isinstance(target, torch._ops.HigherOrderOperator)


@cache
def is_mutation(target: Any) -> bool:
    """Whether a node with this target writes into one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


@cache
def is_view(target: Any) -> bool:
    """Whether the result of a node with this target shares the storage of its first argument."""
    if target is operator.getitem or target in _SILENT_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


@cache
def is_size_query(target: Any) -> bool:
    """Whether a node with this target reads a size and no data."""
    return target in (aten.sym_size.int, aten.sym_numel.default)


def is_pure(node: fx.Node) -> bool:
    """Whether `node` may be erased when nothing reads it."""
    if node.op != "call_function" or has_effect(node.target):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags
    return target is operator.getitem or getattr(target, "__module__", "") in ("_operator", "torch", "math")


def is_dead(node: fx.Node) -> bool:
    """Whether nothing reads `node` and nothing would be lost with it (an unused output of a norm, say)."""
    return not node.users and is_pure(node)


def storage_root(node: fx.Node) -> fx.Node:
    """The node whose storage `node` shares (itself, if it is no view)."""
    while node.op == "call_function" and is_view(node.target) and node.args and isinstance(node.args[0], fx.Node):
        if node.target is operator.getitem and not is_view(node.args[0].target):
            return node
        node = node.args[0]
    return node


def aliases(node: fx.Node) -> list[fx.Node]:
    """`node` and every node that is a view of it."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.op == "call_function" and is_view(user.target) and user.args and user.args[0] in found:
                found.add(user)
                stack.append(user)
    return list(found)


def escapes_as_memory(node: fx.Node) -> fx.Node | None:
    """A user through which someone could observe which storage `node` has: the graph's output or a mutation, of it or of a view of it."""
    for alias in aliases(node):
        for user in alias.users:
            if user.op == "output" or (user.op == "call_function" and has_effect(user.target)):
                return user
    return None
