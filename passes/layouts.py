"""Which weights of the model lie across: stored so that what one output of a product reads is far apart in memory.

A linear that contracts a weight [K, N] whose columns are contiguous reads short runs, and with a few rows takes up to twice as long as one
whose K elements of an output lie side by side (measured: GPT-2's `Conv1D` on an H200). The graph says which weights those are, whatever
module they belong to; `dsi.lay_out` lays them out.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsi.ir import tile as t
from dsi.ir.context import Context
from dsi.ir.region import Region
from torch import fx


def weights_across(gm: fx.GraphModule, context: Context) -> list[str]:
    """The names in the model of the weights that the lowered graph `gm` contracts across and reads in no other way, in order."""
    found: dict[str, bool] = {}
    for node in gm.graph.nodes:
        for argument, across in _read(node):
            if argument.name in context.weights:
                name = context.weights[argument.name]
                found[name] = found.get(name, True) and across
    return [name for name, across in found.items() if across]


def _read(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """The nodes that `node` reads, each with whether it is nothing but a weight which lies across."""
    region = node.meta.get("region") if node.op == "call_module" else None
    across: set[int] = set()
    if isinstance(region, Region) and region.spec is not None and isinstance(region.spec.plan, t.LinearPlan):
        plan = region.spec.plan
        windows = [window for segment in plan.segments for window in segment.windows]
        across = {window.weight for window in windows if window.across(region.spec.inputs[window.weight])}
        across -= {window.weight for window in windows if not window.across(region.spec.inputs[window.weight])}
    numbers = {argument: number for number, argument in enumerate(node.args) if isinstance(argument, fx.Node)}
    for argument in node.all_input_nodes:
        yield argument, numbers.get(argument) in across
