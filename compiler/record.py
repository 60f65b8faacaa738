"""Graphs as plain data, taken down while they are compiled: stages change a graph in place, and pictures are drawn afterwards."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from dsi.ir.region import Region
from dsi.ir.source import module_path, source_frame
from dsi.patterns.rewriter import PROVENANCE, Provenance
from dsi.quantize.ops import quantize_weight
from torch import fx

from .printing import target_text, value_text


@dataclass(frozen=True)
class Rewritten:
    """One rewrite in a node's history: the rule, its "file.py:12", and the names of the nodes that it replaced."""

    rule: str
    place: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """One node: what it computes, from which nodes, its value ("float32[1, 16, 64]"), and where in the model it comes from."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    value: str
    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""
    is_view: bool = False
    rewrites: tuple[Rewritten, ...] = ()
    region: Region | None = None


@dataclass
class GraphRecord:
    """The states of one graph that a page shows.

    `matched`: every node that a rule can have replaced, by name. `recognised`: semantic and ATen operators before fusion. `lowered`: calls
    of regions and what is left. `given`: the inputs that are neither parameters nor buffers.
    """

    matched: dict[str, Node] = field(default_factory=dict)
    recognised: list[Node] = field(default_factory=list)
    lowered: list[Node] = field(default_factory=list)
    given: frozenset[str] = frozenset()

    def take(self, name: str, gm: fx.GraphModule) -> None:
        """Takes down what a stage left, where a page shows it. `name` is the stage's, numbered as in the dump ("04_recognise")."""
        stage = name.split("_", 1)[1]
        if stage == "aot":
            self.given = _given(gm)
        if stage in ("aot", "normalise"):
            self.matched.update((node.name, node) for node in nodes_of(gm))
        elif stage == "recognise":
            self.recognised = nodes_of(gm)
        elif stage == "lower":
            self.lowered = nodes_of(gm)


def nodes_of(gm: fx.GraphModule) -> list[Node]:
    """The nodes of a graph, in order. The int8 form of a weight is an input like the weight."""
    return [_node(node) for node in gm.graph.nodes if node.target is not quantize_weight]


def _node(node: fx.Node) -> Node:
    file, line, code = source_frame(node)
    region = node.meta.get("region")
    packed = node.target is operator.getitem and getattr(node.args[0], "target", None) is quantize_weight
    return Node(
        name=node.name,
        op="placeholder" if packed else node.op,
        target=target_text(node.target).removeprefix("torch.ops."),
        inputs=() if packed else tuple(dict.fromkeys(argument.name for argument in node.all_input_nodes)),
        value=value_text(node.meta.get("val", node.meta.get("example_value"))).removesuffix(" meta"),
        file=file,
        line=line,
        code=code,
        module=module_path(node),
        is_view=_is_view(node),
        rewrites=tuple(Rewritten(p.rule, p.place, p.replaced) for p in node.meta.get(PROVENANCE, ()) if isinstance(p, Provenance)),
        region=region if isinstance(region, Region) else None,
    )


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def _given(gm: fx.GraphModule) -> frozenset[str]:
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    static = set(getattr(metadata, "static_input_indices", None) or ())
    return frozenset(name for number, name in enumerate(placeholders) if number not in static)
