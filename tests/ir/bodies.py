"""Bodies of regions for tests: a function traced to ATen and semantic operators, and the check that its plan means the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import dsi.ir.ops
import torch
from dsi.ir.analysis import bind_sizes, evaluate_plan, plan_region
from dsi.ir.tile import Plan
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

dsi = torch.ops.dsi


def body_of(function: Callable[..., Any], inputs: Sequence[Any], dynamic: Collection[int] = ()) -> torch.fx.GraphModule:
    """`function` on fakes of the inputs as a body. Dimensions of a size in `dynamic` are symbolic, equal sizes by one symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def tupled(*args: Any) -> tuple:
        result = function(*args)
        return result if isinstance(result, tuple) else (result,)

    def faked(value: Any, number: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dims = [DimDynamic.DUCK if n in dynamic else DimDynamic.STATIC for n in value.shape]
        return mode.from_tensor(
            value, source=ConstantSource(f"input{number}"), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)
        )

    fakes = [faked(v, i) for i, v in enumerate(inputs)]
    with mode:
        gm = make_fx(tupled)(*fakes)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    output.args = (tuple(output.args[0]),)
    gm.recompile()
    return gm


def check(
    function: Callable[..., Any], inputs: Sequence[Any], dynamic: Collection[int] = (), tolerance: float = 2e-5, kind: str | None = None
) -> Plan:
    """Asserts that the plan of `function` computes what `function` computes on these inputs; returns the plan."""
    body = body_of(function, inputs, dynamic)
    plan = plan_region(body, kind)
    assert_means(body, plan, function, inputs, tolerance)
    return plan


def assert_means(
    body: torch.fx.GraphModule, plan: Plan, function: Callable[..., Any], inputs: Sequence[Any], tolerance: float = 2e-5
) -> None:
    expected = function(*[t.clone() if isinstance(t, torch.Tensor) else t for t in inputs])
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = evaluate_plan(plan, inputs, bind_sizes(body, inputs))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape, f"{a.dtype} {list(a.shape)} for {e.dtype} {list(e.shape)}"
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
