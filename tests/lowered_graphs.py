"""Lowered graphs made by hand, for tests of the executors: an outer graph of region calls and leftovers, with fakes everywhere."""

from __future__ import annotations

import operator
from typing import Any

import torch
from dsi.ir import analysis, kernel_spec
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.ir.region import Region
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

D = torch.ops.dsi


class Outer:
    """Builds a lowered graph. Every dimension whose size is in `dynamic` is symbolic; equal sizes have one symbol."""

    def __init__(self, dynamic: tuple[int, ...] = ()):
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.dynamic = dynamic
        self.fakes: list[Any] = []
        self.regions: list[Region] = []

    def input(self, name: str, real: torch.Tensor) -> fx.Node:
        kinds = [DimDynamic.DUCK if size in self.dynamic else DimDynamic.STATIC for size in real.shape]
        context = StatelessSymbolicContext(kinds)
        from torch._dynamo.source import ConstantSource

        fake = self.mode.from_tensor(real, symbolic_context=context, source=ConstantSource(name))
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        self.fakes.append(fake)
        return node

    def size_input(self, name: str, size: torch.SymInt) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = size
        self.fakes.append(size)
        return node

    def constant(self, name: str, real: torch.Tensor) -> fx.Node:
        self.root.register_buffer(name, real)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(real, static_shapes=True)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.stack_trace = f'  File "model.py", line {len(self.graph.nodes)}, in forward\n    {node.name}'
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, enable_python_dispatcher():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def region(
        self, name: str, function: Any, *args: fx.Node, in_place: dict[int, int] | None = None, kind: str = "linear"
    ) -> list[fx.Node]:
        values = [arg.meta["val"] for arg in args]
        with self.mode, enable_python_dispatcher():
            body = make_fx(lambda *a: function(*a), tracing_mode="real", _allow_non_fake_inputs=True)(*values)
        for number, member in enumerate(n for n in body.graph.nodes if n.op == "call_function"):
            member.stack_trace = f'  File "model.py", line {number}, in {name}\n    {member.name}'
        region = Region(name, kind, body, None, label=name, key=name, in_place=in_place or {})
        self.regions.append(region)
        setattr(self.root, name, body)
        node = self.graph.call_module(name, args)
        node.meta["region"] = region
        node.meta["val"] = tuple(output.meta["val"] for output in region.outputs)
        results = []
        for number, output in enumerate(region.outputs):
            item = self.graph.call_function(operator.getitem, (node, number))
            item.meta["val"] = args[in_place[number]].meta["val"] if in_place and number in in_place else output.meta["val"]
            results.append(item)
        return results

    def finish(self, *results: Any) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def plan(self) -> None:
        """Gives each region its plan, specification and key, as fusing and lowering do."""
        for region in self.regions:
            region.plan = analysis.plan_region(region.body)
            region.spec = kernel_spec.kernel_spec(region.name, region.body, region.plan)
            region.key = kernel_spec.region_key(region.body)

    def context(self, **options: Any) -> Context:
        context = Context(Options.parse(options), fake_mode=self.mode)
        context.report.regions = self.regions
        return context


HEADS, KV_HEADS, HEAD = 4, 2, 16
WIDTH, INNER = HEADS * HEAD, 96


def layer_inputs(
    batch: int, length: int, cache: int, position: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Fresh random inputs of `decode_layer`, hidden values large enough to hurt."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    pos = torch.arange(position, position + length)
    return {
        "x": normal(batch, length, WIDTH, scale=3.0),
        "keys": normal(batch, KV_HEADS, cache, HEAD),
        "values": normal(batch, KV_HEADS, cache, HEAD),
        "pos": pos,
        "mask": (torch.arange(cache)[None, :] <= pos[:, None])[None, None],
        "cos": normal(1, 1, length, HEAD),
        "sin": normal(1, 1, length, HEAD),
        "norm": normal(WIDTH),
        "wq": normal(WIDTH, WIDTH, scale=0.1),
        "wk": normal(KV_HEADS * HEAD, WIDTH, scale=0.1),
        "wv": normal(KV_HEADS * HEAD, WIDTH, scale=0.1),
        "wo": normal(WIDTH, WIDTH, scale=0.1),
        "gate": normal(INNER, WIDTH, scale=0.1),
        "up": normal(INNER, WIDTH, scale=0.1),
        "down": normal(WIDTH, INNER, scale=0.1),
    }


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], heads, HEAD).transpose(1, 2)


def qkv(x, norm, wq, wk, wv, cos, sin, keys, values, pos):
    y = D.rms_norm(x, norm, eps=1e-6, cast="before")
    q = D.rope(_heads(D.linear(y, wq), HEADS), cos, sin, style="half")
    k = D.rope(_heads(D.linear(y, wk), KV_HEADS), cos, sin, style="half")
    v = _heads(D.linear(y, wv), KV_HEADS)
    return q, D.kv_write(keys, pos, k, dim=2), D.kv_write(values, pos, v, dim=2)


def attend(q, keys, values, mask):
    a = D.attention(q, keys, values, mask, scale=HEAD**-0.5)
    return (a.transpose(1, 2).reshape(q.shape[0], q.shape[2], WIDTH),)


def project(a, wo, x):
    return (D.linear(a, wo) + x,)


def feed(x, norm, gate, up):
    y = D.rms_norm(x, norm, eps=1e-6, cast="before")
    return (D.gated(D.linear(y, gate), D.linear(y, up), "silu"),)


def eager_layer(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer by references; writes t["keys"] and t["values"]."""
    q, keys, values = qkv(*(t[n] for n in ("x", "norm", "wq", "wk", "wv", "cos", "sin", "keys", "values", "pos")))
    (a,) = attend(q, keys, values, t["mask"])
    (x,) = project(a, t["wo"], t["x"])
    (h,) = feed(x, t["norm"], t["gate"], t["up"])
    (x,) = project(h, t["down"], x)
    t["keys"].copy_(keys)
    t["values"].copy_(values)
    return x


def decode_layer(t: dict[str, torch.Tensor], dynamic: tuple[int, ...] = (), in_place: bool = True) -> tuple[Outer, fx.GraphModule]:
    """One layer with a static cache as lowering leaves it: five regions, KV writes in place (or `copy_` at the end)."""
    outer = Outer(dynamic)
    n = {name: outer.input(name, value) for name, value in t.items()}
    arguments = [n[name] for name in ("x", "norm", "wq", "wk", "wv", "cos", "sin", "keys", "values", "pos")]
    q, keys, values = outer.region("qkv", qkv, *arguments, in_place={1: 7, 2: 8} if in_place else None)
    (a,) = outer.region("attend", attend, q, keys, values, n["mask"], kind="attention")
    (x,) = outer.region("project", project, a, n["wo"], n["x"])
    (h,) = outer.region("feed", feed, x, n["norm"], n["gate"], n["up"])
    (x,) = outer.region("project_1", project, h, n["down"], x)
    if not in_place:
        outer.call(torch.ops.aten.copy_.default, n["keys"], keys)
        outer.call(torch.ops.aten.copy_.default, n["values"], values)
    return outer, outer.finish(x)
