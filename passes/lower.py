"""Lower: KV writes happen in place where nobody can tell, and every region gets what its kernel is printed from.

A functional `kv_write` costs a copy of the whole cache and the epilogue `copy_` another. Both go where the chain

    cache (a graph input) -> kv_write -> … -> kv_write -> copy_(cache, ·)

is all there is to the new value: nothing reads a state of the cache after the next write has replaced it, in the order in which the graph
runs, and the new value leaves the graph only as that input. A write into a tensor that the graph has just made itself (the lazily allocated
cache of a prefill) needs no copy either, if nothing else reads that tensor. Every other write stays functional, and the copy is reported.
What an elementwise region computes for an input may be stored there by its kernel (passes/stored.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from dsi.ir import analysis, ops
from dsi.ir.context import Context
from dsi.ir.index_map import size_of
from dsi.ir.region import Region
from dsi.ir.source import source_line
from dsi.ir.spec import Aliases, output_aliases
from torch import fx

from .layouts import weights_across
from .stored import mark_stored, readers, sink

_COPY = torch.ops.aten.copy_.default


def lower(gm: fx.GraphModule, context: Context) -> None:
    """Make KV writes of the fused graph `gm` in place where allowed and attach a `KernelSpec` to each region."""
    sink(gm.graph)
    writes = _writes(gm.graph)
    aliases = output_aliases(gm)  # before anything is written in place
    placed: set[fx.Node] = set()
    for copy in gm.graph.find_nodes(op="call_function", target=_COPY):
        chain = _chain(copy, writes)
        if not chain:
            continue
        reason = _why_not_in_place(copy, chain, aliases)
        if reason is None and not context.fuel.take(f"lower {', '.join(w.value.name for w in chain)} in place of {chain[0].cache.name}"):
            reason = "the fuel is spent (DSI_FUEL)"
        placed.update(w.value for w in chain)
        if reason is None:
            _write_in_place(copy, chain)
            continue
        for write in chain:
            _note(context, write, reason)
    for write in writes.values():
        if write.value in placed:
            continue
        reason = _why_not_reused(write)
        if reason is not None:
            _note(context, write, reason)
        elif write.region is not None:
            write.region.in_place[write.output] = write.input
    mark_stored(gm.graph)
    gm.graph.lint()
    gm.recompile()
    written = _written(gm.graph)
    for node in gm.graph.nodes:
        if isinstance(region := node.meta.get("region"), Region) and region.plan is not None:
            constants = frozenset(n for n, arg in enumerate(node.args) if isinstance(arg, fx.Node) and _is_constant(arg, written))
            region.spec = analysis.kernel_spec(region.name, region.body, region.plan, constants)
            region.spec.library = context.options.library
            if region.key:
                # Equal bodies are not served by one kernel where other inputs are constants, or other kernels are allowed.
                region.key += f"-{sum(1 << number for number in constants):x}{'' if context.options.library else '-own'}"
    context.report.across = weights_across(gm, context)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory something in the graph writes to."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(region := _region_of(node), Region):
            written.update(_base(node.args[number]) for number in region.in_place.values())
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            arguments = zip(node.target._schema.arguments, node.args, strict=False)
            written.update(_base(value) for argument, value in arguments if argument.is_write and isinstance(value, fx.Node))
    return written


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in, through views."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        viewed = node.args[0]
        assert isinstance(viewed, fx.Node)
        node = viewed
    return node


def _is_constant(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether no region of the graph writes the memory of a value: a parameter, say, or its int8 pack."""
    base = _base(node)
    result = base.target is operator.getitem and _region_of(base.args[0]) is not None
    return base not in written and (base.op in ("placeholder", "get_attr") or not result)


@dataclass(frozen=True)
class _Write:
    """One `kv_write` of the outer graph: by itself (`region` None), or output number `output` of a region over its input number `input`."""

    value: fx.Node  # the outer node that has the new cache
    at: fx.Node  # the outer node that writes: `value` itself, or the region's call
    cache: fx.Node
    region: Region | None = None
    output: int = 0
    input: int = 0


def _writes(graph: fx.Graph) -> dict[fx.Node, _Write]:
    """The KV writes by the outer node that has the new value, in execution order."""
    found: dict[fx.Node, _Write] = {}
    for node in graph.nodes:
        if node.target is ops.kv_write:
            found[node] = _Write(node, node, node.args[0])
        elif node.op == "call_function" and node.target is operator.getitem and isinstance(region := _region_of(node.args[0]), Region):
            written = region.outputs[node.args[1]]
            if written.target is ops.kv_write and written.args[0] in region.inputs:
                number = region.inputs.index(written.args[0])
                found[node] = _Write(node, node.args[0], node.args[0].args[number], region, node.args[1], number)
    return found


def _region_of(node: object) -> Region | None:
    return node.meta.get("region") if isinstance(node, fx.Node) else None


def _chain(copy: fx.Node, writes: dict[fx.Node, _Write]) -> list[_Write]:
    """The writes by which the input that `copy` writes to became what it writes, first to last; [] if that is not how it came about."""
    cache, value = copy.args[0], copy.args[1]
    chain: list[_Write] = []
    while isinstance(value, fx.Node) and value in writes:
        chain.append(writes[value])
        value = writes[value].cache
    return chain[::-1] if value is cache and isinstance(cache, fx.Node) and cache.op == "placeholder" else []


def _why_not_in_place(copy: fx.Node, chain: list[_Write], aliases: Aliases) -> str | None:
    """Why the writes of `chain` may not happen in the input's own memory; None if they may."""
    cache = chain[0].cache
    order = {node: i for i, node in enumerate(cache.graph.nodes)}
    if others := [c for c in cache.users if c.target is _COPY and c.args[0] is cache and c is not copy]:
        return f"{cache.name} is written to by {others[0].name} too"
    states = [cache, *(w.value for w in chain)]
    for write, state in zip(chain, states, strict=False):
        if reason := _why_laid_out_otherwise(write, cache) or _why_writer_reads(write):
            return reason
        for reader, _ in readers(state):
            if reader not in (write.at, copy) and reader.op != "output" and order[reader] > order[write.at]:
                return f"{reader.name} reads {state.name} after {write.at.name} has replaced it"
    for state in states[1:]:
        for reader, shown in readers(state):
            if reader.op == "output" and not _listed_as_alias(reader, shown, cache, aliases):
                return f"the new value {state.name} is returned as a tensor of its own"
    return None


def _why_laid_out_otherwise(write: _Write, cache: fx.Node) -> str | None:
    """Why readers of the new value would look for it elsewhere in the memory of `cache`: their kernels know the strides of the value, which
    has no gaps. A cache may: a part of a longer one.
    """
    stated, actual = ([size_of(n) for n in node.meta["val"].stride()] for node in (write.value, cache))
    return None if stated == actual else f"{cache.name} lies in memory with gaps (strides {actual})"


def _why_writer_reads(write: _Write) -> str | None:
    """Why `write` cannot have its input and its result in one place: what writes looks at the cache otherwise, too."""
    given = [a for a in write.at.args if isinstance(a, fx.Node)]
    through = [shown for reader, shown in readers(write.cache) if reader is write.at and shown is not write.cache]
    if through or given.count(write.cache) > 1:
        return f"{write.at.name} reads {write.cache.name} otherwise, too{f' (as {through[0].name})' if through else ''}"
    if write.region is None:
        return None
    others = [n for n in write.region.inputs[write.input].users if n is not write.region.outputs[write.output]]
    return f"{write.at.name} reads {write.cache.name} otherwise, too ({others[0].name})" if others else None


def _why_not_reused(write: _Write) -> str | None:
    """Why the memory that `write` starts from may not become the result's; None if it may: the graph made it for nothing else."""
    cache = write.cache
    fresh = cache.op == "call_function" and isinstance(cache.target, torch._ops.OpOverload) and not _aliasing(cache.target)
    if not fresh:
        return (
            f"{cache.name} is no input that the graph writes back to"
            if cache.op == "placeholder"
            else f"{cache.name} is a part of {base.name}, and only a cache in a tensor of its own is written in place"
            if (base := _base(cache)).op == "placeholder" and base is not cache
            else f"{cache.name} is not the graph's own"
        )
    if reason := _why_laid_out_otherwise(write, cache) or _why_writer_reads(write):
        return reason
    if write.region is None:
        return f"{write.at.name} is in no region"
    other = next((reader for reader, _ in readers(cache) if reader is not write.at), None)
    return f"{other.name} reads {cache.name}, too" if other is not None else None


def _aliasing(target: torch._ops.OpOverload) -> bool:
    return any(a.alias_info is not None for a in target._schema.arguments)


def _listed_as_alias(output: fx.Node, shown: fx.Node, cache: fx.Node, aliases: Aliases) -> bool:
    """Whether each place where `shown` is returned is known to be an alias of the input `cache`."""
    returned = output.args[0]
    return isinstance(returned, (tuple, list)) and all(cache.name in aliases[i] for i, value in enumerate(returned) if value is shown)


def _write_in_place(copy: fx.Node, chain: list[_Write]) -> None:
    cache = chain[0].cache
    copy.replace_all_uses_with(cache)
    copy.graph.erase_node(copy)
    for write in chain:
        if write.region is not None:
            write.region.in_place[write.output] = write.input
            continue
        _, pos, new = write.value.args
        with write.value.graph.inserting_before(write.value):
            made = write.value.graph.call_function(ops.kv_write_, (cache, pos, new), dict(write.value.kwargs))
        made.meta = {**write.value.meta, "val": None}
        write.value.replace_all_uses_with(cache)
        write.value.graph.erase_node(write.value)


def _note(context: Context, write: _Write, reason: str) -> None:
    where = source_line(write.value)
    context.report.notes.append(f"the KV write {write.value.name}{f' at {where}' if where else ''} copies the whole cache: {reason}")
