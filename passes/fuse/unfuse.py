"""The inverse of outlining."""

from __future__ import annotations

import operator
from typing import Any

import torch
from dsi.ir import ops
from dsi.ir.region import Region
from torch import fx


def unfuse(gm: fx.GraphModule) -> None:
    """Put the body of every region back where it is called, in place: a flat graph that computes the same.

    Nodes keep their meta, `dsi_region` included. Writes that lowering made in place become functional again, with a `copy_` epilogue.
    """
    graph = fx.Graph()
    value: dict[Any, Any] = {}  # node -> its node in the flat graph; a tuple of them for a region's call
    final: dict[fx.Node, fx.Node] = {}  # new placeholder -> the last value written to it in place
    memory: dict[fx.Node, fx.Node] = {}  # such a value -> the placeholder whose memory it had

    def write(cache: fx.Node, new: fx.Node) -> None:
        placeholder = memory.get(cache, cache)
        if placeholder.op == "placeholder":
            final[placeholder], memory[new] = new, placeholder

    def inline(call: fx.Node, region: Region) -> tuple[fx.Node, ...]:
        inner = {p: value[a] for p, a in zip(region.inputs, call.args, strict=True)}
        for node in region.members:
            inner[node] = graph.node_copy(node, inner.__getitem__)
        outputs = tuple(inner[o] for o in region.outputs)
        for output, number in region.in_place.items():
            write(value[call.args[number]], outputs[output])
        return outputs

    for node in gm.graph.nodes:
        if node.op == "call_module" and isinstance(region := node.meta.get("region"), Region):
            value[node] = inline(node, region)
        elif node.target is operator.getitem and isinstance(outputs := value.get(node.args[0]), tuple):
            value[node] = outputs[node.args[1]]
        elif node.target is ops.kv_write_:
            cache, pos, new = (value[a] for a in node.args)
            made = graph.call_function(ops.kv_write, (cache, pos, new), dict(node.kwargs))
            made.meta = dict(node.meta) | {"val": torch.empty_like(cache.meta["val"])}
            write(cache, made)
            value[node.args[0]] = made
        else:
            if node.op == "output":
                for placeholder, new in final.items():
                    copy = graph.call_function(torch.ops.aten.copy_.default, (placeholder, new))
                    copy.meta["val"] = placeholder.meta["val"]
            value[node] = graph.node_copy(node, value.__getitem__)
    graph._codegen = gm.graph._codegen
    gm.graph = graph
    for name in [name for name, module in gm.named_children() if isinstance(module, fx.GraphModule) and not _called(graph, name)]:
        gm.delete_submodule(name)
    gm.graph.lint()


def _called(graph: fx.Graph, name: str) -> bool:
    return any(n.op in ("call_module", "get_attr") and str(n.target).split(".")[0] == name for n in graph.nodes)
