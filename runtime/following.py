"""Which weights follow a region in a program: what its kernel may ask the cache for when its own are read (codegen/following.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from dsi.codegen.following import MOST, PITCH, ROWS
from dsi.ir import tile as t
from torch import fx

from .expand import region_of
from .sizes import expression

LINE, ROWS_MULTIPLE = 128, 16  # bytes that one request asks for; what Triton specialises integers on, so that all launches share a kernel


def following_weights(node: fx.Node) -> tuple[fx.Node, ...]:
    """The weights of the first linear behind a region's call, at most `MOST`: tensors that were there before the program began, whose rows
    lie alike and apart by whole lines. Empty where there is no such linear, or one of its weights lies otherwise."""
    after = node.next
    while after.op != "root":
        if after.op == "call_module" and (spec := region_of(after).spec) is not None and isinstance(spec.plan, t.LinearPlan):
            numbers = dict.fromkeys(window.weight for segment in spec.plan.segments for window in segment.windows)
            found = [after.args[number] for number in numbers if number in spec.constants]
            weights = tuple(weight for weight in found if isinstance(weight, fx.Node) and weight.op == "placeholder")[:MOST]
            kn = any(window.kn for segment in spec.plan.segments for window in segment.windows)
            return weights if not kn and len(found) == len(numbers) and _pitch([weight.meta["val"] for weight in weights]) else ()
        after = after.next
    return ()


def extents(weights: Sequence[Any]) -> dict[str, sympy.Expr]:
    """What kernels know of the weights that follow, from their fakes, by the names of its symbols."""
    rows = [int(weight.shape[0]) for weight in weights] + [0] * (MOST - len(weights))
    found = {symbol.name: sympy.Integer(number) for symbol, number in zip(ROWS, rows, strict=True)}
    return {**found, PITCH.name: sympy.Integer(_pitch(weights))}


def _pitch(weights: Sequence[Any]) -> int:
    """Bytes from one row of all weights to the next; 0 where they do not lie so."""
    pitches = set()
    for weight in weights:
        sizes = (*weight.shape, *weight.stride())
        if weight.dim() != 2 or not all(expression(size).is_Integer for size in sizes) or weight.stride(1) != 1:
            return 0
        pitches.add(int(weight.stride(0)) * weight.element_size())
        if weight.shape[0] % ROWS_MULTIPLE:
            return 0
    (pitch, *others) = pitches or {0}
    return 0 if others or pitch % LINE else pitch
