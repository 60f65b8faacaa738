"""Both ways of tracing a graph of Dynamo's, side by side: the one pass and AOTAutograd."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.compiler.capture import as_called, capture
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.passes.pipeline import PIPELINE
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.node import map_arg


class Numbered(int):
    """The number of a node; printed, it is told from other numbers."""

    def __repr__(self) -> str:
        return f"#{int(self)}"


@dataclass
class Tracers:
    """A backend for torch.compile that traces each graph both ways, and runs what the one pass has traced; AOTAutograd's graph where it
    refuses. `own` and `theirs`: a description a graph, in place of the first the reason of a refusal."""

    own: list[Any] = field(default_factory=list)
    theirs: list[Any] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for stage in PIPELINE:
            if stage.level == "dynamo":
                stage.run(gm, Context(Options()))
        captured = capture(gm, example_inputs)
        tracing = torch._guards.TracingContext.get()
        self.own.append(captured if isinstance(captured, str) else (described(captured.gm), recorded(tracing.fw_metadata)))
        tracing.fw_metadata = None

        def compile_inference(aten: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            self.theirs.append((described(aten), recorded(torch._guards.TracingContext.get().fw_metadata)))
            return boxed(aten)

        def compile_training(aten: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            return boxed(aten)

        compilers = dict(fw_compiler=compile_training, inference_compiler=compile_inference, keep_inference_input_mutations=True)
        through_aot = aot_autograd(**compilers)(gm, example_inputs)
        return through_aot if isinstance(captured, str) else as_called(boxed(captured.gm), captured.written)

    def refusals(self) -> list[str]:
        """Reasons of the graphs that were left to AOTAutograd."""
        return [own for own in self.own if isinstance(own, str)]

    def assert_equal(self) -> None:
        """Each graph that one pass has traced is AOTAutograd's, node for node."""
        assert len(self.own) == len(self.theirs) or self.refusals()
        for own, theirs in zip(self.own, self.theirs, strict=False):
            if isinstance(own, str):
                continue
            for mine, wanted in zip(own[0], theirs[0], strict=False):
                assert mine == wanted, f"{mine}\n{wanted}"
            assert len(own[0]) == len(theirs[0]) and own[1] == theirs[1]


def meaning(lines: list[Any]) -> list[Any]:
    """Of a description what a graph writes and returns, as expressions of its inputs: not in which order views are made, nor where."""
    expressions: list[int] = []
    numbers: dict[Any, int] = {}
    effects = []
    for number, (called, arguments, kind, _) in enumerate(lines):
        read = re.sub(r"#(\d+)", lambda found: f"<{expressions[int(found[1])]}>", arguments)
        key = (called, read, kind, number if called == "placeholder" else None)
        expressions.append(numbers.setdefault(key, hash(key)))
        if called in ("aten.copy_.default", "output"):
            effects.append(key)
    return effects


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as a callable of one list."""

    def run(inputs: list[Any]) -> Any:
        return gm.forward(*inputs)

    run._boxed_call = True
    return run


def described(gm: fx.GraphModule) -> list[Any]:
    """A line a node: what it calls, with what (nodes by number), shape, strides, dtype and device of its value, the model's line."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines: list[Any] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        kind = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else None
        # AOTAutograd takes the place of the last operator for what it adds to the end.
        own = node.op == "call_function" and node.target is not torch.ops.aten.copy_.default
        place = node.meta.get("stack_trace") or "" if own else ""
        called = str(node.target) if node.op == "call_function" else node.op
        lines.append((called, str(map_arg((node.args, node.kwargs), lambda n: Numbered(number[n]))), kind, place))
    return lines


def recorded(metadata: Any) -> Any:
    """What dsi and Inductor read of AOTAutograd's record of a compilation, and its wrapper of what it does in a call."""
    return (
        list(metadata.static_input_indices),
        [(i.mutates_data, i.mutates_metadata, i.requires_grad, i.is_leaf, i.mutation_type) for i in metadata.input_info],
        [(o.output_type, o.base_idx, o.dynamic_dims, o.requires_grad) for o in metadata.output_info],
        metadata.mutated_graph_handled_indices_seen_by_autograd,
        metadata.mutated_inp_runtime_indices,
        (metadata.num_intermediate_bases, metadata.tokens, metadata.bw_donated_idxs, metadata.grad_enabled_mutation),
    )


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tracers]:
    """The result of `function`, compiled without gradients by `Tracers`, and those; the graphs have been compared."""
    torch._dynamo.reset()
    tracers = Tracers()
    with torch.no_grad():
        result = torch.compile(function, backend=tracers)(*args, **kwargs)
    tracers.assert_equal()
    return result, tracers
