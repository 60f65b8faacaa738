"""DSI_CHECK=1: the graph as Dynamo handed it over runs beside the compiled one, and both must agree."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.errors import DsiInternalError
from dsi.ir.source import captured_as
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
        rounds = context.dequantised is not None
        expected = _WithRoundedWeights(reference, args, copies, context).run(*copies) if rounds else reference(*copies)
        for node, value, wanted in zip(placeholders, args, copies, strict=True):
            _compare(f"after the call, the input {node.name}", value, wanted, everything)
        leaves = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), returned, strict=True)
        for i, (value, wanted, behind) in enumerate(leaves):
            _compare(f"output {i}", value, wanted, behind)
        return results

    return checked


def why_not_compared(reference: fx.GraphModule, context: Context) -> str:
    """Why the numbers of `reference` are no measure for the compiled graph's; "" where they are."""
    if context.options.activations:
        return "activations='int8' rounds what the uncompiled graph does not"
    names = Counter(map(captured_as, reference.graph.nodes))
    if any(not name or names[name] != 1 for name, _ in context.int8_reads):
        return "it is not known which operators of the uncompiled graph read weights that are int8"
    return ""


class _WithRoundedWeights(fx.Interpreter):
    """The uncompiled graph, each linear of which reads what int8 makes of its weight, in the format in which the compiled one does."""

    def __init__(self, reference: fx.GraphModule, args: Sequence[Any], copies: Sequence[Any], context: Context):
        """`copies` are what the graph runs on, `args` the tensors of which there are int8 forms."""
        super().__init__(reference)
        assert context.dequantised is not None
        self.dequantised = context.dequantised
        self.weights = [pair for pair in zip(args, copies, strict=True) if isinstance(pair[0], torch.Tensor)]
        captured = {captured_as(node): node for node in reference.graph.nodes}
        placeholders = reference.graph.find_nodes(op="placeholder")
        given = {_memory(node): value for node, value in zip(placeholders, args, strict=True)}
        self.forms = {self._reader(captured[name], form, given): form for name, form in context.int8_reads}
        self.form: Any = None

    def _reader(self, last: fx.Node, form: Any, given: dict[Any, Any]) -> fx.Node:
        """The operator that reads a weight which is int8 in `form`: `last`, or one before it where a rule took in what came after."""
        nodes = [last]
        for node in nodes:
            weights = [given.get(_memory(argument)) for argument in node.all_input_nodes]
            if any(isinstance(weight, torch.Tensor) and self.dequantised(weight, form) is not None for weight in weights):
                return node
            nodes += [argument for argument in node.all_input_nodes if argument not in nodes]
        return last

    def run_node(self, n: fx.Node) -> Any:
        self.form = self.forms.get(n)
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        found = super().fetch_args_kwargs_from_env(n)
        return found if self.form is None else pytree.tree_map(self._rounded, found)

    def _rounded(self, value: Any) -> Any:
        """`value`; where it is a weight, or a view of one, the same of its rounded numbers."""
        for weight, copied in self.weights if isinstance(value, torch.Tensor) else ():
            if value.untyped_storage()._cdata == copied.untyped_storage()._cdata and value.dtype == copied.dtype:
                whole = self.dequantised(weight, self.form)
                if whole is not None:
                    return whole.as_strided(value.shape, value.stride(), value.storage_offset() - copied.storage_offset())
        return value


def _memory(node: fx.Node) -> Any:
    """What nodes that show the same memory have in common."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


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
