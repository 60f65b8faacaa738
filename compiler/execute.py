"""The choice of executor: by the device of the graph, unless the options or the graph's meaning say otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.runtime.packs import Packed, take_out
from torch import fx


def begin(example_inputs: Sequence[Any], context: Context) -> None:
    """Begins with what the executor of a graph of these inputs can find out before there is a graph to run."""
    device = next((value.device for value in example_inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda"), None)
    if device is not None and context.options.executor != "reference":
        from dsi.runtime import lookups

        lookups.begin(device)


def compile_graph(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context, *, as_it_is: bool = False
) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs `gm`. `as_it_is`: node by node, because another order or another kernel would change its meaning."""
    if not as_it_is:
        wanted, inputs = take_out(gm, fake_inputs)
        if wanted:
            packed = Packed(_compile(gm, inputs, context), wanted)
            context.dequantised = packed.dequantised
            return packed
    return _compile(gm, fake_inputs, context, as_it_is)


def _compile(gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context, as_it_is: bool = False) -> Callable[[list[Any]], Any]:
    # Imported when needed: a CPU has no use for the CUDA executor, nor a GPU for Inductor's C++.
    if as_it_is or context.options.executor == "reference":
        from dsi.runtime.reference import compile_reference

        return compile_reference(gm, fake_inputs, context)
    if context.device == "cpu":
        from dsi.runtime.cpu import compile_cpu

        return compile_cpu(gm, fake_inputs, context)
    from dsi.runtime.cuda import compile_cuda

    return compile_cuda(gm, fake_inputs, context)
