"""Outlining: each piece becomes a graph of its own, called as one node of the outer graph."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import networkx
from dsi.ir import analysis, ops
from dsi.ir.context import Context
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import Region
from torch import fx

from .candidate import body_of, refake
from .convexity import Item, Partition, Piece
from .dataflow import ANCHOR_KINDS, is_view
from .growth import Grower

_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "dsi_provenance")


def execution_order(partition: Partition) -> list[Item]:
    """All pieces and all nodes that are still computed by themselves, as they will run: the graph's own order as far as regions allow."""
    items: dict[Item, int] = {}
    for node in partition.flow.core:
        for item in partition.items_of(node):
            if isinstance(item, Piece) or partition.needed(item):
                items[item] = partition.flow.position[node]  # the last member's place: what it waits for comes first
    graph: networkx.DiGraph = networkx.DiGraph()
    graph.add_nodes_from(items)
    graph.add_edges_from((before, item) for item in items for before in partition.predecessors(item) if before in items)
    try:
        return list(networkx.lexicographical_topological_sort(graph, key=items.__getitem__))
    except networkx.NetworkXUnfeasible as error:
        raise DsiInternalError("fuse: regions read each other in a circle") from error


def label_of(piece: Piece, nodes: list[fx.Node], roles: dict[fx.Node, str]) -> str:
    """What a piece computes, prologue to epilogue: "rms_norm + 3 linear + rope + kv_write". Indices on the way in are left out."""
    parts: list[str] = []
    for role in ("anchor", "epilogue") if piece.kind == "embedding" else ("prologue", "anchor", "epilogue"):
        names = [_short(n) for n in nodes if roles.get(n) == role and (role != "prologue" or n.meta["val"].is_floating_point())]
        for name, count in Counter(names).items():
            parts.append(f"{count} {name}" if role == "anchor" and count > 1 else name)
    return " + ".join(parts)


def _short(node: fx.Node) -> str:
    if node.target is ops.activation:
        return str(node.args[1] if len(node.args) > 1 else node.kwargs["kind"])
    return str(node.target._schema.name).split("::")[1]  # type: ignore[union-attr]


def roles_of(grower: Grower, piece: Piece) -> dict[fx.Node, str]:
    """The role of every member; a row piece has only an epilogue, as nothing comes before its rows."""
    if piece.kind == "row":
        return dict.fromkeys(piece.members, "epilogue")
    after = grower.after_anchor(piece)
    anchors = {a for a in piece.anchors if a.target in ANCHOR_KINDS}
    return {m: "anchor" if m in anchors else "epilogue" if m in after else "prologue" for m in piece.members}


class Outliner:
    """Builds the outer graph item by item, in execution order."""

    def __init__(self, gm: fx.GraphModule, grower: Grower, context: Context):
        self.gm = gm
        self.grower = grower
        self.flow = grower.flow
        self.context = context
        self.graph = fx.Graph()
        self.outer: dict[fx.Node, fx.Node] = {}  # node of the old graph -> node of the new one that has its value

    def run(self, order: list[Item]) -> None:
        regions: list[Region] = []
        for item in order:
            if isinstance(item, Piece):
                regions.append(self._region(item, len(regions)))
            else:
                self._copy(item)
        self.graph._codegen = self.gm.graph._codegen
        self.gm.graph = self.graph
        self.gm.graph.lint()
        self.context.report.regions.extend(regions)

    def _value(self, node: fx.Node) -> fx.Node:
        """The new graph's node for `node`; a view is made again where something outside of regions wants it."""
        if node not in self.outer:
            if not is_view(node):
                raise DsiInternalError(f"fuse: {node.name} is read before it is computed")
            self._copy(node)
        return self.outer[node]

    def _copy(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            self._value(argument)
        copy = self.outer[node] = self.graph.node_copy(node, self.outer.__getitem__)
        if is_view(node) and self.outer[node.args[0]].meta["val"] is not node.args[0].meta["val"]:  # type: ignore[index, union-attr]
            refake(copy)

    def _region(self, piece: Piece, number: int) -> Region:
        candidate = self.grower.candidate(piece)
        inputs = [self._value(n) for n in candidate.inputs]
        body, inner = body_of(candidate, {n: self.outer[n].meta["val"] for n in candidate.inputs})
        roles = roles_of(self.grower, piece)
        label = label_of(piece, candidate.nodes, roles)
        name = f"region_{number:03d}_{piece.kind}"
        region = Region(
            name=name,
            kind=piece.kind,
            body=body,
            plan=piece.plan,
            roles={inner[n].name: role for n, role in sorted(roles.items(), key=lambda each: self.flow.position[each[0]])},
            label=label,
            key=analysis.region_key(body),
        )
        for node in body.graph.nodes:
            if node.op == "call_function":
                node.meta["dsi_region"] = name
        self.gm.add_submodule(name, body)
        call = self.graph.call_module(name, tuple(inputs))
        call.meta = _carried(piece.first) | {"val": tuple(n.meta["val"] for n in region.outputs), "region": region, "dsi_region": name}
        for i, (output, inside) in enumerate(zip(candidate.outputs, region.outputs, strict=True)):
            item = self.graph.create_node("call_function", operator.getitem, (call, i), {}, name=output.node.name)
            item.meta = _carried(output.node) | {"val": inside.meta["val"], "dsi_region": name}
            self.outer[output.node] = item
        return region


def _carried(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _COPIED if key in node.meta}
