"""Small functional graphs for the tests of fusion, and ways to look at what became of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from dsi.ir import analysis
from dsi.ir.context import Context, Fuel
from dsi.ir.options import Options
from dsi.ir.region import Region
from dsi.ir.spec import check_graph
from dsi.passes.fuse import fuse, unfuse
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

D = torch.ops.dsi
HEADS, HEAD = 4, 16
WIDTH = HEADS * HEAD


Dims = dict[int, tuple[int, ...]]


def trace(function: Callable[..., Any], *inputs: Any, symbolic: bool | Dims = False) -> fx.GraphModule:
    """The functional ATen graph of `function`, fakes in meta["val"]; nothing is removed but dead pure operators.

    `symbolic`: whether sizes are symbols; or the numbers of the inputs of which some are, and which.
    """
    if isinstance(symbolic, dict):
        inputs = _fakes(inputs, symbolic)
    gm = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _fakes(inputs: tuple[Tensor, ...], symbolic: Dims) -> tuple[Tensor, ...]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for number, value in enumerate(inputs):
        dims = [DimDynamic.DYNAMIC if d in symbolic.get(number, ()) else DimDynamic.STATIC for d in range(value.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        fakes.append(mode.from_tensor(value, source=ConstantSource(f"input{number}"), symbolic_context=context))
    return tuple(fakes)


def context(fuel: int | None = None) -> Context:
    return Context(Options(), fuel=Fuel(fuel))


def fused(function: Callable[..., Any], *inputs: Any, symbolic: bool | Dims = False) -> tuple[fx.GraphModule, Context]:
    """`function` traced and fused, checked against the specification and against `function` on `inputs`, unfused too."""
    gm = trace(function, *inputs, symbolic=symbolic)
    ctx = context()
    fuse(gm, ctx)
    check_graph(gm, "regions")
    assert_equal(function, gm, inputs)
    assert_plans(gm, inputs)
    flat = copy.deepcopy(gm)
    unfuse(flat)
    check_graph(flat, "aten")
    assert_equal(function, flat, inputs)
    return gm, ctx


def assert_plans(gm: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
    """Every region's plan computes what its body does, on the values that it meets when `gm` runs on `inputs`."""
    feed = iter(pytree.tree_leaves(copy.deepcopy(inputs)))
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "call_module":
            region = node.meta["region"]
            values[node] = region.body(*args)
            planned = analysis.evaluate_plan(region.plan, args, analysis.bind_sizes(region.body, args))
            for expected, got in zip(values[node], planned, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)


def assert_equal(expected: Callable[..., Any], got: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Both give the same results, and leave the same in their inputs."""
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    with torch.no_grad():
        results = expected(*mine), got(*theirs)
    for a, b in zip(pytree.tree_leaves((results[0], mine)), pytree.tree_leaves((results[1], theirs)), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
        else:
            assert a == b


def labels(ctx: Context) -> list[str]:
    return [r.label for r in ctx.report.regions]


def kinds(ctx: Context) -> list[str]:
    return [r.kind for r in ctx.report.regions]


def members(region: Region) -> list[str]:
    return [name(n) for n in region.members]


def name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def outer(gm: fx.GraphModule) -> list[str]:
    """What the outer graph computes by itself: operators that are in no region, results being taken apart left out."""
    return [name(n) for n in gm.graph.nodes if n.op == "call_function" and name(n) != "getitem"]


def region_with(ctx: Context, label: str) -> Region:
    (found,) = (r for r in ctx.report.regions if label in r.label)
    return found


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


def heads(x: Tensor) -> Tensor:
    """[B, S, E] as [B, H, S, D]."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
