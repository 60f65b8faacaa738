"""The graph as fusion sees it: values and what computes them, with views taken out of the way.

A view costs nothing inside a kernel (it is another way to compute coordinates), so it is a member of no region by itself. Every region
takes in the views that lie between its members and its inputs; what is left of the graph is the *core*: operators that compute, and
sources.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from dsi.ir import ops, quantised_ops
from dsi.ir.errors import Refusal
from dsi.ir.source import source_line
from torch import fx

aten = torch.ops.aten

ANCHOR_KINDS: dict[Any, str] = {
    ops.linear: "linear",
    quantised_ops.linear_int8: "linear",
    ops.attention: "attention",
    ops.embedding: "embedding",
}

_FACTORIES = {
    *(aten.arange, aten.full, aten.zeros, aten.ones, aten.empty, aten.scalar_tensor, aten.eye),
    *(aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like, aten.new_full, aten.new_zeros, aten.new_ones, aten.new_empty),
}


def is_view(node: fx.Node) -> bool:
    """Whether `node`'s value is its first argument's memory seen otherwise, the lists of `split` and their items included."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source) and not isinstance(source.meta.get("val"), torch.Tensor)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    # `_unsafe_view` is a view of a value that nobody else sees; its schema does not say so.
    return node.target.is_view or node.target is aten._unsafe_view.default


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_effect(node: fx.Node) -> bool:
    """Whether `node` writes to one of its arguments."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_factory(node: fx.Node) -> bool:
    """Whether `node` makes a tensor from sizes and literals alone (`arange`, `full`, `zeros_like`)."""
    return node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _FACTORIES


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def smaller(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether the size `a` is surely less than `b`."""
    if a.is_Integer and b.is_Integer:
        return int(a) < int(b)
    ratio = sympy.cancel(a / b) if b != 0 else sympy.Integer(1)
    return bool(ratio.is_number and ratio < 1)


def why_outside(node: fx.Node) -> str | None:
    """Why `node` can be in no region whatever its plan; None where the plan decides. A sentence's end, for the report."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it is not a torch operator"
    if is_effect(node):
        return "it writes to its argument"
    if node.target is ops.all_reduce:
        return "an all-reduce is never inside a region"
    if node.target.namespace not in ("aten", "dsi", "prims"):
        return f"the operator library {node.target.namespace} is not known"
    if not is_tensor(node):
        return "its value is not one tensor"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return "it draws random numbers"
    return None


def spell_alike(graph: fx.Graph) -> None:
    """Leave out arguments of semantic operators that are the defaults: how a rule spelled them must not tell equal layers apart."""
    for node in graph.nodes:
        if node.op != "call_function" or not ops.is_semantic(node.target):
            continue
        defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
        names = [a.name for a in node.target._schema.arguments]
        args = list(node.args)
        while args and _is_default(args[-1], defaults, names[len(args) - 1]):
            args.pop()
        node.args = tuple(args)
        node.kwargs = {k: v for k, v in node.kwargs.items() if not _is_default(v, defaults, k)}


def _is_default(value: Any, defaults: dict[str, Any], name: str) -> bool:
    return not isinstance(value, fx.Node) and name in defaults and type(value) is type(defaults[name]) and value == defaults[name]


def share_sizes(graph: fx.Graph) -> None:
    """Read every size where it is known first: a size asked of a value inside a region would make that value leave the region."""
    known: dict[sympy.Expr, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        first = known.setdefault(value.node.expr, node)
        if first is not node and node.target is aten.sym_size.int:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


@dataclass
class Flow:
    """The core of one graph.

    `core` holds all nodes but views, in graph order; `deps[n]` what n reads or waits for (core nodes, through views; SymInts included).
    `position` is a node's place in the graph. An operator that writes to an argument waits for all earlier readers of that memory, and all
    later ones wait for it.
    """

    graph: fx.Graph
    core: list[fx.Node] = field(default_factory=list)
    deps: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    position: dict[fx.Node, int] = field(default_factory=dict)
    bases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    outside: dict[fx.Node, str | None] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, fx.Node] = field(default_factory=dict)  # size symbols that a node of the graph is
    numels: dict[fx.Node, sympy.Expr] = field(default_factory=dict)
    refusals: dict[fx.Node, Refusal] = field(default_factory=dict)  # why a node is in no region, as far as is known

    @classmethod
    def of(cls, graph: fx.Graph) -> Flow:
        flow = cls(graph)
        memory: dict[fx.Node, list[fx.Node]] = {}  # base -> core nodes that read or write its memory so far
        writers: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(graph.nodes):
            flow.position[node] = position
            if is_view(node):
                flow.bases[node] = flow.base(node.args[0])
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                flow.sizes.setdefault(value.node.expr, node)
            flow.core.append(node)
            flow.bases[node] = node
            deps = dict.fromkeys(flow._reads(node))
            tensors = [d for d in deps if is_tensor(d)]
            written = _written(node)
            for base in tensors:
                if base in writers:
                    deps[writers[base]] = None
            for target in written:
                base = flow.base(target)
                deps.update(dict.fromkeys(n for n in memory.get(base, ()) if n is not node))
                writers[base] = node
            for base in tensors:
                memory.setdefault(base, []).append(node)
            flow.deps[node] = list(deps)
            if node.op == "call_function":
                flow.outside[node] = why_outside(node)
        return flow

    def base(self, node: fx.Node) -> fx.Node:
        """The core node whose memory `node` shows."""
        return self.bases[node]

    def _reads(self, node: fx.Node) -> Iterator[fx.Node]:
        for argument in node.all_input_nodes:
            while is_view(argument):
                yield from (a for a in argument.all_input_nodes[1:])  # the sizes of a view
                argument = argument.args[0]  # type: ignore[assignment]
            yield argument

    def fusable(self, node: fx.Node) -> bool:
        """Whether `node` may be in a region as far as can be said without a plan."""
        return node in self.outside and self.outside[node] is None

    def uses(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(reader, the reader's argument that shows `node`) of every core reader, through views."""
        stack = [node]
        while stack:
            shown = stack.pop()
            for user in shown.users:
                if is_view(user) and user.args[0] is shown:
                    stack.append(user)
                elif not is_view(user):
                    yield user, shown

    def numel(self, node: fx.Node) -> sympy.Expr:
        """The number of elements of `node`'s value."""
        known = self.numels.get(node)
        if known is None:
            # Multiplied as expressions: a SymInt that is compared adds a guard.
            known = self.numels[node] = sympy.Mul(*map(expression, node.meta["val"].shape))
        return known

    def same_size(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values surely have equally many elements."""
        return is_tensor(a) and is_tensor(b) and sympy.expand(self.numel(a) - self.numel(b)) == 0

    def at_least(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether `a` may have as many elements as `b`."""
        return is_tensor(a) and is_tensor(b) and not smaller(self.numel(a), self.numel(b))

    def refuse(self, node: fx.Node, refusal: Refusal) -> None:
        """Keep the first reason why `node` did not join a region. A plan is shared by equal candidates, so the place is filled in here."""
        self.refusals.setdefault(node, Refusal(refusal.reason, node.name, source_line(node), refusal.rule))


def _written(node: fx.Node) -> list[fx.Node]:
    if not is_effect(node):
        return []
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    written = [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [g for g in written if isinstance(g, fx.Node)]
