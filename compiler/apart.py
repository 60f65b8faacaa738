"""Inputs that did not share memory when a graph was compiled, and do when it is called: the graph runs as it was, for that call.

A graph that writes to an input is compiled for inputs that lie apart, or share memory as they did then. Dynamo asks before each call
whether two inputs are one tensor, not whether one is a view of the other: a write to one changes what the other holds. Parameters, buffers
and caches that are marked to keep their address are not asked about.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsi.passes.writes import may_write, written_by
from torch import Tensor, fx

from .memory import bytes_of


@dataclass(frozen=True)
class Inputs:
    """Numbers of inputs: those that are written to, and others that were apart from these. Of each, how many bytes it reaches over from its
    first one on, None where its sizes are not fixed."""

    written: dict[int, int | None]
    others: dict[int, int | None]


def inputs_that_lie_apart(gm: fx.GraphModule) -> Inputs | None:
    """The inputs of Dynamo's graph that must lie apart in each call; None where nothing is written, or there is nothing beside it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    places = {node: _memory(node) for node in placeholders}
    written = {_memory(one) for node in gm.graph.nodes if _writes(node) for one in written_by(node) if isinstance(one, fx.Node)}
    counts: dict[Any, int] = {}
    for place in places.values():
        counts[place] = counts.get(place, 0) + 1
    asked = {n: node for n, node in enumerate(placeholders) if places[node] is not None and counts[places[node]] == 1 and not _stays(node)}
    reach = {n: _fixed(bytes_of(node.meta["example_value"])) for n, node in asked.items()}
    changed = {n: reach[n] for n, node in asked.items() if places[node] in written}
    return Inputs(changed, {n: reach[n] for n in asked if n not in changed}) if changed and len(asked) > 1 else None


def keeping_apart(compiled: Callable[..., Any], reference: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
    """`compiled`, except that `reference` runs a call whose `inputs` share memory. A call looks at an address an input."""
    written, others = list(inputs.written.items()), list(inputs.others.items())
    fixed = all(size is not None for _, size in written)
    # Of the last call: the addresses of what is written to, what they reach over in order, and whether that overlaps. One tuple: threads.
    known: tuple[list[int], list[tuple[int, int]], bool] = ([], [], False)

    def call(*args: Any) -> Any:
        nonlocal known
        now = [args[number].data_ptr() for number, _ in written]
        addresses, reached, together = known
        if now != addresses or not fixed:
            reached = sorted(_reach(args[number], size) for number, size in written)
            together = any(begin < end for (_, end), (begin, _) in itertools.pairwise(reached))
            known = now, reached, together
        if together or any(_meets(_reach(args[number], size), reached) for number, size in others):
            return reference(*args)
        return compiled(*args)

    return call


def _fixed(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _reach(value: Tensor, size: int | None) -> tuple[int, int]:
    """The address of a tensor's first byte, and that behind its last."""
    begin = value.data_ptr()
    return begin, begin + (bytes_of(value) if size is None else size)


def _meets(reach: tuple[int, int], reached: Sequence[tuple[int, int]]) -> bool:
    """Whether something reaches over bytes that one of `reached` does, which are in order and do not overlap."""
    begin, end = reach
    before = bisect.bisect_left(reached, (end, 0)) - 1  # the last one that begins before `end`
    return before >= 0 and begin < reached[before][1] and begin < end


def _writes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and may_write(node)


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None


def _stays(node: fx.Node) -> bool:
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))
