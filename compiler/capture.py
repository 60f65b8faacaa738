"""Dynamo's graph as a functional ATen graph in one pass, where it needs nothing of AOTAutograd but the tracing.

AOTAutograd runs a graph twice through several layers of Python, to learn what it mutates and aliases, and to trace what autograd,
subclasses and duplicate inputs need. A decode step or an encoder needs none of that: its inputs are plain tensors of fixed sizes, and its
outputs are new. For such a graph one pass is enough, over the same fakes and by the same functionalisation, and the graph is the same
(tests/backend/test_capture.py). Whatever is not plainly so is left to AOTAutograd.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")
_MODULES = ("torch", "torch.nn.functional", "torch._C._nn", "torch._C._special", "torch._ops.aten", "_operator", "math")
# What changes the state under which operators run, or makes a tensor whose values are part of the graph.
_STATE = {"tensor", "as_tensor", "scalar_tensor", "from_numpy", "requires_grad_", "backward"}
# What changes an input's sizes, strides or memory and not its values: no `copy_` at the end can say so.
_IN_PLACE_VIEWS = {
    *("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_", "rename_"),
    *("resize_", "resize_as_", "set_", "detach_", "share_memory_"),
}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_STATISTICS = {"_log_api_usage_once"}  # which Dynamo keeps


@dataclass
class Captured:
    """`gm`: functional ATen, but for `copy_` to its inputs at the end. `inputs`: its placeholders' fakes."""

    gm: fx.GraphModule
    inputs: list[Tensor]


class Unfit(Exception):
    """The graph is one for AOTAutograd; the reason says why."""


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured | str:
    """`gm`, Dynamo's graph of the compilation under way, as functional ATen; or why AOTAutograd has to trace it."""
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None or tracing.fake_mode is None:
        return "no compilation is under way"
    placeholders = gm.graph.find_nodes(op="placeholder")
    try:
        _look_at_inputs(placeholders, example_inputs)
        _look_at_nodes(gm.graph)
        _look_at_outputs(gm.graph)
        fakes = [_fake_of(value, tracing) for value in example_inputs]
        graph = _traced(gm.graph, fakes, tracing.fake_mode)
        _look_at_writes(graph, example_inputs)
    except Unfit as unfit:
        return str(unfit)
    graph.eliminate_dead_code()
    static = [number for number, node in enumerate(placeholders) if _keeps_its_place(node)]
    tracing.fw_metadata = SimpleNamespace(static_input_indices=static, input_info=(), output_info=(), num_intermediate_bases=0, tokens={})
    return Captured(fx.GraphModule(torch.nn.Module(), graph), fakes)


def without_gradients(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A boxed callable as one of its inputs, that runs without gradients whatever its caller has set: parameters may want them."""

    def call(*args: Any) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return run(list(args))
        torch._C._set_grad_enabled(False)
        try:
            return run(list(args))
        finally:
            torch._C._set_grad_enabled(True)

    return call


# ------------------------------------------------------------------------------------------------------------------ what it is fit for


def _look_at_inputs(placeholders: Sequence[fx.Node], values: Sequence[Any]) -> None:
    if torch.is_inference_mode_enabled():
        raise Unfit("inference mode is on")
    for node, value in zip(placeholders, values, strict=True):
        if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise Unfit(f"the input {node.name} is a {type(value).__name__}")
        if value.layout is not torch.strided or value.is_quantized or value.is_inference() or value.is_conj() or value.is_neg():
            raise Unfit(f"the input {node.name} is no plain tensor")
        example = node.meta.get("example_value")
        if not isinstance(example, Tensor) or not _fixed(example):
            raise Unfit(f"the input {node.name} has a size that is not fixed")


def _look_at_nodes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op in ("placeholder", "output") or name in _STATISTICS:
            continue
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            if not _fixed(value) if isinstance(value, Tensor) else isinstance(value, _SYMBOLIC):
                raise Unfit(f"{node.name} has a size that is not fixed")
        if node.op not in ("call_function", "call_method"):
            raise Unfit(f"{node.name} is a {node.op}")
        if name in _STATE or name in _IN_PLACE_VIEWS or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Unfit(f"{node.name} calls {name}")
        module = getattr(node.target, "__module__", None) or "torch"  # functions of C have none
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and module not in _MODULES:
            raise Unfit(f"{node.name} calls {module}.{name}")


def _look_at_outputs(graph: fx.Graph) -> None:
    """Refuses outputs that show memory of an input or of one another. Dynamo has run the graph as eager would, in-place writes included:
    its fakes share memory where eager's tensors do."""
    seen = {_memory(node.meta["example_value"]) for node in graph.find_nodes(op="placeholder")}
    for node in pytree.tree_leaves(graph.output_node().args[0]):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor):
            raise Unfit("an output is no tensor")
        if _memory(value) in seen:
            raise Unfit(f"the output {node.name} shows memory of an input or of another output")
        seen.add(_memory(value))


def _look_at_writes(graph: fx.Graph, values: Sequence[Any]) -> None:
    """Refuses writes that autograd could see, and those to memory that two inputs show; and, once more, outputs that show inputs."""
    placeholders = graph.find_nodes(op="placeholder")
    number = {node: i for i, node in enumerate(placeholders)}
    shown = Counter(map(_memory, values))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = number.get(node.args[0])
        if written is None or values[written].requires_grad:
            raise Unfit(f"{node.name} writes to what is no input, or to one that wants gradients")
        if shown[_memory(values[written])] > 1:
            raise Unfit(f"{placeholders[written].name} is written to and shares its memory with another input")
    seen = {_memory(node.meta["val"]) for node in placeholders}
    if any(_memory(node.meta["val"]) in seen for node in graph.output_node().all_input_nodes):
        raise Unfit("an output shows memory of an input")


def _fixed(value: Tensor) -> bool:
    return all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset()))


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _keeps_its_place(node: fx.Node) -> bool:
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def _fake_of(value: Tensor, tracing: Any) -> Tensor:
    found = tracing.fake_mode.from_tensor(value, static_shapes=True)
    if not _fixed(found):
        raise Unfit("an input has been given a size that is not fixed")
    return found


# --------------------------------------------------------------------------------------------------------------------------- tracing


class _Recorder(TorchDispatchMode):
    """Writes every ATen operator that runs into a graph, with `source`'s place in the model."""

    def __init__(self, graph: fx.Graph):
        super().__init__()
        self.graph = graph
        self.source: fx.Node | None = None
        self.nodes: dict[int, fx.Node] = {}
        self._kept: list[Any] = []  # so that no number of `nodes` is used again

    def know(self, value: Tensor, node: fx.Node) -> None:
        """`value` is what `node` gives."""
        if not _fixed(value):
            raise Unfit(f"{node.target} gives a tensor whose size depends on values")
        node.meta["val"] = value
        self.nodes[id(value)] = node
        self._kept.append(value)

    def node_of(self, value: Tensor) -> fx.Node:
        """The node that gives `value`."""
        node = self.nodes.get(id(value))
        if node is None:
            raise Unfit(f"a tensor of shape {tuple(value.shape)} is a constant")
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unfit(f"{func} draws random numbers")
        node = self.graph.create_node("call_function", func, self._arguments(args), self._arguments(kwargs), func.overloadpacket.__name__)
        self._carry(node)
        if isinstance(result, Tensor):
            self.know(result, node)
        elif isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
            node.meta["val"] = tuple(result) if isinstance(result, tuple) else list(result)
            for number, item in enumerate(result):
                part = self.graph.create_node("call_function", operator.getitem, (node, number), {}, "getitem")
                self._carry(part)
                self.know(item, part)
        else:
            raise Unfit(f"{func} gives a {type(result).__name__}")
        return result

    def _carry(self, node: fx.Node) -> None:
        if self.source is not None:
            node.meta.update((key, self.source.meta[key]) for key in _COPIED if key in self.source.meta)

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._arguments, value))
        if isinstance(value, dict):
            return {key: self._arguments(item) for key, item in value.items()}
        if isinstance(value, _SYMBOLIC):
            raise Unfit("a size is not fixed")
        return value


@contextlib.contextmanager
def _as_traced(fake_mode: Any, recorder: _Recorder) -> Iterator[None]:
    from torch._dispatch.python import enable_python_dispatcher

    with fake_mode, enable_python_dispatcher(), torch.no_grad(), torch._C._DisableAutocast(), recorder:
        yield


def _traced(dynamo: fx.Graph, fakes: Sequence[Tensor], fake_mode: Any) -> fx.Graph:
    graph = fx.Graph()
    recorder = _Recorder(graph)
    for number, fake in enumerate(fakes):
        recorder.know(fake, graph.placeholder(f"arg{number}_1"))

    def run(*inputs: Any) -> Any:
        values: dict[fx.Node, Any] = dict(zip(dynamo.find_nodes(op="placeholder"), inputs, strict=True))
        for node in dynamo.nodes:
            if node.op == "placeholder":
                continue
            recorder.source = node
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                recorder.source = None
                return args[0]
            if node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)
        raise AssertionError("a graph without an output node")

    try:
        with _as_traced(fake_mode, recorder):
            results = torch.func.functionalize(run, remove="mutations")(*fakes)
    except Unfit:
        raise
    except Exception as error:  # AOTAutograd may know better, and if not it says it better
        raise Unfit(f"{type(error).__name__}: {error}") from error
    graph.output(tuple(map(recorder.node_of, pytree.tree_leaves(results))))
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if "stack_trace" not in copy.meta and isinstance(copy.args[1], fx.Node):
            copy.meta.update((key, copy.args[1].meta[key]) for key in _COPIED if key in copy.args[1].meta)
    return graph
