"""Grids that a device takes: it has 2**31 - 1 programs along the first axis, and 65,535 along each of the others; and what positions fit in
the 32 bits in which kernels count them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy
from dsi.ir import tile as t
from dsi.ir.errors import refuse

from .builder import Builder
from .integers import ATOM, normalise
from .printer import Printer, Tile

MOST = 65535
POSITIONS = 2**31 - 2**16  # a block may begin before the end, and reach past it
_PROGRAM = re.compile(r"tl\.(program_id|num_programs)\((\d)\)")


def fitting(builder: Builder, grid: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """`grid`, where a device takes it; else one axis of all its programs, from whose number the finished kernel in `builder` then takes its
    place in the grid. Sizes that are not known are held to fit."""
    exact = tuple(map(sympy.sympify, grid))
    if not any(size.is_Integer and size > MOST for size in exact[1:]):
        return exact
    number = builder.names.new("program")
    places = [builder.names.new(f"program_{axis}") for axis in range(len(exact))]
    body = builder.body
    written, body.lines[:] = list(body.lines), []
    sizes = [Printer(builder, body, Tile((), {})).integer(normalise(size), ATOM) for size in exact]
    body.comment("all programs lie along one axis: along another there are no more than 65535")
    body.line(f"{number} = tl.program_id(0)")
    rest = number
    for place, size in zip(places[:-1], sizes, strict=False):
        body.line(f"{place} = {rest} % {size}")
        rest = f"{rest} // {size}"
    body.line(f"{places[-1]} = {rest}")
    found = {"program_id": places, "num_programs": sizes}
    body.lines += [_PROGRAM.sub(lambda match: found[match[1]][int(match[2])], line) for line in written]
    return (sympy.prod(exact),)


def countable(plan: t.Plan) -> None:
    """Raises `Refused` where a position along rows, columns or what is summed, known to be so many, needs more than 32 bits."""
    if isinstance(plan, t.LinearPlan):
        sizes = {"rows": plan.rows, "summed elements": plan.inner, "columns": max((s.size for s in plan.segments), key=_known)}
    elif isinstance(plan, t.AttentionPlan):
        sizes = {"queries": sympy.sympify(plan.queries) * plan.heads, "keys": plan.keys}
    else:
        sizes = {"rows": plan.rows, "columns": plan.columns}
    for name, size in sizes.items():
        if _known(size) > POSITIONS:
            raise refuse(f"{size} {name} are more than a kernel counts in 32 bits")


def _known(size: sympy.Expr) -> int:
    size = sympy.sympify(size)
    return int(size) if size.is_Integer else 0
