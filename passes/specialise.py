"""Numbers that modules and globals hold (the epsilon of a norm, a scale, pi) become literals, although Dynamo made them inputs.

Under `dynamic=True` Dynamo passes every Python float of a model as a tensor and reads it back by `.item()`. A norm whose epsilon is such a
value is no norm that a rule knows. Each of them is fixed at its value by a guard, so that a module whose number changes is compiled anew;
numbers that a caller passes stay inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import GuardSource
from torch.fx.experimental.symbolic_shapes import guard_scalar


def specialise(gm: fx.GraphModule) -> None:
    """Replace in place every float of Dynamo's graph that is known, or comes from a module's attribute or a global, by its value."""
    for node in list(gm.graph.find_nodes(op="call_method", target="item")):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and _is_held(value):
            node.replace_all_uses_with(guard_scalar(value))
            gm.graph.erase_node(node)


def _is_held(value: torch.SymFloat) -> bool:
    """Whether all that `value` is made of was read off modules and globals."""
    environment: Any = value.node.shape_env
    known: dict[Any, list[Any]] = getattr(environment, "var_to_sources", {})
    return all(any(map(_held, known.get(symbol, ()))) for symbol in value.node.expr.free_symbols)


def _held(source: Any) -> bool:
    place = source.guard_source
    place = place() if callable(place) else place  # a method before torch 2.12 or so
    return place.is_unspecialized_nn_module() or place.is_specialized_nn_module() or place is GuardSource.GLOBAL
