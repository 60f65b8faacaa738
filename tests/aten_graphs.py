"""Functional ATen graphs of models, as the stages after AOTAutograd get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.passes.lift import lift
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx


def aten_graph(
    fn: Callable, *args: Any, lifted: bool = True, dynamic: bool | None = False, **kwargs: Any
) -> tuple[fx.GraphModule, Context]:
    """The one ATen graph of `fn(*args, **kwargs)` and a context for it. The graph runs on the inputs that AOTAutograd gives it."""
    torch._dynamo.reset()
    context = Context(Options())
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example: list) -> Callable:
        found.append(gm)
        context.fake_mode = detect_fake_mode(example)
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, example: list, **_: Any) -> Callable:
        if lifted:
            lift(gm, context)
        return aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)(gm, example)

    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    (gm,) = found
    return gm, context


def traced(fn: Callable, *args: Any, symbolic: bool = False) -> tuple[fx.GraphModule, Context]:
    """The ATen graph of a function without mutations, and a context for it."""
    with torch.no_grad():
        # Through *inputs: `make_fx` takes parameters with a default for inputs too.
        gm = make_fx(lambda *inputs: fn(*inputs), tracing_mode="symbolic" if symbolic else "fake")(*args)
    values = [n.meta.get("val") for n in gm.graph.nodes]
    context = Context(Options())
    context.fake_mode = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    return gm, context


def targets(gm: fx.GraphModule) -> list[str]:
    """The operators of a graph in order, such as "aten.add.Tensor"."""
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
