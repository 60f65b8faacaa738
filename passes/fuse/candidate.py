"""A set of operators as a region would hold it: its inputs, its views, its outputs, its body, and whether a plan can be made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from dsi.ir import analysis, ops
from dsi.ir.errors import Refusal, Refused
from dsi.ir.tile import Plan
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from .dataflow import Flow, expression, is_factory, is_tensor, is_view, smaller

aten = torch.ops.aten


@dataclass(frozen=True)
class Output:
    """A value that leaves a region. `fresh`: `node` is a view of a member, stored by itself as the rest is not read outside."""

    node: fx.Node
    fresh: bool = False


@dataclass
class Candidate:
    """`nodes`: operators and the views between them, in graph order. `inputs`: what they read from outside, in order of first use."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[Output]


def make_candidate(
    flow: Flow,
    members: Iterable[fx.Node],
    escapes: Mapping[fx.Node, list[fx.Node]],
    outside_views: frozenset[fx.Node],
    parts_of: Callable[[fx.Node], frozenset[fx.Node]],
    whole: frozenset[fx.Node] = frozenset(),
) -> Candidate:
    """The candidate of `members` (core nodes), of which the outside reads `escapes` (member -> the views of it that are read).

    Views of inputs are taken in, but for those in `outside_views`, which become inputs themselves, as do
    `parts_of(value)`, the views that the region of an input stores instead of the whole. Of members in `whole` all is stored.
    """
    inside = set(members)
    outputs = [
        o for m in sorted(escapes, key=flow.position.__getitem__) for o in ([Output(m)] if m in whole else outputs_of(flow, m, escapes[m]))
    ]
    taken: set[fx.Node] = set()
    borders: set[fx.Node] = set()
    stack = [a for m in inside for a in m.all_input_nodes] + [o.node for o in outputs]
    while stack:
        node = stack.pop()
        if node in taken or node in inside or not is_view(node):
            continue
        if flow.base(node) not in inside and (node in outside_views or node in parts_of(flow.base(node))):
            borders.add(node)
            continue
        taken.add(node)
        stack.extend(node.all_input_nodes)
    nodes = sorted(inside | taken, key=flow.position.__getitem__)
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a in borders or (a not in inside and a not in taken))
    return Candidate(nodes, [*inputs, *_missing_sizes(flow, inputs, nodes)], outputs)


def _missing_sizes(flow: Flow, inputs: Iterable[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """The SymInts that a kernel needs besides `inputs`: sizes that are no dimension of an input by themselves."""
    if not flow.sizes:
        return []
    given: set[sympy.Symbol] = set()
    used: set[sympy.Symbol] = set()
    for node in inputs:
        value = node.meta["val"]
        sizes = [*map(expression, value.shape)] if isinstance(value, torch.Tensor) else [expression(value)]
        given.update(s for s in sizes if s.is_Symbol)
    for node in (*inputs, *nodes):
        if isinstance(value := node.meta["val"], torch.Tensor):
            used.update(symbol for s in (*value.shape, *value.stride()) for symbol in expression(s).free_symbols)
    return [flow.sizes[s] for s in sorted(used - given, key=str) if s in flow.sizes]


def input_views(flow: Flow, members: Iterable[fx.Node]) -> list[fx.Node]:
    """The views of inputs that members read directly, in graph order."""
    inside = set(members)
    found = {a for m in inside for a in m.all_input_nodes if is_view(a) and is_tensor(a) and flow.base(a) not in inside}
    return sorted(found, key=flow.position.__getitem__)


def outputs_of(flow: Flow, member: fx.Node, shown: list[fx.Node]) -> list[Output]:
    """`member` itself, or the parts of it that are read outside where those are fewer elements (the query of a fused QKV linear)."""
    whole = [Output(member)]
    if member.target is ops.kv_write:
        return whole
    size = flow.numel(member)
    parts: dict[fx.Node, sympy.Expr] = {}
    for view in shown:
        path = [view]
        while path[-1] is not member:
            path.append(path[-1].args[0])  # type: ignore[arg-type]
        if any(n.target is aten.as_strided.default for n in path):
            return whole
        for node in reversed(path):
            if is_tensor(node) and smaller(part := flow.numel(node), size):
                parts[node] = part
                break
        else:
            return whole
    if not parts or not smaller(sum(parts.values(), sympy.Integer(0)), size):
        return whole
    return [Output(n, fresh=True) for n in sorted(parts, key=flow.position.__getitem__)]


def body_of(
    candidate: Candidate, values: Mapping[fx.Node, Any] | None = None, rename: Mapping[fx.Node, str] | None = None
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The candidate as a GraphModule of its own, and where each outer node is in it.

    `values` gives the inputs' fakes where they differ in strides from the graph's; views of them are then faked anew.
    """
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    moved: set[fx.Node] = set()
    for node in candidate.inputs:
        placeholder = graph.placeholder(node.name)
        value = node.meta["val"]
        if values is not None and node in values and values[node] is not value:
            value = values[node]
            moved.add(placeholder)
        placeholder.meta = {"val": value}
        if "stack_trace" in node.meta:
            placeholder.meta["stack_trace"] = node.meta["stack_trace"]
        inner[node] = placeholder
    for node in _factories_late(candidate.nodes):
        copy = inner[node] = graph.node_copy(node, inner.__getitem__)
        if moved and is_view(node) and copy.args[0] in moved:
            refake(copy)
            moved.add(copy)
    returned = []
    for output in candidate.outputs:
        node = inner[output.node]
        if output.fresh:
            meta = node.meta
            node = graph.call_function(aten.clone.default, (node,))
            node.meta = {k: v for k, v in meta.items() if k != "val"}
            refake(node)
        returned.append(node)
    graph.output(tuple(returned))
    # Lazy: most bodies are planned and never run, and printing their code takes longer than planning them.
    return _LazyGraphModule(torch.nn.Module(), graph), inner


def _factories_late(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with each tensor made of nothing before its first reader, wherever the graph makes it: equal layers are equal bodies."""
    places = {node: (number, 1, number) for number, node in enumerate(nodes)}
    for number, node in enumerate(nodes):
        readers = [places[user][2] for user in node.users if user in places] if is_factory(node) else []
        if readers:
            places[node] = (min(readers), 0, number)
    return sorted(nodes, key=places.__getitem__)


def refake(node: fx.Node) -> None:
    """Compute `node`'s fake value from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


class Planner:
    """Plans of candidates. Equal candidates (same operators, wiring, shapes and dtypes, whatever their names) are planned once."""

    def __init__(self) -> None:
        self._known: dict[tuple, Plan | Refusal] = {}
        self._signatures: dict[fx.Node, int] = {}
        self._interned: dict[tuple, int] = {}

    def plan(self, candidate: Candidate) -> Plan | Refusal:
        key = self._key(candidate)
        known = self._known.get(key)
        if known is None:
            try:
                known = analysis.plan_region(body_of(candidate)[0])
            except Refused as refused:
                known = refused.refusal
            self._known[key] = known
        return known

    def _key(self, candidate: Candidate) -> tuple:
        number = {node: i for i, node in enumerate([*candidate.inputs, *candidate.nodes])}
        return (
            tuple(self._intern(_value_key(n.meta.get("val"))) for n in candidate.inputs),
            tuple((self._signature(n), *(number[a] for a in n.all_input_nodes)) for n in candidate.nodes),
            tuple((number[o.node], o.fresh) for o in candidate.outputs),
        )

    def _signature(self, node: fx.Node) -> int:
        known = self._signatures.get(node)
        if known is None:
            order = {a: i for i, a in enumerate(node.all_input_nodes)}
            arguments = map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}")
            known = self._signatures[node] = self._intern((node.target, repr(arguments), _value_key(node.meta.get("val"))))
        return known

    def _intern(self, key: tuple) -> int:
        return self._interned.setdefault(key, len(self._interned))


def _value_key(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        return value.dtype, str(tuple(value.shape)), str(value.stride()), value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(_value_key(v) for v in value)
    return type(value).__name__, str(value)
