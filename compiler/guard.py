"""The guard: graphs that dsi does not touch, because only running them as they are keeps their meaning.

Lifted operators have no gradients, random operators must draw the same numbers in the same order, and autocast and tensor subclasses
change what a call means after it has been looked at. For these the backend returns `gm.forward`, which is exact in every respect, second
derivatives included.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from dsi.ir.randomness import is_random
from dsi.ir.source import source_line
from dsi.passes.autocast import is_idle_switch, is_switch
from torch import fx
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .memory import MemoryGuard

DEVICES = ("cpu", "cuda")


def why_aside(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """A sentence that says why `gm` (Dynamo's graph) is to be run as it is, None where it may be compiled."""
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if reason := _forward_mode():
        return reason
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and (is_traceable_wrapper_subclass(value) or type(value) not in _PLAIN):
            return f"an input is a tensor subclass ({type(value).__name__})"
        if isinstance(value, torch.Tensor) and value._is_zerotensor():
            return "an input is a tensor of zeros without memory, as some derivatives are"
    memory = MemoryGuard(example_inputs)
    for node in _nodes(gm):
        if reason := _node_reason(node) or memory.why_not(node):
            where = source_line(node)
            return f"{reason} ({node.name}{f' at {where}' if where else ''})"
    return _gradients(gm) or _emptiness(gm)


_PLAIN = {torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor}


def _forward_mode() -> str | None:
    """Whether forward-mode derivatives are taken, which kernels do not carry. Dynamo is to ask before each call: it does not by itself."""
    if TracingContext.try_get() is not None:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import GlobalStateSource

        install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    return "forward-mode derivatives are taken" if forward_ad._current_level >= 0 else None


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of `gm` and of the graphs inside it (branches, loop bodies, checkpointed parts)."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _gradients(gm: fx.GraphModule) -> str | None:
    """Whether an output, or an input after its mutation, wants gradients. `no_grad` inside the model is seen in the values that Dynamo
    computed.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        # A leaf that requires gradients is a parameter; one that is no leaf any more has been written to with gradients on.
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            return f"an input that is written to wants gradients ({node.name})"
        if node.op == "output":
            for used in node.all_input_nodes:
                value = used.meta.get("example_value")
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    return f"an output wants gradients ({used.name}); use torch.no_grad() or torch.inference_mode() for inference"
    return None


def _emptiness(gm: fx.GraphModule) -> str | None:
    """Whether all outputs are empty: a batch of nothing. There is nothing to gain, and eager's own words if it does not like that."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    empty = tensors and all(any(isinstance(size, int) and size == 0 for size in value.shape) for value in tensors)
    return "all outputs are empty" if empty else None


def _node_reason(node: fx.Node) -> str | None:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            return f"a value is a tensor subclass ({type(value).__name__})"
        if value.is_neg():
            return "a value is negated only where it is read (torch._neg_view, .imag of a conjugate), which kernels cannot see"
        if value.is_complex() and not _turns(node, value):
            return "a value is complex"
        if value.device.type not in (*DEVICES, "meta"):
            return f"a value is on {value.device.type}; dsi compiles for {' and '.join(DEVICES)}"
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        module = getattr(node.target, "__module__", "") or ""
        if is_switch(node) and not is_idle_switch(node):
            return "autocast is switched on inside the graph"
        if name.startswith("quantize_per_"):
            return "a value is quantised by torch itself, which tracing takes for a float"
        if "functorch" in module or name in ("grad", "backward"):
            return f"it transforms functions ({name})"
    if is_random(node):
        return "an operator is random"
    return None


# What is done to complex values to turn pairs of channels; all else that is complex is exact only as it is.
_TURNING = {
    *(torch.polar, torch.view_as_complex, torch.mul, operator.mul, operator.getitem, torch.unsqueeze, torch.reshape, torch.permute),
    *("mul", "unsqueeze", "view", "reshape", "expand", "transpose", "permute", "to", "contiguous"),
}


def _turns(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether a complex value is an input, or made as rotary embedding makes it of values that are no conjugates."""
    if value.is_conj() or value.dtype not in (torch.complex64, torch.complex128):
        return False
    return node.op in ("placeholder", "get_attr") or (node.target in _TURNING and not any(isinstance(a, complex) for a in node.args))
