"""The choice of executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from dsi.ir.context import Context
from dsi.runtime.reference import compile_reference


def compile_graph(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context, *, as_it_is: bool = False
) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs `gm`. `as_it_is`: node by node, because another order or another kernel would change its meaning."""
    return compile_reference(gm, fake_inputs, context)
