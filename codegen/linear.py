"""The schedules of linear regions: `gemv` (few rows, fp32 multiply-adds summed at the end) and `tiled` (matrix units).

A program owns a block of rows and a block of columns of one segment, and streams the contracted dimension. The prologue is applied to
each block of x as it is read; statistics of the rows come from passes over x before that. The epilogue works on the accumulators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.errors import refuse

from .builder import Block, Builder, triton_type
from .columns import Columns, U, ceil_div, columns_of
from .integers import normalise
from .kernel import Choice
from .printer import SUBSCRIPTS, Bound, Printer, Text, Tile, conjunction, unrounded
from .statistics import Straight, divisible, held_statistics, row_statistics

Grid = tuple[sympy.Expr, ...]
Bases = dict[tuple[int, str], str]  # names of row statistics by (reduction, which)


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
        self.one_block = (choice.max_rows is not None and choice.max_rows <= choice.block_m) or (
            rows.is_Integer and int(rows) <= choice.block_m
        )
        most = () if choice.max_rows is None else (sympy.Integer(choice.max_rows),)
        self.limits: dict[sympy.Symbol, tuple[sympy.Expr, ...]] = {t.R: (rows, *most), t.K: (sympy.sympify(self.plan.inner),)}
        self.fixed = {t.R: sympy.Integer(0)} if self.single else {}
        self.row_mask = False

    # ------------------------------------------------------------------------------------------------------------------ tiles

    def tile(self, layout: str, names: dict[str, str] | None = None, masks: tuple[str, ...] = ()) -> Tile:
        """A tile whose axes are named by `layout`, one letter each of "rckn" (n: columns of a weight); the row axis is left out for a
        single row.

        `names` gives the 1-d block variables of c and k; `masks` the letters among them that need a mask (`c_in`, `k_in`).
        """
        letters = [letter for letter in layout if not (letter == "r" and self.single)]
        sizes = {"r": "BLOCK_M", "c": "BLOCK_N", "k": "BLOCK_K", "s": "BLOCK_S"}
        symbols = {"r": t.R, "c": U, "k": t.K, "s": t.K}
        tile = Tile(tuple(sizes[letter] for letter in letters), {}, fixed=dict(self.fixed), limits=dict(self.limits))
        for axis, letter in enumerate(letters):
            subscript = SUBSCRIPTS[len(letters)][axis]
            variable = (names or {}).get(letter, "r")
            tile.bound[symbols[letter]] = Bound(variable + subscript, frozenset((axis,)))
            if letter in masks or (letter == "r" and self.row_mask):
                tile.masks[axis] = f"{variable}_in{subscript}"
        return tile

    def with_statistics(self, tile: Tile, bases: Bases) -> Tile:
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
        self.cuts = [(number, segment, columns) for number, segment in enumerate(plan.segments) for columns in columns_of(segment)]
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
        total = sum((columns.programs(choice.block_n) for _, _, columns in self.cuts), sympy.Integer(0))
        start: sympy.Expr = sympy.Integer(0)
        for position, (number, segment, columns) in enumerate(self.cuts):
            if len(self.cuts) == 1:
                self.segment(body, segment, columns, start, statistics)
                break
            block = Block(body)
            names = ", ".join(self.spec.outputs[s.output].name for s in segment.stores)
            lanes = f", channels {columns.offset} to {columns.offset + columns.lanes * columns.parts} of {columns.hold}"
            block.comment(
                f"segment {number} ({names}), {segment.size} columns{lanes if columns.lanes * columns.parts != columns.hold else ''}"
            )
            self.segment(block, segment, columns, start, statistics)
            start += columns.programs(choice.block_n)
            end = Printer(self.builder, body, Tile((), {})).integer(normalise(start))
            last = position == len(self.cuts) - 1
            body.attach("else:" if last else f"{'if' if position == 0 else 'elif'} {self.program} < {end}:", block)
        blocks = ceil_div(plan.rows, choice.block_m)
        return self.builder, (total, blocks) if self.gemv else (blocks, total)

    def statistics(self) -> Bases:
        """The passes over x that the prologue's row statistics need."""
        if not self.plan.reductions:
            return {}
        self.builder.constant("BLOCK_S", self.choice.block_s)
        return row_statistics(self, self.plan.reductions, self.plan.inner, self.choice.block_s, "BLOCK_S")

    def outer(self, bases: Bases) -> Printer:
        """A printer for what depends on rows alone."""
        return Printer(self.builder, self.builder.body, self.with_statistics(self.tile("r"), bases))

    def steps(self, bases: Bases) -> AbstractContextManager[Printer]:
        """One pass over the rows of x."""
        return self.over_k(self.outer(bases), "rs", self.choice.block_s, "BLOCK_S", bases)

    def row_stores(self, body: Block, statistics: Bases) -> None:
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

    def over_k(self, outer: Printer, layout: str, block: int, constant: str, statistics: Bases) -> AbstractContextManager[Printer]:
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

    def segment(self, body: Block, segment: t.Segment, columns: Columns, start: sympy.Expr, statistics: Bases) -> None:
        """Accumulates one segment's windows and writes its epilogue, part by part."""
        self.limits.update(columns.limits())
        c, masked, lane_in = self.positions(body, columns, start)
        sums = self.accumulate(body, segment, columns, c, masked, statistics)
        tile = self.with_statistics(self.tile("rc", {"c": c}, ("c",) if masked else ()), statistics)
        axes = frozenset(range(len(tile.shape)))
        tile.accumulators = {key: Text(name, axes) for key, name in sums.items()}
        tile.columns = columns
        if columns.groups(self.choice.block_n) > 1 and columns.held:
            tile.group_start = f"tl.arange(0, BLOCK_N) // {columns.padded} * {columns.padded}"
        printers = [Printer(self.builder, body, self.part(tile, columns, part)) for part in range(columns.parts)]
        if segment.reductions:
            held_statistics(printers, segment.reductions, columns, self.choice.block_n, lane_in)
        for part, printer in enumerate(printers):
            if columns.parts > 1:
                body.comment(f"part {part} of {columns.parts}: column {printer.integer(printer.index(t.C))}")
            printer.expect(store.value for store in segment.stores)
            for store in segment.stores:
                printer.store(store)

    def part(self, tile: Tile, columns: Columns, part: int) -> Tile:
        """The tile for one part's columns."""
        return replace(
            tile, fixed={**tile.fixed, t.C: columns.column(part)}, limits={**tile.limits}, statistics=dict(tile.statistics), part=part
        )

    def positions(self, body: Block, columns: Columns, start: sympy.Expr) -> tuple[str, bool, str]:
        """Writes the program's positions: their name, whether they need a mask (`…_in`), and the condition that a lane is no padding."""
        names, block_n = self.builder.names, self.choice.block_n
        scalar = Printer(self.builder, body, Tile((), {}))
        program = f"({self.program} - {scalar.integer(normalise(start), 1)})" if start != 0 else self.program
        c = names.new("c" if columns.lanes == columns.hold else "u")
        whole = divisible(columns.positions, columns.width(block_n))
        masks = [] if whole else [f"{c} < {scalar.integer(columns.positions, 1)}"]
        lane_in = ""
        if columns.held and columns.padded != columns.lanes:
            groups = columns.groups(block_n)
            lane = names.new("lane")
            body.comment(f"groups of {columns.lanes} columns, each padded to {columns.padded}")
            body.line(f"{lane} = tl.arange(0, BLOCK_N)" + (f" % {columns.padded}" if groups > 1 else ""))
            group = f"({program} * {groups} + tl.arange(0, BLOCK_N) // {columns.padded})" if groups > 1 else program
            body.line(f"{c} = {group} * {columns.lanes} + {lane}")
            lane_in = f"{lane} < {columns.lanes}"
            masks.insert(0, lane_in)
        else:
            body.line(f"{c} = {program} * BLOCK_N + tl.arange(0, BLOCK_N)")
        if masks:
            names.new(f"{c}_in")
            body.line(f"{c}_in = {conjunction(masks) if len(masks) > 1 else masks[0]}")
        return c, bool(masks), lane_in

    def accumulate(
        self, body: Block, segment: t.Segment, columns: Columns, c: str, masked: bool, statistics: Bases
    ) -> dict[tuple[int, int], str]:
        """The loop over the contracted dimension; returns the fp32 sums by window and part, [rows, columns] (or [columns] for a single
        row)."""
        names, gemv = self.builder.names, self.gemv
        sums: dict[tuple[int, int], str] = {}
        shape = "[BLOCK_M, BLOCK_N, BLOCK_K]" if gemv else "[BLOCK_M, BLOCK_N]"
        if self.single:
            shape = "[BLOCK_N, BLOCK_K]"
        for number, window in enumerate(segment.windows):
            for part in range(columns.parts):
                suffix = f"_{part}" if columns.parts > 1 else ""
                sums[(number, part)] = names.new(f"sum_{self.spec.inputs[window.weight].name}{suffix}")
                body.line(f"{sums[(number, part)]} = tl.zeros({shape}, tl.float32)")
        outer = Printer(self.builder, body, self.with_statistics(self.tile("r"), statistics))
        with self.over_k(outer, "rck" if gemv else "rk", self.choice.block_k, "BLOCK_K", statistics) as printer:
            k = printer.tile.bound[t.K].code.split("[")[0]
            kmask = ("k",) if any(f"{k}_in" in mask for mask in printer.tile.masks.values()) else ()
            weights = self.tile("rck" if gemv else "kc", {"c": c, "k": k}, (*(("c",) if masked else ()), *kmask))
            x = self.left(printer)
            for part in range(columns.parts):
                tile = self.part(weights, columns, part)
                around = Printer(self.builder, body, self.tile_without(tile))
                right = Printer(self.builder, printer.block, tile, around, hoist=printer.block is not body)
                for number, window in enumerate(segment.windows):
                    self.step(printer, right, sums[(number, part)], window, x)
        if gemv:
            for name in sums.values():
                body.line(f"{name} = tl.sum({name}, {1 if self.single else 2})")
        return sums

    def left(self, printer: Printer) -> str:
        """The block of x: the prologue at (r, k), rounded to the operand's dtype."""
        plan = self.plan
        x = unrounded(plan.x, plan.x_dtype)
        bare = isinstance(x, t.Load) and x.dtype == plan.x_dtype
        printer.expect([x])
        text = printer.load(x, raw=not self.gemv) if isinstance(x, t.Load) and bare else printer.value(x, name=True)
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
        text = right.load(load, raw=not self.gemv, policy=policy)
        w, axes = text.code, text.axes
        # A weight that repeats one value along the contracted dimension is not 0 beyond its end, and the other operand need not be either.
        k_axis = max(right.tile.bound[t.K].axes)
        if k_axis in right.tile.masks and k_axis not in axes:
            w, axes = f"tl.where({right.tile.masks[k_axis]}, {w}, 0.0)", axes | {k_axis}
            if tensor.dtype != torch.float32 and not self.gemv:
                w += f".to({triton_type(tensor.dtype)})"
        if not self.gemv and axes != frozenset((0, 1)):
            w = f"tl.broadcast_to({w}, [BLOCK_K, BLOCK_N])"
        if self.gemv:
            printer.block.line(f"{name} += {x} * {w}")
        else:
            precision = ', input_precision="ieee"' if self.plan.x_dtype == torch.float32 else ""
            printer.block.line(f"{name} = tl.dot({x}, {w}, {name}{precision})")
