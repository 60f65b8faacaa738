"""Results that a kernel may store where a `copy_` to an input would put them: a cache's lengths, one more each step.

A region computes the new value, and the graph's epilogue copies it to the input: a launch more, at the end of each step. Where the region
is elementwise, looks at the input at no other point than it stores to, and whatever else reads the input has run before it, nobody can
tell whether the kernel stored the value there itself. The `copy_` stays in the graph, marked, for executors that run the region's
operators one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from dsi.ir import tile as t
from dsi.ir.index_map import size_of
from dsi.ir.region import STORED, Region, value_of
from torch import fx

_COPY = torch.ops.aten.copy_.default


def sink(graph: fx.Graph) -> None:
    """Moves regions of which nothing is used but what the epilogue copies to inputs in front of the epilogue, behind what reads these
    inputs. To be done while the graph is functional but for its epilogue."""
    copies = graph.find_nodes(op="call_function", target=_COPY)
    written = {copy.args[0] for copy in copies}
    for call in list(graph.nodes):
        region = call.meta.get("region")
        if not copies or not isinstance(region, Region) or not isinstance(region.plan, t.RowPlan):
            continue
        users = [copy for part in call.users for copy in part.users]
        own = {copy.args[0] for copy in users if copy in copies}
        # What another copy replaces may be replaced in place by then.
        if users and all(copy in copies for copy in users) and not any(arg in written - own for arg in call.args):
            for node in (call, *call.users):
                copies[0].prepend(node)


def mark_stored(graph: fx.Graph) -> None:
    """Marks each `copy_` of a lowered graph that the kernel of a region may do."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_COPY):
        if _may_be_stored(copy, order):
            copy.meta[STORED] = True


def readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(reader, what it reads) for everything that reads the memory of `node`, through views."""
    stack = [node]
    while stack:
        shown = stack.pop()
        for user in shown.users:
            view = user.op == "call_function" and (
                (isinstance(user.target, torch._ops.OpOverload) and user.target.is_view) or user.target is operator.getitem
            )
            if view and user.args[0] is shown:
                stack.append(user)
            else:
                yield user, shown


def _may_be_stored(copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    into, source = copy.args[:2]
    if len(copy.args) != 2 or copy.kwargs or not isinstance(into, fx.Node) or not isinstance(source, fx.Node) or into.op != "placeholder":
        return False
    call = source.args[0] if source.target is operator.getitem else None
    region = call.meta.get("region") if isinstance(call, fx.Node) else None
    if not isinstance(call, fx.Node) or not isinstance(region, Region) or set(source.users) != {copy} or not _lie_alike(into, source):
        return False
    output = source.args[1]
    assert isinstance(output, int)
    if output in region.in_place or not _stores_where_it_reads(region, output, [n for n, arg in enumerate(call.args) if arg is into]):
        return False
    return all(
        (reader is call and shown is into) or reader in (copy, copy.graph.output_node()) or order[reader] < order[call]
        for reader, shown in readers(into)
    )


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether the tensors of two nodes have the same elements at the same places of memory."""
    a, b = value_of(one), value_of(other)
    if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
        return False
    return all(size_of(x) == size_of(y) for x, y in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True))


def _stores_where_it_reads(region: Region, output: int, inputs: list[int]) -> bool:
    """Whether a region's kernel may store output `output` in the memory of the inputs numbered `inputs`: it is computed point by point, and
    only from their elements at the point itself, of which nothing else is computed."""
    if not isinstance(region.plan, t.RowPlan) or region.plan.reductions:
        return False
    stores = [store for store in region.plan.stores if store.output == output]
    if len(stores) != 1 or stores[0].base is not None:
        return False
    read = {id(store): [part for part in _loads(store) if part.input in inputs] for store in region.plan.stores}
    others = [loads for store in region.plan.stores if store is not stores[0] for loads in read[id(store)]]
    return not others and all(load.coords == stores[0].coords for load in read[id(stores[0])])


def _loads(store: t.Store) -> Iterator[t.Load]:
    roots = (store.value, *(at for at in store.coords if isinstance(at, t.Expr)))
    return (part for part in t.parts_of(*roots) if isinstance(part, t.Load))
