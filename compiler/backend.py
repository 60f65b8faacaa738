"""The backend: what `torch.compile(model, backend="dsi")` calls with each graph that Dynamo captures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from dsi.ir.context import Context, Fuel
from dsi.ir.errors import DsiInternalError
from dsi.ir.options import Options
from dsi.ir.randomness import is_random
from dsi.passes.dropout import WRITTEN_THROUGH
from dsi.passes.nested import inline_nested
from dsi.passes.pipeline import PIPELINE
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import check, observe
from .apart import inputs_that_lie_apart, keeping_apart
from .capture import as_called, capture
from .collector import no_collections
from .execute import begin, compile_graph
from .guard import why_aside
from .registry import with_rules
from .weights import names_of_inputs, weights_of


def dsi(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one graph for inference.

    `options` and `mode` are torch.compile's, which hands over one of them at most and looks at neither. Returns a callable of the graph's
    inputs. Raises `DsiError` for a mistake in the options, before anything is changed.
    """
    parsed = with_rules(Options.parse(options, mode))
    context = Context(parsed, fuel=Fuel(parsed.fuel))
    inline_nested(gm)
    with no_collections(), _compiling(), observe.observing(gm, context) as observer:
        with observer.timed("guard"):
            reason = why_aside(gm, example_inputs)
        if reason:
            observer.aside(reason)
            return gm.forward
        begin(example_inputs, context)
        apart = inputs_that_lie_apart(gm)
        reference = check.reference_of(gm) if parsed.check or apart else None
        for stage in PIPELINE:
            if stage.level == "dynamo":
                observer.run(stage, gm)
        compiled = _traced_and_compiled(gm, example_inputs, observer)
    if apart and reference is not None:
        compiled = keeping_apart(compiled, reference, apart)
    if reference is None or not parsed.check:
        return compiled
    if reason := check.why_not_compared(reference, context):
        context.report.notes.append(f"check compares no results: {reason}")
        return compiled
    return check.beside(compiled, reference, context)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Within: `torch.compiler.is_compiling()`.

    Older torch does not say so while it compiles, and takes another thread's call of a compiled function for one made by tracing: an error.
    """
    before = getattr(torch.compiler, "_is_compiling_flag", None)
    if before is None:
        yield
        return
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _traced_and_compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], observer: observe.Observer) -> Callable[..., Any]:
    """`gm` traced to ATen, in one pass where it is plain and else by AOTAutograd, and compiled."""
    names = names_of_inputs(gm)
    if observer.context.options.tracer == "aot" or gm.meta.get(WRITTEN_THROUGH):
        return _through_aot(gm, example_inputs, observer, names)
    with observer.timed("capture"):
        captured = capture(gm, example_inputs)
    if isinstance(captured, str):
        observer.left_to_aot(captured)
        return _through_aot(gm, example_inputs, observer, names)
    observer.context.weights = weights_of(captured.gm, captured.inputs, names)
    return as_called(_compile_aten(captured.gm, captured.inputs, observer), captured.written)


def _through_aot(gm: fx.GraphModule, example_inputs: Sequence[Any], observer: observe.Observer, names: Sequence[str]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    def compile_inference(aten: fx.GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        observer.context.weights = weights_of(aten, fake_inputs, names)
        return _compile_aten(aten, fake_inputs, observer)

    def compile_training(aten: fx.GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        raise DsiInternalError("dsi: AOTAutograd asks for gradients of a graph in which the guard found none to be wanted")

    return aot_autograd(fw_compiler=compile_training, inference_compiler=compile_inference, keep_inference_input_mutations=True)(
        gm, example_inputs
    )


def _compile_aten(gm: fx.GraphModule, fake_inputs: Sequence[Any], observer: observe.Observer) -> Callable[[list[Any]], Any]:
    """The ATen-level stages and the executor, timed together as "after aot". `gm` is functional except for its `copy_` epilogue."""
    with observer.timed("after aot"):
        return _stages_and_executor(gm, fake_inputs, observer)


def _stages_and_executor(gm: fx.GraphModule, fake_inputs: Sequence[Any], observer: observe.Observer) -> Callable[[list[Any]], Any]:
    context = observer.context
    context.fake_mode = _fake_mode(fake_inputs)
    context.device = _device(gm)
    observer.aot(gm)
    drawn = next((node for node in gm.graph.nodes if is_random(node)), None)
    if drawn is not None:
        # Behind the guard's back (inside a function that Dynamo does not look into): as it is, the graph still draws what eager draws.
        observer.aside(f"an operator is random ({drawn.name})")
        return compile_graph(gm, fake_inputs, context, as_it_is=True)
    # AOTAutograd calls with its fake mode on; stages turn it on where they mean it, and read constants where they do not.
    with unset_fake_temporarily():
        for stage in PIPELINE:
            if stage.level != "dynamo":
                observer.run(stage, gm)
    return compile_graph(gm, fake_inputs, context)


def _fake_mode(fake_inputs: Sequence[Any]) -> Any:
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return torch._guards.detect_fake_mode(fake_inputs)


def _device(gm: fx.GraphModule) -> str:
    """The device type that the graph runs on: an accelerator's if any value is there."""
    kinds = {value.device.type for node in gm.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
    return next((kind for kind in sorted(kinds, reverse=True) if kind not in ("cpu", "meta")), "cpu")
