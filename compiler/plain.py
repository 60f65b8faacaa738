"""Which of Dynamo's graphs are plain, so that one pass can trace them: what is refused before tracing, each with a sentence."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

# Where the functions of a plain graph are at home. Whatever else Dynamo writes into a graph changes a state, or is not torch's.
_HOMES = (torch, torch.nn.functional, torch._C._nn, torch.special, torch.linalg, operator, math)
OWN = ("aten", "prims", "dsi")
"""Namespaces of operators that do what their schema says and nothing besides."""
# Methods and functions that give a tensor, and do more than that.
_MORE = {"requires_grad_", "retain_grad", "rename_", "share_memory_", "data"}
_TRANSPOSED = ("T", "mT")  # properties of a tensor that are views of it
# What gives nothing: a write, and statistics, which Dynamo keeps.
_GIVE_NOTHING: tuple[Any, ...] = (operator.setitem, torch._C._log_api_usage_once)


class Refusal(Exception):
    """The graph is AOTAutograd's to trace; the message says why."""


def look_at_compilation(gm: fx.GraphModule) -> Any:
    """The tracing context of the compilation under way. Refuses what is not Dynamo's, and states that change how operators run."""
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None or tracing.fake_mode is None or "dynamo_compile_id" not in gm.meta or not hasattr(gm, "_param_name_to_source"):
        raise Refusal("the graph is not of a compilation of Dynamo's")
    if getattr(tracing, "fakify_first_call", False):
        raise Refusal("the first call is to return fakes")
    if tracing.fake_mode.propagate_real_tensors or torch._functorch.config.functionalize_rng_ops:
        raise Refusal("torch is configured to trace with real tensors, or random states")
    if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
        raise Refusal("inference mode or autocast is on")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Refusal("a transform of functorch's is under way")
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
        raise Refusal("compiled autograd is under way")
    if torch._C._len_torch_dispatch_stack():
        raise Refusal("a dispatch mode is on")
    if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
        raise Refusal("parameters or buffers belong to the graph instead of being its inputs")
    return tracing


def look_at_inputs(graph: fx.Graph, values: Sequence[Any], tracing: Any) -> list[Tensor]:
    """Fakes for the inputs, which share memory where the inputs do. Refuses inputs that are no plain tensors of fixed sizes."""
    fakes: list[Tensor] = []
    seen: set[int] = set()
    for node, value in zip(graph.find_nodes(op="placeholder"), values, strict=True):
        if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise Refusal(f"the input {node.name} is of type {type(value).__name__}")
        if value.is_inference() or value.is_quantized:
            raise Refusal(f"the input {node.name} is quantised, or made in inference mode")
        if value.requires_grad and torch.is_grad_enabled():
            raise Refusal(f"gradients are on, and the input {node.name} wants them")
        known = tracing.tensor_to_context.get(value)
        source = known.tensor_source if known is not None else None
        fake = tracing.fake_mode.from_tensor(value, symbolic_context=known, source=source, trace=known is None)
        for what in (fake, node.meta.get("example_value")):
            if reason := why_not_plain(what):
                raise Refusal(f"the input {node.name} {reason}")
        if fake.shape != value.shape or fake.stride() != value.stride():
            raise Refusal(f"the input {node.name} has changed its shape or strides while Dynamo looked at the model")
        if id(fake) in seen:
            raise Refusal(f"the input {node.name} is the same tensor as another one")
        seen.add(id(fake))
        fakes.append(fake)
    return fakes


def look_at_nodes(graph: fx.Graph) -> None:
    """Refuses nodes that do anything but compute tensors of fixed sizes from tensors."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op not in ("call_function", "call_method"):
            raise Refusal(f"{node.name} is a {node.op}")
        name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", "")).split(".")[0]  # of an overload, too
        if node.target in _GIVE_NOTHING and not node.users:
            continue
        if node.op == "call_function" and not _is_plain_function(node):
            raise Refusal(f"{node.name} calls {getattr(node.target, '__module__', None)}.{name}")
        if name in _MORE or _changes_shape_in_place(name):
            raise Refusal(f"{node.name} calls {name}, which changes more than values")
        leaves = pytree.tree_leaves(node.meta.get("example_value"))
        if not leaves:
            raise Refusal(f"{node.name} gives nothing")
        for value in leaves:
            if reason := why_not_plain(value):
                raise Refusal(f"{node.name} {reason}")


def look_at_outputs(graph: fx.Graph) -> None:
    """Refuses outputs that show memory of an input or of one another. Dynamo has run the graph as eager would, in-place writes included:
    its fakes share memory where eager's tensors do."""
    seen = {memory(node.meta["example_value"]) for node in graph.find_nodes(op="placeholder")}
    for node in pytree.tree_leaves(graph.output_node().args[0]):
        if not isinstance(node, fx.Node):
            raise Refusal("an output is no tensor")
        if memory(node.meta["example_value"]) in seen:
            raise Refusal(f"the output {node.name} shows memory of an input or of another output")
        seen.add(memory(node.meta["example_value"]))


def why_not_plain(value: Any) -> str:
    """What `value` is that no plain tensor of fixed sizes is, "" if it is one. The sentence goes on after a name."""
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, no tensor"
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        return f"is a tensor of layout {value.layout} and dtype {value.dtype}"
    if value.is_conj() or value.is_neg():
        return "is a conjugate or negative view"
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        return "has a size that is not fixed"
    return ""


def memory(value: Tensor) -> int:
    """A number of the memory that `value` shows, the same for all that show it."""
    return int(value.untyped_storage()._cdata)


def _is_plain_function(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in OWN
    if target is getattr:
        return node.args[1] in _TRANSPOSED
    name = getattr(target, "__name__", "")
    return any(getattr(home, name, None) is target for home in _HOMES)


@functools.cache
def _changes_shape_in_place(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # `torch.ops.aten` also has the attributes of any object
        return False
    return any(torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads())
