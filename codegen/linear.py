"""The schedules of linear regions: `gemv` (few rows, fp32 multiply-adds summed at the end) and `tiled` (matrix units).

A program owns a block of rows and a block of columns of one segment, and streams the contracted dimension. The prologue is applied to each block of x
as it is read; statistics of the rows come from passes over x before that. The epilogue works on the accumulators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import sympy
import torch

from dsi.ir import tile as t
from dsi.ir.errors import refuse

from .builder import Block, Builder, triton_type
from .integers import Quotient, normalise
from .kernel import Choice
from .printer import SUBSCRIPTS, Bound, Printer, Text, Tile
from .statistics import Straight, divisible, held_statistics, row_statistics

Grid = tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Columns:
    """How a segment's columns are cut: each program owns `groups` groups of `hold` columns, each padded to `padded`; `programs` of them."""

    hold: int
    padded: int
    groups: int
    programs: sympy.Expr

    @property
    def width(self) -> int:
        return self.hold * self.groups


def cut(segment: t.Segment, block_n: int) -> Columns:
    """The cut of a segment into blocks of `block_n` columns, padding included."""
    hold = int(segment.hold)
    padded = 1 << (hold - 1).bit_length()
    groups = max(block_n // padded, 1)
    return Columns(hold, padded, groups, ceil_div(segment.size, hold * groups))


def ceil_div(size: sympy.Expr, by: int) -> sympy.Expr:
    """ceil(size / by), as a plain number where the size is one."""
    size = sympy.sympify(size)
    return sympy.Integer(-(-int(size) // by)) if size.is_Integer else Quotient(size + by - 1, by)


class Linear:
    """Writes the kernel of one linear plan under one choice of blocks."""

    def __init__(self, spec: t.KernelSpec, choice: Choice):
        assert isinstance(spec.plan, t.LinearPlan)
        self.spec, self.plan, self.choice = spec, spec.plan, choice
        self.builder = Builder(spec)
        self.gemv = choice.schedule == "gemv"
        rows = sympy.sympify(self.plan.rows)
        # One row: the row symbol is 0 and tiles have one axis less.
        self.single = self.gemv and (rows == 1 or choice.max_rows == 1)
        self.one_block = (
            choice.max_rows is not None and choice.max_rows <= choice.block_m or rows.is_Integer and int(rows) <= choice.block_m
        )
        self.limits = {t.R: (rows,), t.K: (sympy.sympify(self.plan.inner),)}
        if choice.max_rows is not None:
            self.limits[t.R] += (sympy.Integer(choice.max_rows),)
        self.fixed = {t.R: sympy.Integer(0)} if self.single else {}
        self.row_mask = False

    # ------------------------------------------------------------------------------------------------------------------ tiles

    def tile(self, layout: str, names: dict[str, str] | None = None, masks: tuple[str, ...] = ()) -> Tile:
        """A tile whose axes are named by `layout`, one letter each of "rckn" (n: columns of a weight); the row axis is left out for a single row.

        `names` gives the 1-d block variables of c and k; `masks` the letters among them that need a mask (`c_in`, `k_in`).
        """
        letters = [letter for letter in layout if not (letter == "r" and self.single)]
        sizes = {"r": "BLOCK_M", "c": "BLOCK_N", "k": "BLOCK_K", "s": "BLOCK_S"}
        symbols = {"r": t.R, "c": t.C, "k": t.K, "s": t.K}
        tile = Tile(tuple(sizes[letter] for letter in letters), {}, fixed=dict(self.fixed), limits=dict(self.limits))
        for axis, letter in enumerate(letters):
            subscript = SUBSCRIPTS[len(letters)][axis]
            variable = (names or {}).get(letter, "r")
            tile.bound[symbols[letter]] = Bound(variable + subscript, frozenset((axis,)))
            if letter in masks or (letter == "r" and self.row_mask):
                tile.masks[axis] = f"{variable}_in{subscript}"
        return tile

    def with_statistics(self, tile: Tile, bases: dict[tuple[int, str], str]) -> Tile:
        """The tile with row statistics (scalars, or 1-d over the rows) laid out along its row axis, which is the first."""
        if self.single:
            texts = {key: Text(name) for key, name in bases.items()}
        else:
            subscript = SUBSCRIPTS[len(tile.shape)][0]
            texts = {key: Text(name + subscript, frozenset((0,))) for key, name in bases.items()}
        return replace(tile, statistics=texts)

    # ----------------------------------------------------------------------------------------------------------------- kernel

    def write(self) -> tuple[Builder, Grid]:
        """Writes the whole body and returns the builder and the launch grid."""
        plan, choice, body = self.plan, self.choice, self.builder.body
        self.builder.names.new("r"), self.builder.names.new("r_in")
        constant = self.builder.constant
        self.cuts = [cut(segment, choice.block_n) for segment in plan.segments]
        constant("BLOCK_N", choice.block_n)
        constant("BLOCK_K", choice.block_k)
        axis = 0 if self.gemv else 1
        self.program = self.builder.names.new("column_program")
        body.line(f"{self.program} = tl.program_id({axis})")
        if not self.single:
            constant("BLOCK_M", choice.block_m)
            arange = "tl.arange(0, BLOCK_M)"
            body.line(f"r = {arange}" if self.one_block else f"r = tl.program_id({1 - axis}) * BLOCK_M + {arange}")
            self.row_mask = not divisible(plan.rows, choice.block_m)
            if self.row_mask:
                printer = Printer(self.builder, body, Tile((), {}))
                body.line(f"r_in = r < {printer.integer(normalise(plan.rows), 1)}")
        statistics = self.statistics()
        self.row_stores(body, statistics)
        total = sum((c.programs for c in self.cuts), sympy.Integer(0))
        start: sympy.Expr = sympy.Integer(0)
        for number, (segment, columns) in enumerate(zip(plan.segments, self.cuts, strict=True)):
            if len(plan.segments) == 1:
                self.segment(body, segment, columns, start, statistics)
                break
            part = Block(body)
            part.comment(f"segment {number}, {segment.size} columns: {', '.join(self.spec.outputs[s.output].name for s in segment.stores)}")
            self.segment(part, segment, columns, start, statistics)
            start += columns.programs
            last = number == len(plan.segments) - 1
            end = Printer(self.builder, body, Tile((), {})).integer(normalise(start))
            body.attach("else:" if last else f"{'if' if number == 0 else 'elif'} {self.program} < {end}:", part)
        blocks = ceil_div(plan.rows, choice.block_m)
        return self.builder, (total, blocks) if self.gemv else (blocks, total)

    def statistics(self) -> dict[tuple[int, str], str]:
        """The passes over x that the prologue's row statistics need."""
        if not self.plan.reductions:
            return {}
        self.builder.constant("BLOCK_S", self.choice.block_s)
        return row_statistics(self, self.plan.reductions, self.plan.inner, self.choice.block_s, "BLOCK_S")

    def outer(self, bases: dict[tuple[int, str], str]) -> Printer:
        """A printer for what depends on rows alone."""
        return Printer(self.builder, self.builder.body, self.with_statistics(self.tile("r"), bases))

    def steps(self, bases: dict[tuple[int, str], str]) -> AbstractContextManager[Printer]:
        """One pass over the rows of x."""
        return self.over_k(self.outer(bases), "rs", self.choice.block_s, "BLOCK_S", bases)

    def row_stores(self, body: Block, statistics: dict[tuple[int, str], str]) -> None:
        """Values of the prologue that leave the region: written once a row, by the first column program."""
        if not self.plan.row_stores:
            return
        size = self.choice.block_s
        self.builder.constant("BLOCK_S", size)
        part = Block(body)
        outer = Printer(self.builder, part, self.with_statistics(self.tile("r"), statistics))
        with self.over_k(outer, "rs", size, "BLOCK_S", statistics) as printer:
            printer.expect(store.value for store in self.plan.row_stores)
            for store in self.plan.row_stores:
                printer.store(store)
        body.attach(f"if {self.program} == 0:", part)

    def over_k(
        self, outer: Printer, layout: str, block: int, constant: str, statistics: dict[tuple[int, str], str]
    ) -> AbstractContextManager[Printer]:
        """A loop over the contracted dimension in steps of `block` (no loop where one step covers it), printing over `layout`."""
        inner = sympy.sympify(self.plan.inner)
        names = self.builder.names
        k = names.new("k")
        masked = not divisible(inner, block)
        size = outer.integer(normalise(inner), 1)
        tile = self.with_statistics(self.tile(layout, {"k": k, "s": k}, ("k", "s") if masked else ()), statistics)
        # The loop's surroundings are printed over the same axes, without k.
        around = outer.on(self.with_statistics(self.tile_without(tile), statistics))
        mask = [f"{k}_in = {k} < {size}"] if masked else []
        if masked:
            names.new(f"{k}_in")
        if inner.is_Integer and int(inner) <= block:
            for line in (f"{k} = tl.arange(0, {constant})", *mask):
                outer.block.line(line)
            return Straight(Printer(self.builder, outer.block, tile, around))
        k0 = names.new("k0")
        return around.loop(f"for {k0} in range(0, {size}, {constant}):", tile, (f"{k} = {k0} + tl.arange(0, {constant})", *mask))

    def tile_without(self, tile: Tile) -> Tile:
        """A loop's tile as it is outside of the loop: k is not bound there."""
        bound = {symbol: value for symbol, value in tile.bound.items() if symbol != t.K}
        masks = {axis: mask for axis, mask in tile.masks.items() if not mask.startswith("k")}
        return replace(tile, bound=bound, masks=masks)

    # --------------------------------------------------------------------------------------------------------------- segments

    def segment(self, body: Block, segment: t.Segment, columns: Columns, start: sympy.Expr, statistics: dict[tuple[int, str], str]) -> None:
        """Accumulates one segment's windows and writes its epilogue."""
        names, plan = self.builder.names, self.plan
        self.limits[t.C] = (sympy.sympify(segment.size),)
        scalar = Printer(self.builder, body, Tile((), {}))
        program = f"({self.program} - {scalar.integer(normalise(start), 1)})" if start != 0 else self.program
        c = names.new("c")
        masked = not divisible(segment.size, columns.width) or columns.hold != columns.padded
        mask = f"{c} < {scalar.integer(normalise(segment.size), 1)}"
        lane_in = ""
        if columns.padded == columns.hold:
            body.line(f"{c} = {program} * BLOCK_N + tl.arange(0, BLOCK_N)")
        else:
            lane = names.new("lane")
            if columns.groups > 1:
                body.comment(f"groups of {columns.hold} columns, each padded to {columns.padded}")
                body.line(f"{lane} = tl.arange(0, BLOCK_N) % {columns.padded}")
                group = f"({program} * {columns.groups} + tl.arange(0, BLOCK_N) // {columns.padded})"
            else:
                body.comment(f"one group of {columns.hold} columns, padded to {columns.padded}")
                body.line(f"{lane} = tl.arange(0, BLOCK_N)")
                group = program
            body.line(f"{c} = {group} * {columns.hold} + {lane}")
            lane_in = f"{lane} < {columns.hold}"
            mask = lane_in if divisible(segment.size, columns.width) else f"({lane_in}) & ({mask})"
        if masked:
            names.new(f"{c}_in")
            body.line(f"{c}_in = {mask}")
        accumulators = self.accumulate(body, segment, c, masked, statistics)
        tile = self.with_statistics(self.tile("rc", {"c": c}, ("c",) if masked else ()), statistics)
        axes = frozenset(range(len(tile.shape)))
        tile.accumulators = tuple(Text(name, axes) for name in accumulators)
        tile.hold = sympy.Integer(columns.hold)
        tile.group_start = f"tl.arange(0, BLOCK_N) // {columns.padded} * {columns.padded}" if columns.groups > 1 else ""
        printer = Printer(self.builder, body, tile)
        if segment.reductions:
            held_statistics(printer, segment.reductions, columns, lane_in)
        printer.expect(store.value for store in segment.stores)
        for store in segment.stores:
            printer.store(store)

    def accumulate(self, body: Block, segment: t.Segment, c: str, masked: bool, statistics: dict[tuple[int, str], str]) -> list[str]:
        """The loop over the contracted dimension; returns the names of the fp32 sums, [rows, columns] (or [columns] for a single row)."""
        names, plan, gemv = self.builder.names, self.plan, self.gemv
        accumulators = [names.new(f"sum_{self.spec.inputs[window.weight].name}") for window in segment.windows]
        shape = "[BLOCK_M, BLOCK_N, BLOCK_K]" if gemv else "[BLOCK_M, BLOCK_N]"
        if self.single:
            shape = "[BLOCK_N, BLOCK_K]"
        for name in accumulators:
            body.line(f"{name} = tl.zeros({shape}, tl.float32)")
        columns = ("c",) if masked else ()
        outer = Printer(self.builder, body, self.with_statistics(self.tile("r"), statistics))
        with self.over_k(outer, "rck" if gemv else "rk", self.choice.block_k, "BLOCK_K", statistics) as printer:
            k = printer.tile.bound[t.K].code.split("[")[0]
            kmask = ("k",) if any(f"{k}_in" in mask for mask in printer.tile.masks.values()) else ()
            weights = self.with_statistics(
                self.tile("rck" if gemv else "kc", {"c": c, "k": k}, (*columns, *kmask)), statistics if gemv else {}
            )
            # x knows no columns, the weights no rows.
            printer.tile.bound.pop(t.C, None)
            column_axis = {2: 0, 3: 1}[len(weights.shape)] if gemv else 1
            printer.tile.masks.pop(column_axis if gemv else -1, None)
            x = self.left(printer)
            around = Printer(self.builder, printer.parent.block, self.tile_without(weights))
            right = Printer(self.builder, printer.block, weights, around, hoist=printer.block is not around.block)
            for name, window in zip(accumulators, segment.windows, strict=True):
                self.step(printer, right, name, window, x)
        if gemv:
            for name in accumulators:
                body.line(f"{name} = tl.sum({name}, {1 if self.single else 2})")
        return accumulators

    def left(self, printer: Printer) -> str:
        """The block of x: the prologue at (r, k), rounded to the operand's dtype."""
        plan, x = self.plan, self.plan.x
        bare = isinstance(x, t.Load) and x.dtype == plan.x_dtype
        printer.expect([x])
        text = printer.load(x, raw=not self.gemv) if bare else printer.value(x, name=True)
        k_axis = max(printer.tile.bound[t.K].axes)
        code = text.code
        if not bare and plan.x_dtype != torch.float32:
            code = f"{text.at(3)}.to({triton_type(plan.x_dtype)})"
            if self.gemv:
                code += ".to(tl.float32)"
        if not bare and k_axis in printer.tile.masks:
            # Beyond the last element the prologue of 0 need not be 0.
            zero = "0.0"
            code = f"tl.where({printer.tile.masks[k_axis]}, {text.code}, {zero})"
            if plan.x_dtype != torch.float32:
                code += f".to({triton_type(plan.x_dtype)})" + (".to(tl.float32)" if self.gemv else "")
        axes = frozenset((0, 1)) if not self.gemv else text.axes
        if not self.gemv and text.axes != axes:
            code = f"tl.broadcast_to({code}, [BLOCK_M, BLOCK_K])"
        return code if code == text.code else printer.statement(code, axes, "x").code

    def step(self, printer: Printer, right: Printer, name: str, window: t.WeightWindow, x: str) -> None:
        """One step of one window's accumulation."""
        tensor = self.spec.inputs[window.weight]
        if tensor.dtype != self.plan.x_dtype:
            raise refuse(
                f"the weight {tensor.name} is {tensor.dtype}, the other operand {self.plan.x_dtype}; the product of both has no kernel"
            )
        coords = (t.K, window.n) if window.kn else (window.n, t.K)
        load = t.Load(window.weight, coords, tensor.dtype)
        policy = "evict_first" if self.one_block else ""
        w = right.load(load, raw=not self.gemv, policy=policy).code
        if self.gemv:
            printer.block.line(f"{name} += {x} * {w}")
        else:
            precision = ', input_precision="ieee"' if self.plan.x_dtype == torch.float32 else ""
            printer.block.line(f"{name} = tl.dot({x}, {w}, {name}{precision})")
