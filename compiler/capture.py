"""Dynamo's graph as a functional ATen graph in one pass, where it is plain: AOTAutograd's graph, without its two passes.

AOTAutograd runs a graph twice through several layers of Python: once to learn what it mutates and what aliases what, once to trace it. That
is most of a warm start. What it looks after, and why a plain graph needs none of it:

* *Functionalisation.* The same one, torch's own in C++, here too: in-place writes become values, views of them are made anew
  (`functional.py`). A write to an input is one `copy_` at the end, in the order of the inputs.
* *Decompositions.* The backend asks AOTAutograd for none; composite operators come apart in torch's dispatcher, here as there.
* *Gradients.* No output and no written input may want them (the guard steps aside otherwise). That gradients are on while an input wants
  them is refused: composite operators may then come apart otherwise. A call runs without gradients, whatever its caller has set.
* *Version counters.* Kernels write to inputs behind autograd's back, so each call counts the write, as AOTAutograd's wrapper does: a tensor
  saved for a backward pass, or an int8 pack of a weight, is found out of date. A write that hides from autograd (`.data`) is refused.
* *Outputs that alias* inputs or one another are made anew from their base after each call: refused. So are inputs that change their shape
  or memory, and writes to an input whose memory another one shares, as seen when the graph is compiled (synthetic bases).
* *Duplicate inputs* get guards of their own where they are written to: refused, written to or not.
* *Symbolic sizes*, sizes and branches that depend on values, and whatever is no tensor: refused.
* *Effects* (printing, assertions, collectives, users' operators) are ordered by tokens: an operator that is not ATen's, torch's primitives'
  or dsi's is refused, and so is a call that gives no tensor.
* *Random numbers* keep their generator's state in AOTAutograd's tracing: refused.
* *Other kinds of tensors and modes*: subclasses, sparse, quantised, complex, conjugate or negative views, inference mode, functorch's
  transforms, compiled autograd, higher-order operators, constants in the graph: refused.
* *What Inductor asks* of the compilation under way (static inputs, donated buffers): answered in AOTAutograd's own record of it.

A refusal is no failure: AOTAutograd traces the graph, and the log says why. Refusals before tracing are in `plain.py`, those that tracing
finds in `functional.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from .functional import functional_graph
from .plain import Refusal, look_at_compilation, look_at_inputs, look_at_nodes, look_at_outputs


@dataclass
class Captured:
    """`gm`: functional ATen, but for `copy_` to its inputs at the end. `inputs`: its placeholders' fakes. `written`: numbers of the inputs
    that it writes to."""

    gm: fx.GraphModule
    inputs: list[Tensor]
    written: tuple[int, ...]


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured | str:
    """`gm`, Dynamo's graph of the compilation under way, as a functional ATen graph; or why AOTAutograd has to trace it."""
    try:
        tracing = look_at_compilation(gm)
        fakes = look_at_inputs(gm.graph, example_inputs, tracing)
        look_at_nodes(gm.graph)
        look_at_outputs(gm.graph)
        graph, written = functional_graph(gm.graph, fakes, tracing.fake_mode)
        metadata = _metadata(gm.graph, example_inputs, len(graph.output_node().all_input_nodes), written)
    except Refusal as refusal:
        return str(refusal)
    tracing.fw_metadata = metadata
    # Lazy: its code is printed when it is called or looked at, not after each of the stages that follow.
    return Captured(_LazyGraphModule(torch.nn.Module(), graph), fakes, written)


def as_called(run: Callable[[list[Any]], Sequence[Any]], written: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """A boxed callable as one of its inputs, as Dynamo calls it: without gradients, whatever the caller has set, and counting the writes to
    the inputs numbered `written`. A `run` that can be called so by itself (its `unboxed`) is."""

    def call(*args: Any) -> Sequence[Any]:
        if written:
            torch.autograd.graph.increment_version([args[number] for number in written])
        if not torch.is_grad_enabled():
            return run(list(args))
        torch._C._set_grad_enabled(False)
        try:
            return run(list(args))
        finally:
            torch._C._set_grad_enabled(True)

    unboxed: Callable[..., Any] | None = getattr(run, "unboxed", None)
    return call if unboxed is None else unboxed(call, written)


def _metadata(dynamo: fx.Graph, values: Sequence[Tensor], outputs: int, written: Sequence[int]) -> Any:
    """AOTAutograd's record of the compilation, as it would have written it: read by Inductor, the IR's specification and the executors."""
    from torch._functorch._aot_autograd.schemas import InputAliasInfo, OutputAliasInfo, OutputType, ViewAndMutationMeta

    placeholders = dynamo.find_nodes(op="placeholder")
    inputs = [
        _filled(
            InputAliasInfo,
            is_leaf=node.meta["example_value"].is_leaf,
            mutates_data=number in written,
            mutations_under_no_grad_or_inference_mode=number in written and not torch.is_grad_enabled(),
            requires_grad=node.meta["example_value"].requires_grad,
            keep_input_mutations=True,
            mutates_metadata=False,
            mutations_hidden_from_autograd=False,
            mutation_inductor_storage_resize=False,
            mutates_storage_metadata=False,
        )
        for number, node in enumerate(placeholders)
    ]
    output = dict(output_type=OutputType.non_alias, raw_type=Tensor, base_idx=None, dynamic_dims=set())
    return _filled(
        ViewAndMutationMeta,
        input_info=inputs,
        output_info=[_filled(OutputAliasInfo, **output, requires_grad=False, requires_grad_for_backward=False) for _ in range(outputs)],
        num_intermediate_bases=0,
        keep_input_mutations=True,
        traced_tangents=[],
        traced_tangents_descs=[],
        subclass_inp_meta=[],
        subclass_fw_graph_out_meta=[],
        subclass_tangent_meta=[],
        static_input_indices=_static(placeholders, values),
    )


def _filled(kind: Any, **values: Any) -> Any:
    """A record of torch's with those of `values` that this version of torch has fields for. Refuses where it has others."""
    try:
        return kind(**{key: value for key, value in values.items() if key in kind.__dataclass_fields__})
    except TypeError as error:
        raise Refusal(f"this torch keeps other records of a compilation ({error})") from error


def _static(placeholders: Sequence[fx.Node], values: Sequence[Tensor]) -> list[int]:
    """Numbers of the inputs that keep their address between calls, as Dynamo has marked them."""
    found = [number for number, node in enumerate(placeholders) if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")]
    if not found and any(isinstance(value, torch.nn.Parameter) for value in values):
        raise Refusal("a parameter is an input, and Dynamo says of no input that it keeps its place")
    return found
