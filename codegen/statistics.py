"""Row statistics (mean and reciprocal deviation) over a whole row, and over groups of columns that a tile holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import sympy
from dsi.ir import tile as t
from dsi.ir.errors import refuse

from .builder import Block, Builder
from .integers import normalise
from .printer import SUBSCRIPTS, Printer, Text

if TYPE_CHECKING:
    from .columns import Columns


def divisible(size: sympy.Expr, block: int) -> bool:
    """Whether a size is known to be a multiple of a block, so that no mask is needed."""
    size = sympy.sympify(size)
    return bool(size.is_Integer) and int(size) % block == 0


class Straight:
    """A printer as a context manager, for where a loop would have only one step."""

    def __init__(self, printer: Printer):
        self._printer = printer

    def __enter__(self) -> Printer:
        return self._printer

    def __exit__(self, *_: object) -> None:
        return None


class Rows(Protocol):
    """What the passes over rows need of a schedule. They are written into `block`; `single`: tiles have no row axis."""

    builder: Builder
    block: Block
    single: bool

    def outer(self, bases: dict[tuple[int, str], str]) -> Printer: ...

    def steps(self, bases: dict[tuple[int, str], str]) -> AbstractContextManager[Printer]: ...


def row_statistics(
    kernel: Rows, reductions: tuple[t.Reduction, ...], size: sympy.Expr, block: int, constant: str
) -> dict[tuple[int, str], str]:
    """Writes one pass over the rows a statistic, two where a mean is subtracted (one over values kept in registers if a step covers the
    row).

    The variance is that of the differences from the mean, not a difference of two large sums. Returns the names of the statistics:
    scalars for a single row, else 1-d over the rows.
    """
    bases: dict[tuple[int, str], str] = {}
    names, body = kernel.builder.names, kernel.block
    whole = sympy.sympify(size).is_Integer and int(size) <= block
    shape = f"[{constant}]" if kernel.single else f"[BLOCK_M, {constant}]"
    axis = 0 if kernel.single else 1
    for number, reduction in enumerate(reductions):
        count = kernel.outer(bases).integer(normalise(reduction.size), 3)
        mean = names.new("mean") if reduction.kind == "layer" else ""
        rstd = names.new("rstd")
        body.comment(f"{'mean and deviation' if mean else 'root mean square'} of the rows")

        def masked(printer: Printer, value: Text, always: bool = False, reduction: t.Reduction = reduction) -> str:
            mask = printer.tile.masks.get(axis)
            # A load is 0 beyond the last element only where it runs along the axis: not where it repeats one value.
            if mask and (always or not isinstance(reduction.body, t.Load) or axis not in value.axes):
                return f"tl.where({mask}, {value.code}, 0.0)"
            return value.code if axis in value.axes or value.number is not None else f"tl.broadcast_to({value.code}, {shape})"

        def centred(printer: Printer, value: Text, mean: str = mean) -> Text:
            lowered = mean if kernel.single else f"{mean}[:, None]"
            return Text(f"{value.at(1)} - {lowered}", value.axes, 1)

        if whole:
            with kernel.steps(bases) as printer:
                printer.expect([reduction.body, reduction.body])
                value = printer.value(reduction.body, name=True)
                if mean:
                    body.line(f"{mean} = tl.sum({masked(printer, value)}, {axis}) / {count}")
                    value = centred(printer, value)
                difference = printer.statement(masked(printer, value, always=bool(mean)), value.axes, "centred" if mean else "x")
                square = f"{difference.code} * {difference.code}"
            body.line(f"{rstd} = tl.rsqrt(tl.sum({square}, {axis}) / {count} + {reduction.eps!r})")
        else:
            if mean:
                total = names.new("total")
                body.line(f"{total} = tl.zeros({shape}, tl.float32)")
                with kernel.steps(bases) as printer:
                    printer.expect([reduction.body])
                    printer.block.line(f"{total} += {masked(printer, printer.value(reduction.body))}")
                body.line(f"{mean} = tl.sum({total}, {axis}) / {count}")
            squares = names.new("squares")
            body.line(f"{squares} = tl.zeros({shape}, tl.float32)")
            with kernel.steps(bases) as printer:
                printer.expect([reduction.body, reduction.body])
                value = printer.value(reduction.body, name=True)
                if mean:
                    value = centred(printer, value)
                difference = printer.statement(masked(printer, value, always=bool(mean)), value.axes, "centred" if mean else "x")
                printer.block.line(f"{squares} += {difference.code} * {difference.code}")
            body.line(f"{rstd} = tl.rsqrt(tl.sum({squares}, {axis}) / {count} + {reduction.eps!r})")
        if mean:
            bases[(number, "mean")] = mean
        bases[(number, "rstd")] = rstd
    return bases


def held_statistics(printers: Sequence[Printer], reductions: tuple[t.Reduction, ...], columns: Columns, block_n: int, lane_in: str) -> None:
    """Statistics over each group of columns, from the tiles of all parts, entered in each part's tile. A group may be a part of what is
    held."""
    tile, body, names = printers[0].tile, printers[0].block, printers[0].builder.names
    axis = len(tile.shape) - 1
    axes = frozenset(range(len(tile.shape)))
    rows = "BLOCK_M, " if axis else ""
    mask = f"({lane_in})" + SUBSCRIPTS[len(tile.shape)][axis] if lane_in else ""
    for number, reduction in enumerate(reductions):
        size = int(reduction.size)
        padded = columns.padded
        if size != columns.hold:
            if columns.parts > 1 or columns.hold != padded or columns.hold % size:
                raise refuse(f"a norm over {size} of {columns.hold} columns held together has no kernel")
            padded = size
        count = block_n // padded
        shape = f"[{rows}{count}, {padded}]"

        def spread(name: str, count: int = count, shape: str = shape) -> Text:
            """A statistic [rows, groups] (or [rows]) brought back to the tile."""
            if count == 1:
                return Text(f"{name}[:, None]", frozenset((0,))) if axis else Text(name)
            colons = ":, " * (axis + 1)
            code = f"tl.reshape(tl.broadcast_to({name}[{colons}None], {shape}), {tile.dims(axes)})"
            return printers[0].statement(code, axes, f"{name}_of_group")

        def total(codes: list[str], count: int = count, shape: str = shape) -> str:
            """The sum over a group's lanes in every part."""
            return " + ".join(
                f"tl.sum(tl.reshape({code}, {shape}), {axis + 1})" if count > 1 else f"tl.sum({code}, {axis})" for code in codes
            )

        def masked(text: Text) -> str:
            code = text.code if text.axes == axes else f"tl.broadcast_to({text.code}, {tile.dims(axes)})"
            return f"tl.where({mask}, {code}, 0.0)" if mask else code

        body.comment(f"statistics of each group of {size} columns")
        values = []
        for printer in printers:
            printer.expect([reduction.body, reduction.body])
            values.append(printer.value(reduction.body, name=True))
        if reduction.kind == "layer":
            mean = names.new("mean")
            body.line(f"{mean} = ({total([masked(value) for value in values])}) / {size}")
            lowered = spread(mean)
            for printer in printers:
                printer.tile.statistics[(number, "mean")] = lowered
            values = [Text(f"{value.at(1)} - {lowered.code}", axes, 1) for value in values]
        hint = "centred" if reduction.kind == "layer" else "held"
        differences = [p.statement(masked(value), axes, hint).code for p, value in zip(printers, values, strict=True)]
        rstd = names.new("rstd")
        body.line(f"{rstd} = tl.rsqrt(({total([f'{d} * {d}' for d in differences])}) / {size} + {reduction.eps!r})")
        spread_rstd = spread(rstd)
        for printer in printers:
            printer.tile.statistics[(number, "rstd")] = spread_rstd
