"""DSI_CHECK=1: the graph as Dynamo handed it over runs beside the compiled one, and both must agree."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.context import Context
from dsi.ir.errors import DsiInternalError
from dsi.ir.tolerances import TOLERANCES, disagreement
from dsi.passes.writes import may_write
from torch import fx
from torch.utils import _pytree as pytree


def reference_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` that no stage will change, sharing its parameters."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def beside(compiled: Callable[..., Any], reference: fx.GraphModule, context: Context) -> Callable[..., Any]:
    """`compiled`, which after each call raises `DsiInternalError` unless `reference` gives the same results and writes the same to its
    inputs.

    A result in a wide dtype is held to the tolerance of the coarsest dtype that its values were rounded to. An integer or bool that was
    chosen by comparing floats (a greedy token, a mask) may turn where two of them nearly tie: a few such places are a warning.
    The reference runs on copies of all inputs that keep their aliasing, so memory for a second model is needed. Where the compiled graph
    reads a weight as int8, the reference computes with what that int8 stands for.
    """
    placeholders = reference.graph.find_nodes(op="placeholder")
    (output,) = reference.graph.find_nodes(op="output")
    floats = _floats_before(reference.graph)
    # One that is written to shows what any part of the graph has computed.
    everything = frozenset[torch.dtype]().union(*floats.values())
    returned = [floats.get(leaf, frozenset()) for leaf in pytree.tree_leaves(output.args)]

    @torch._dynamo.disable
    def checked(*args: Any) -> Any:
        copies = clone_inputs(args)
        results = compiled(*args)
        expected = _with_rounded_weights(reference, args, copies, context)
        for node, value, wanted in zip(placeholders, args, copies, strict=True):
            _compare(f"after the call, the input {node.name}", value, wanted, everything)
        leaves = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), returned, strict=True)
        for i, (value, wanted, behind) in enumerate(leaves):
            _compare(f"output {i}", value, wanted, behind)
        return results

    return checked


_LOOKUPS = (F.embedding, torch.ops.aten.embedding.default)


def _with_rounded_weights(reference: fx.GraphModule, args: Sequence[Any], copies: list[Any], context: Context) -> Any:
    """`reference` of `copies`, except that linears read what int8 makes of their weights. A table that an embedding reads is as it was."""
    rounded = {}
    if context.dequantised is not None:
        found = [context.dequantised(value) if isinstance(value, torch.Tensor) else None for value in args]
        rounded = {id(new): (old, new) for old, new in zip(copies, found, strict=True) if new is not None}
        copies = [old if new is None else new for old, new in zip(copies, found, strict=True)]
    if not rounded:
        return reference(*copies)

    class Run(fx.Interpreter):
        def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            if target in _LOOKUPS:
                args, kwargs = pytree.tree_map(lambda value: rounded[id(value)][0] if id(value) in rounded else value, (args, kwargs))
            return super().call_function(target, args, kwargs)

    return Run(reference).run(*copies)


def _floats_before(graph: fx.Graph) -> dict[fx.Node, frozenset[torch.dtype]]:
    """For each node the floating dtypes of what is computed on the way to it, itself included; in a graph that writes to tensors all that
    there are, since what is written shows where no argument leads."""
    found: dict[fx.Node, frozenset[torch.dtype]] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        computed = node.op not in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and value.is_floating_point()
        found[node] = frozenset({value.dtype} if computed else ()).union(*(found[before] for before in node.all_input_nodes))
    if any(map(may_write, graph.nodes)):
        return dict.fromkeys(found, frozenset[torch.dtype]().union(*found.values()))
    return found


def _compare(what: str, value: Any, wanted: Any, floats: frozenset[torch.dtype]) -> None:
    """`floats`: the floating dtypes that led to the value."""
    if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor):
        coarsest = max(floats & TOLERANCES.keys(), key=lambda dtype: TOLERANCES[dtype].relative, default=None)
        if sentence := disagreement(value, wanted, coarsest):
            sentence = f"dsi check: {what} is not what the uncompiled graph gives: {sentence}"
            comparable = floats and value.dtype == wanted.dtype and value.shape == wanted.shape and value.dtype not in TOLERANCES
            differing = int((value != wanted).sum()) if comparable else value.numel()
            if not comparable or differing > max(1, value.numel() // 10):
                raise DsiInternalError(sentence)
            warnings.warn(f"{sentence} in {differing} of {value.numel()} places; floats that nearly tie may do that", stacklevel=2)
    elif not isinstance(value, torch.Tensor) and value != wanted and not (value != value and wanted != wanted):
        raise DsiInternalError(f"dsi check: {what} is {value}, the uncompiled graph gives {wanted}")


def clone_inputs(args: Sequence[Any]) -> list[Any]:
    """Copies of `args` in which two tensors share memory exactly where they did before."""
    storages: dict[int, torch.UntypedStorage] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in storages:
            storages[key] = storage.clone()
        with torch.no_grad():
            twin = torch.empty(0, dtype=value.dtype, device=value.device)
            twin.set_(storages[key], value.storage_offset(), value.size(), value.stride())
        return twin.requires_grad_(value.requires_grad)

    return [clone(value) for value in args]
