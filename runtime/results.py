"""What a flat graph gives back, kept as it is through Inductor's passes: results that share no memory, and writes to inputs.

Inductor orders reads and writes of memory by its own notes of what shares it. These miss views of another dtype, copies that it takes out,
and scatters that it makes in place: a read comes after the write that it was to come before. So the graph that it compiles writes to no
input: what is to be written is a result like others, and copied when all is computed. (Key and value caches are the exception: lowering
has seen to it that nobody reads what a write there replaces.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Boxed = Callable[[list[Any]], Sequence[Any]]


def take_writes(gm: fx.GraphModule) -> list[int]:
    """Makes of each `copy_` to an input a further result of the flat graph `gm`, in order; returns the numbers of these inputs."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    results, written = _results(gm), []
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        into, value = node.args[:2]
        if not isinstance(value, fx.Node) or into not in placeholders or set(node.users) - {output} or _cannot_wait(node, into):
            continue
        results = [into if result is node else result for result in results]
        results.append(value)
        written.append(placeholders.index(into))
        output.args = (tuple(results),)
        gm.graph.erase_node(node)
    if written:
        gm.recompile()
    return written


def _cannot_wait(write: fx.Node, into: fx.Node) -> bool:
    """Whether a node after `write` reads or writes the input, through a view that was made before it, too."""
    later = write.next
    while later.op != "output":
        if any(_origin(read) is into for read in later.all_input_nodes):
            return True
        later = later.next
    return False


def writing(run: Boxed, written: Sequence[int]) -> Boxed:
    """`run`, whose last results are what the inputs numbered `written` are to hold, as a callable that writes them and leaves them out."""
    if not written:
        return run
    count = len(written)

    def call(inputs: list[Any]) -> Sequence[Any]:
        into = [inputs[number] for number in written]
        results = run(inputs)
        torch._foreach_copy_(into, list(results[-count:]))
        return results[:-count]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def several_of_one_memory(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """The numbers of results of a flat graph that are views of what an earlier one shows, too, each with that of the first result that is
    the same node."""
    first: dict[fx.Node, int] = {}
    seen: dict[fx.Node, fx.Node] = {}
    found = []
    for number, node in enumerate(_results(gm)):
        if isinstance(node, fx.Node):
            first.setdefault(node, number)
            if seen.setdefault(_origin(node), node) is not node:
                found.append((number, first[node]))
    return found


def told_apart(run: Boxed, several: Sequence[tuple[int, int]]) -> Boxed:
    """`run` such that no two results are a single tensor that are two in its graph, where `several` (of `several_of_one_memory`) show the
    same memory: whoever resizes one, or puts a dimension into it, does not mean the other.
    """
    if not several:
        return run

    def call(inputs: list[Any]) -> Sequence[Any]:
        results = list(run(inputs))
        for number, first in several:
            if first < number:
                results[number] = results[first]
            elif any(other is results[number] for other in results[:number]):
                results[number] = results[number].view(results[number].shape)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def memory_of(gm: fx.GraphModule) -> list[fx.Node | None]:
    """For each result of a flat graph the node that made the memory which it shows; None for a number."""
    return [_origin(node) if isinstance(node, fx.Node) else None for node in _results(gm)]


def _results(gm: fx.GraphModule) -> list[Any]:
    results: Any = gm.graph.output_node().args[0]
    return list(results)


def keep_apart(gm: fx.GraphModule, before: Sequence[fx.Node | None], written: Sequence[int]) -> None:
    """Copies those results of the flat graph `gm` that share memory with an input or an earlier result now and did not `before`
    (`memory_of` then), because a pass has found that adding zeros, or the like, changes nothing; and what is to be written to an input
    and is another one that is written to, too.
    """
    output = gm.graph.output_node()
    results = _results(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    overwritten = {placeholders[number] for number in written}
    seen: dict[fx.Node, fx.Node | None] = {}
    first_write = len(results) - len(written)
    changed = False
    for number, (node, was) in enumerate(zip(results, before, strict=True)):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            continue
        origin = _origin(node)
        if number >= first_write:
            shared = origin in overwritten
        elif origin.op == "placeholder":
            shared = origin is not was
        else:
            shared = origin in seen and seen[origin] is not was
        seen.setdefault(origin, was)
        if shared:
            with gm.graph.inserting_before(output):
                copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta.update(node.meta)
            copy.meta["val"] = torch.empty_like(node.meta["val"])
            results[number], changed = copy, True
    if changed:
        output.args = (tuple(results),)
        gm.recompile()


def _origin(node: fx.Node) -> fx.Node:
    """The node that made the memory which `node` shows: `node` itself unless it is a view."""
    while _is_view(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_view(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)
