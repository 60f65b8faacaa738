"""The executor that runs every node as it is written: semantic operators by their references, regions by their bodies.

It defines what the other executors must compute, and runs the graphs whose meaning another order or another kernel would change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsi.ir.context import Context
from dsi.ir.region import Region
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func


def compile_reference(gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context) -> Callable[[list[Any]], Any]:
    """A boxed callable (one list of inputs, which it empties) that runs `gm` node by node."""
    if not any(isinstance(region := node.meta.get("region"), Region) and region.in_place for node in gm.graph.nodes):
        return make_boxed_func(gm.forward)
    return make_boxed_func(_InPlace(gm).run)


class _InPlace(fx.Interpreter):
    """Runs a lowered graph: what a region overwrites of its inputs is written there when the region is done. Keeps nothing of a call."""

    def run(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().run(*inputs, **options)
        finally:
            self.env, self.args_iter = {}, iter(())

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
