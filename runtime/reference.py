"""The executor that runs every node as it is written: semantic operators by their references, regions by their bodies.

It defines what the other executors must compute, and runs the graphs whose meaning another order or another kernel would change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.region import Region
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func


def compile_reference(gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context) -> Callable[[list[Any]], Any]:
    """A boxed callable (one list of inputs, which it empties) that runs `gm` node by node."""
    return make_boxed_func(_Runner(gm).run)


class _Runner(fx.Interpreter):
    """Runs a graph and its regions; what a region overwrites of its inputs is written there when it is done. Keeps nothing of a call.

    A view that memory does not allow is a copy: what torch states of a result's strides is not always so (on a CPU, a batch norm's
    of channels that lie last).
    """

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.extra_traceback = False  # an operator's error is the caller's, in its own words

    def run(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().run(*inputs, **options)
        finally:
            self.env, self.args_iter = {}, iter(())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        return _Runner(module).run(*args) if isinstance(module, fx.GraphModule) else module(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        region = n.meta.get("region")
        if not isinstance(region, Region) or not region.in_place:
            return result
        inputs, _ = self.fetch_args_kwargs_from_env(n)
        results = list(result)
        for output, target in region.in_place.items():
            results[output] = inputs[target].copy_(results[output])
        return tuple(results)
