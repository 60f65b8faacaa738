"""Traces a plain graph of torch functions to functional ATen: torch's functionalisation runs it on fakes, and a recorder writes a node for
every operator that then runs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from dsi.ir.fakes import Fakes
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .plain import OWN, Refusal, memory, why_not_plain

_private: Any = torch  # whose functions for functionalisation have no stubs
_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")
_COPY = torch.ops.aten.copy_.default
_DEVICE = torch.ops.prim.device.default
_REFUSED_TAGS = {
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.data_dependent_output: "reads a value",
}


def functional_graph(dynamo: fx.Graph, fakes: Sequence[Tensor], fake_mode: Any) -> tuple[fx.Graph, tuple[int, ...]]:
    """The graph of what `dynamo` (plain by `plain.py`) computes from `fakes`, with `meta["val"]` on every node, and the numbers of the
    inputs that it writes to: one `copy_` each, at the end. Raises `Refusal` for what only tracing finds."""
    graph = fx.Graph()
    recorder = _Recorder(graph)
    try:
        with _tracing(fake_mode, recorder):
            results, written = _run_functionalised(dynamo, fakes, recorder)
    except Refusal:
        raise
    except Exception as error:  # AOTAutograd may know better, and if not it says it better
        raise Refusal(f"tracing failed with {type(error).__name__}: {error}") from error
    graph.output(tuple(map(recorder.node_of, results)))
    _look_at_result(graph, dynamo)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=_COPY):
        if isinstance(node.args[1], fx.Node) and "stack_trace" in node.args[1].meta:
            node.meta["stack_trace"] = node.args[1].meta["stack_trace"]
    return graph, written


@contextlib.contextmanager
def _tracing(fake_mode: Any, recorder: _Recorder) -> Iterator[None]:
    """Within: operators run on fakes, and `recorder` writes them down. Sizes that depend on values leave no trace in the compilation."""
    from torch._dispatch.python import enable_python_dispatcher

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_mode)
        if fake_mode.shape_env is not None:
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(recorder)
        yield


def _run_functionalised(dynamo: fx.Graph, fakes: Sequence[Tensor], recorder: _Recorder) -> tuple[list[Tensor], tuple[int, ...]]:
    """What the graph returns, and the numbers of the inputs that were written to, their writes recorded."""
    inputs = [recorder.silently(fake.detach) for fake in fakes]  # the same memory; the state of the compilation's own fakes stays
    for number, value in enumerate(inputs):
        recorder.know(value, recorder.graph.placeholder(f"arg{number}_1"))
    torch._enable_functionalization(reapply_views=True)
    try:
        wrapped = [torch._to_functional_tensor(value) for value in inputs]
        for fake, wrapper in zip(fakes, wrapped, strict=True):
            _private._mirror_autograd_meta_to(
                fake, wrapper
            )  # composite operators look whether a weight wants gradients, even if it gets none
        results = pytree.tree_leaves(_interpret(dynamo, wrapped, recorder))
    finally:
        torch._disable_functionalization()
    recorder.source = None
    written = []
    for number, (value, wrapper) in enumerate(zip(inputs, wrapped, strict=True)):
        torch._sync(wrapper)
        now = torch._from_functional_tensor(wrapper)
        if _private._functionalize_has_metadata_mutation(wrapper) or _private._functionalize_was_storage_changed(wrapper):
            raise Refusal(f"the input {number} changes its shape or its memory")
        if _private._functionalize_has_data_mutation(wrapper) and now is not value:
            if _private._functionalize_are_all_mutations_hidden_from_autograd(wrapper):
                raise Refusal(f"the input {number} is written to behind autograd's back")
            value.copy_(now)
            written.append(number)
    return [_unwrapped(result) for result in results], tuple(written)


def _unwrapped(result: Any) -> Tensor:
    if not torch._is_functional_tensor(result):
        raise Refusal("an output is no result of the graph's operators")
    torch._sync(result)
    return torch._from_functional_tensor(result)


def _interpret(dynamo: fx.Graph, inputs: Sequence[Tensor], recorder: _Recorder) -> Any:
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    for node in dynamo.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        for read in node.all_input_nodes if node.op != "output" else ():
            if isinstance(values[read], Tensor) and torch._is_functional_tensor(values[read]):
                # A view of what has been written to since is made anew, with the line of the model that has made it.
                recorder.source = read if read.op != "placeholder" else None
                torch._sync(values[read])
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        recorder.source = node
        values[node] = getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args, **kwargs)
    raise AssertionError("a graph without an output node")


class _Recorder(TorchDispatchMode):
    """Writes every operator that runs into `graph`, with the place in the model of `source`, Dynamo's node."""

    def __init__(self, graph: fx.Graph):
        super().__init__()
        self.graph = graph
        self.source: fx.Node | None = None
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # so that no number of `_nodes` is used again
        self._silent = False
        self._fakes = Fakes()

    def know(self, value: Tensor, node: fx.Node) -> None:
        """`value` is what `node` gives."""
        if reason := why_not_plain(value):
            raise Refusal(f"a value of {node.target} {reason}")
        node.meta["val"] = value
        self._nodes[id(value)] = node
        self._kept.append(value)

    def node_of(self, value: Tensor) -> fx.Node:
        """The node that gives `value`."""
        node = self._nodes.get(id(value))
        if node is None:
            raise Refusal(f"a tensor of shape {tuple(value.shape)} is a constant")
        return node

    def silently(self, function: Any) -> Any:
        """The result of `function`, whose operators are not recorded."""
        self._silent = True
        try:
            return function()
        finally:
            self._silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked of every tensor that is wrapped
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._silent or func.namespace == "prim":  # "prim" asks a tensor for its properties
            return func(*args, **kwargs)
        if func.namespace not in OWN:
            raise Refusal(f"{func} may do more than its schema says")
        for tag, reason in _REFUSED_TAGS.items():
            if tag in func.tags:
                raise Refusal(f"{func} {reason}")
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, self._arguments(args), self._arguments(kwargs), name)
        self._place(node)
        result = self._fakes.result(func, args, kwargs, lambda: func(*args, **kwargs))
        if func is _COPY:
            node.meta["val"] = result
        elif isinstance(result, Tensor):
            self.know(result, node)
        elif isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
            node.meta["val"] = result
            for number, item in enumerate(result):
                part = self.graph.create_node("call_function", operator.getitem, (node, number), {}, "getitem")
                self._place(part)
                self.know(item, part)
        else:
            raise Refusal(f"{func} gives a {type(result).__name__}, no tensor")
        return result

    def _place(self, node: fx.Node) -> None:
        if self.source is not None:
            node.meta.update((key, self.source.meta[key]) for key in _COPIED if key in self.source.meta)

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._arguments, value))
        if isinstance(value, dict):
            return {key: self._arguments(item) for key, item in value.items()}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Refusal("a size is not fixed")
        return value


def _look_at_result(graph: fx.Graph, dynamo: fx.Graph) -> None:
    """Refuses a graph that is not functional, writes to memory that two inputs show, returns an input's memory, or returns other shapes
    than Dynamo has found."""
    placeholders = set(graph.find_nodes(op="placeholder"))
    memories = [memory(node.meta["val"]) for node in placeholders]
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _COPY and node.args[0] in placeholders and node.args[0] not in written and node.args[1] not in written:
            if memories.count(memory(node.args[0].meta["val"])) > 1:
                raise Refusal(f"{node.args[0].name} is written to and shares its memory with another input")
            written.add(node.args[0])
        elif node.target is not operator.getitem and node.target._schema.is_mutable:
            raise Refusal(f"{node.name} writes to what is no input")
        elif not written.isdisjoint(node.all_input_nodes):
            raise Refusal(f"{node.name} reads an input that has been written to")
    returned = pytree.tree_leaves(dynamo.output_node().args[0])
    own: Any = graph.output_node().args[0]
    for mine, theirs in zip(own, returned, strict=True):
        value, expected = mine.meta["val"], theirs.meta["example_value"]
        if memory(value) in memories:
            raise Refusal(f"the output {theirs.name} shows memory of an input")
        memories.append(memory(value))
        if (value.shape, value.dtype, value.device) != (expected.shape, expected.dtype, expected.device):
            raise Refusal(f"the output {theirs.name} came out as {value.dtype} of shape {tuple(value.shape)}, not as Dynamo has found it")
