"""What code generation and caches are given: the specification of a kernel, the key that says when one serves for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from dsi.ir.analysis import bind_sizes, kernel_spec, plan_region, region_key
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .bodies import body_of, dsi


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return dsi.linear(x, w, b) + r


def inputs(batch: int = 5, inner: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(s, dtype=dtype) for s in ((batch, 7, inner), (3, inner), (3,), (batch, 7, 3))]


def key(function: Callable[..., Any], values: list[Any], dynamic: tuple[int, ...] = ()) -> str:
    return region_key(body_of(function, values, dynamic))


def test_a_specification_has_tensors_nodes_and_source_lines() -> None:
    body = body_of(linear, inputs(), (5, 7))
    for node in body.graph.nodes:
        node.meta["stack_trace"] = '  File "/somewhere/model.py", line 3, in forward\n    return self.proj(x) + r'
    spec = kernel_spec("region_0", body, plan_region(body))
    x, w, b, r = spec.inputs
    batch, length = x.sizes[:2]
    assert x.sizes == (batch, length, 4) and x.strides == (4 * length, 4, 1) and (w.sizes, w.strides, b.sizes) == ((3, 4), (4, 1), (3,))
    assert r.sizes == (batch, length, 3) and all(n.is_Symbol for n in (batch, length)) and batch != length
    (out,) = spec.outputs
    assert out.sizes == (batch, length, 3) and out.strides == (3 * length, 3, 1) and out.dtype == torch.float32
    assert spec.nodes == ["linear = dsi.linear.default(arg0_1, arg1_1, arg2_1)", "add = aten.add.Tensor(linear, arg3_1)"]
    assert spec.source_lines == ["model.py:3  return self.proj(x) + r"] and spec.scalars == [] and spec.name == "region_0"


def test_a_size_may_be_passed_as_a_number() -> None:
    body = body_of(lambda x, y: torch.cat([x, y], 0) + 1, (torch.randn(5, 3), torch.randn(7, 3)), (5, 7))
    x, y = (n for n in body.graph.nodes if n.op == "placeholder")
    first, second = (n.meta["val"].shape[0] for n in (x, y))
    cat = next(n for n in body.graph.nodes if n.target is torch.ops.aten.cat.default)
    x.meta["val"] = cat.meta["val"]  # first + second rows: neither can be read off
    cat.replace_all_uses_with(x)
    body.graph.erase_node(cat)
    y.meta["val"] = first
    with body.graph.inserting_after(y):
        number = body.graph.placeholder("length")
    number.meta["val"] = second
    spec = kernel_spec("region_0", body, plan_region(body))
    assert spec.scalars == [(str(first.node.expr), 1), (str(second.node.expr), 2)]
    assert spec.inputs[1].sizes == () and spec.inputs[0].sizes[0] == first.node.expr + second.node.expr
    assert bind_sizes(body, [torch.randn(14, 3), 5, 9]) == {first.node.expr: 5, second.node.expr: 9}


def test_sizes_are_read_off_dimensions_strides_and_multiples() -> None:
    body = body_of(lambda x: x.view(-1, 3) * 2, (torch.randn(5, 7, 3),), (5, 7))
    batch, length = next(iter(body.graph.nodes)).meta["val"].shape[:2]
    assert bind_sizes(body, [torch.randn(11, 2, 3)]) == {batch.node.expr: 11, length.node.expr: 2}
    strided = body_of(lambda x: x * 2, (torch.randn(7, 5, 3).transpose(0, 1),), (5, 7))
    names = {n.node.expr for n in next(iter(strided.graph.nodes)).meta["val"].shape[:2]}
    assert set(bind_sizes(strided, [torch.randn(2, 11, 3).transpose(0, 1)])) >= names


def test_equal_layers_have_equal_keys() -> None:
    first, second = body_of(linear, inputs()), body_of(linear, inputs())
    for node in second.graph.nodes:
        node.name = f"{node.name}_of_another_layer"
        node.meta["stack_trace"] = "elsewhere"
    assert region_key(first) == region_key(second)


def test_symbols_count_by_their_order() -> None:
    # Two traces name their symbols anew; 5 and 7 are told apart in both.
    assert key(linear, inputs(5), (5, 7)) == key(linear, inputs(11), (11, 7))
    assert key(linear, inputs(7), (7,)) != key(linear, inputs(5), (5, 7))


DIFFERENT: dict[str, str] = {
    "another inner size": key(linear, inputs(inner=6)),
    "another dtype": key(linear, inputs(dtype=torch.float16)),
    "another batch": key(linear, inputs(6)),
    "a symbolic batch": key(linear, inputs(), (5,)),
    "a symbolic batch and length": key(linear, inputs(), (5, 7)),
    "another stride": key(linear, [torch.randn(5, 7, 8)[:, :, ::2], *inputs()[1:]]),
    "another operator": key(lambda x, w, b, r: dsi.linear(x, w, b) * r, inputs()),
    "the operands the other way round": key(lambda x, w, b, r: r - dsi.linear(x, w, b), inputs()),
    "the same operands": key(lambda x, w, b, r: dsi.linear(x, w, b) - r, inputs()),
    "no bias": key(lambda x, w, b, r: dsi.linear(x, w) + r, inputs()),
    "another attribute": key(lambda x, w, b, r: dsi.linear(x, w.t().contiguous().t(), b) + r, inputs()),
    "one more output": key(lambda x, w, b, r: (dsi.linear(x, w, b) + r, r * 2), inputs()),
    "another constant": key(lambda x, w, b, r: dsi.linear(x, w, b) + r + 1, inputs()),
    "a float for an int": key(lambda x, w, b, r: dsi.linear(x, w, b) + r + 1.0, inputs()),
    "true for one": key(lambda x, w, b, r: dsi.linear(x, w, b) + r + True, inputs()),
}


def test_what_makes_another_kernel_makes_another_key() -> None:
    keys = {**DIFFERENT, "the first": key(linear, inputs())}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("text", ["half", "interleaved"])
def test_keywords_count(text: str) -> None:
    def rope(style: str) -> Callable[..., torch.Tensor]:
        return lambda x, c, s: dsi.rope(x, c, s, style=style)

    values = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)]
    assert (key(rope(text), values) == key(rope("half"), values)) == (text == "half")


def test_sizes_are_expressions() -> None:
    body = body_of(lambda x: x.view(-1, 3) * 2, (torch.randn(5, 7, 3),), (5, 7))
    (out,) = kernel_spec("region_0", body, plan_region(body)).outputs
    assert isinstance(out.sizes[0], sympy.Mul) and out.strides == (3, 1)


def test_a_number_that_may_be_negative_has_a_key_of_its_own() -> None:
    def shifted(positive: bool | None) -> str:
        env = ShapeEnv()
        source = ConstantSource("n")
        symbol = env.create_symbol(7, source, DimDynamic.DYNAMIC, None, positive=positive, do_not_specialize_zero_one=True)
        graph = torch.fx.Graph()
        n, x = graph.placeholder("n"), graph.placeholder("x")
        n.meta["val"] = env.create_symintnode(symbol, hint=7, source=source)
        total = graph.call_function(torch.ops.aten.add.Tensor, (x, n))
        x.meta["val"] = total.meta["val"] = torch.empty(3, device="meta")
        graph.output((total,))
        return region_key(torch.fx.GraphModule({}, graph))

    assert shifted(True) == shifted(True) != shifted(None)
