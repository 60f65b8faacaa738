"""Nested compile regions (`torch.compiler.nested_compile_region`), inlined: Dynamo traces such a function once and calls its graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_CALL = getattr(torch.ops.higher_order, "invoke_subgraph", None)


def inline_nested(gm: fx.GraphModule) -> None:
    """Put what each call of a nested region computes into `gm` (Dynamo's graph), where every rule sees it.

    A call whose result is used as a whole, and not part by part as Dynamo has it, stays.
    """
    changed = False
    while calls := [node for node in gm.graph.nodes if _CALL is not None and node.target is _CALL and _by_parts(node)]:
        for call in calls:
            _inline(gm, call)
        changed = True
    if changed:
        gm.recompile()


def _by_parts(call: fx.Node) -> bool:
    return all(user.target is operator.getitem for user in call.users)


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    held, _, *operands = call.args
    assert isinstance(held, fx.Node) and isinstance(held.target, str)
    body = gm.get_submodule(held.target)
    assert isinstance(body, fx.GraphModule)
    values: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                results = fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = made = gm.graph.node_copy(node, values.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    made.target = f"{held.target}.{node.target}"
    for part in list(call.users):
        part.replace_all_uses_with(results[part.args[1]])
        gm.graph.erase_node(part)
    gm.graph.erase_node(call)
    if not held.users:
        gm.graph.erase_node(held)
