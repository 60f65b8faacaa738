"""DSI_CHECK=1: the graph as Dynamo handed it over runs beside the compiled one, and both must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.errors import DsiInternalError
from dsi.ir.tolerances import disagreement
from torch import fx
from torch.utils import _pytree as pytree


def reference_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` that no stage will change, sharing its parameters."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def beside(compiled: Callable[..., Any], reference: fx.GraphModule) -> Callable[..., Any]:
    """`compiled`, which after each call raises `DsiInternalError` unless `reference` gives the same results and writes the same to its
    inputs.

    The reference runs on copies of all inputs that keep their aliasing, so memory for a second model is needed.
    """

    @torch._dynamo.disable
    def checked(*args: Any) -> Any:
        copies = clone_inputs(args)
        results = compiled(*args)
        expected = reference(*copies)
        names = [n.name for n in reference.graph.nodes if n.op == "placeholder"]
        for name, value, wanted in zip(names, args, copies, strict=True):
            _compare(f"after the call, the input {name}", value, wanted)
        for i, (value, wanted) in enumerate(zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True)):
            _compare(f"output {i}", value, wanted)
        return results

    return checked


def _compare(what: str, value: Any, wanted: Any) -> None:
    if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if sentence := disagreement(value, wanted):
            raise DsiInternalError(f"dsi check: {what} is not what the uncompiled graph gives: {sentence}")
    elif not isinstance(value, torch.Tensor) and value != wanted:
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
