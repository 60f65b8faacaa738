"""The executor that runs every node as it is written: semantic operators by their references, regions by their bodies.

It defines what the other executors must compute, and is what is left where no compiler is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx

from dsi.ir.context import Context


def compile_reference(gm: fx.GraphModule, fake_inputs: Sequence[Any], context: Context) -> Callable[[list[Any]], Any]:
    """A boxed callable (one list of inputs, which it empties) that runs `gm` node by node."""
    return make_boxed_func(gm.forward)
