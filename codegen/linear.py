"""The schedules of linear regions: `gemv` (few rows, fp32 multiply-adds summed at the end), `skinny` (at most 64 rows, the weights as the
tall operand of the matrix units) and `tiled` (rows as the tall operand).

A program owns a block of rows and a block of columns of one segment, and streams the contracted dimension (codegen/products.py), or a part
of it (codegen/split.py). The prologue is applied to each block of x as it is read; statistics of the rows come from passes over x before
that. The epilogue works on the accumulators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t

from .builder import Block, Builder
from .columns import Columns, U, ceil_div, cuts_of
from .deferred import WIDEST_DEFERRED, constant, deferred_layer, deferred_norm, unconditional
from .integers import normalise
from .kernel import Choice
from .printer import SUBSCRIPTS, Bound, Printer, Text, Tile, conjunction
from .products import Products
from .quantised import row_step
from .split import combined, shares
from .statistics import Straight, divisible, held_statistics, row_statistics

if TYPE_CHECKING:
    from .apart import Given

Grid = tuple[sympy.Expr, ...]
Bases = dict[tuple[int, str], str]  # names of row statistics by (reduction, which)


class Linear:
    """Writes the kernel of one linear plan under one choice of blocks."""

    def __init__(self, spec: t.KernelSpec, choice: Choice, given: Given | None = None):
        """`given`: what of the rows is computed apart, where it is (codegen/apart.py); `spec` is that of the product then."""
        assert isinstance(spec.plan, t.LinearPlan)
        self.spec, self.plan, self.choice = spec, spec.plan, choice
        self.given = given
        self.builder = Builder(spec)
        self.block = self.builder.body  # where what depends on rows alone is written
        self.gemv = choice.schedule == "gemv"
        rows = sympy.sympify(self.plan.rows)
        # One row: the row symbol is 0 and tiles have one axis less.
        self.single = self.gemv and (rows == 1 or choice.max_rows == 1)
        self.one_block = (choice.max_rows is not None and choice.max_rows <= choice.block_m) or (
            rows.is_Integer and int(rows) <= choice.block_m
        )
        # Blocks of rows that share columns run one behind another, so that these are read from memory once.
        self.row_axis = 1 if self.one_block and choice.schedule != "tiled" else 0
        most = () if choice.max_rows is None else (sympy.Integer(choice.max_rows),)
        self.limits: dict[sympy.Symbol, tuple[sympy.Expr, ...]] = {t.R: (rows, *most), t.K: (sympy.sympify(self.plan.inner),)}
        self.fixed = {t.R: sympy.Integer(0)} if self.single else {}
        self.row_mask = False
        # The part of the contracted dimension that a program sums: its size, first element and end ("": all), whether no step is cut off.
        self.span, self.k_start, self.k_end, self.even = sympy.sympify(self.plan.inner), "", "", True
        self.programs: sympy.Expr = sympy.Integer(0)  # programs over columns
        self.partials = self.arrivals = self.partial_squares = ""  # workspaces of programs that share a sum
        self.step = ""  # names the step of each row, where rows are rounded to int8
        self.kept = False  # passes over rows share their positions, and so what they read stays in registers between them
        self.k_kept = ""
        self.deferred = None if self.gemv and choice.block_n > WIDEST_DEFERRED else deferred_norm(self.plan, choice.schedule)
        self.layer = deferred_layer(self.plan, choice)

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
        self.cuts = cuts_of(plan)
        # Sums that a program holds side by side, at most.
        self.most_sums = max(len(segment.windows) * columns.parts for _, segment, columns in self.cuts)
        self.programs = sum((columns.programs(choice.block_n) for _, _, columns in self.cuts), sympy.Integer(0))
        constant("BLOCK_N", choice.block_n)
        constant("BLOCK_K", choice.block_k)
        self.builder.start(body)
        for number in sorted(self.given.words) if self.given is not None else ():
            self.builder.reinterpret(body, number)
        ahead = choice.schedule != "tiled"
        self.program = self.builder.names.new("column_program")
        body.line(f"{self.program} = tl.program_id({1 - self.row_axis})")
        if not self.single:
            constant("BLOCK_M", choice.block_m)
            arange = "tl.arange(0, BLOCK_M)"
            body.line(f"r = {arange}" if self.one_block else f"r = tl.program_id({self.row_axis}) * BLOCK_M + {arange}")
            self.row_mask = not divisible(plan.rows, choice.block_m)
            if self.row_mask:
                printer = Printer(self.builder, body, Tile((), {}))
                body.line(f"r_in = r < {printer.integer(normalise(plan.rows), 1)}")
        if choice.split > 1:
            shares(self)
        statistics: Bases = {}
        if not ahead:
            self.builder.wait(body)
            statistics = self.statistics(body)
            self.row_stores(body, statistics)
        start: sympy.Expr = sympy.Integer(0)
        for position, (number, segment, columns) in enumerate(self.cuts):
            block = body if len(self.cuts) == 1 else Block(body)
            if block is not body:
                names = ", ".join(self.spec.outputs[s.output].name for s in segment.stores)
                whole = columns.lanes * columns.parts == columns.hold
                channels = f"{columns.offset} to {columns.offset + columns.lanes * columns.parts}"
                lanes = "" if whole else f", channels {channels} of {columns.hold}"
                block.comment(f"segment {number} ({names}), {segment.size} columns{lanes}")
            self.segment(block, segment, columns, start, statistics, ahead, position == 0)
            start += columns.programs(choice.block_n)
            if block is not body:
                end = Printer(self.builder, body, Tile((), {})).integer(normalise(start))
                last = position == len(self.cuts) - 1
                body.attach("else:" if last else f"{'if' if position == 0 else 'elif'} {self.program} < {end}:", block)
        blocks = ceil_div(plan.rows, choice.block_m)
        if choice.split > 1:
            return self.builder, (self.programs, blocks, sympy.Integer(choice.split))
        return self.builder, (blocks, self.programs) if self.row_axis == 0 else (self.programs, blocks)

    def statistics(self, block: Block) -> Bases:
        """The passes over x that the prologue's row statistics need."""
        bases = self.row_norms(block)
        if self.plan.activations:
            self.step = row_step(self, bases, 127.0)
        return bases

    def row_norms(self, block: Block) -> Bases:
        """The passes over x for norms that stand before the product."""
        self.block = block
        if not self.plan.reductions or self.deferred is not None or self.layer is not None:
            return {}
        self.builder.constant("BLOCK_S", self.choice.block_s)
        return row_statistics(self, self.plan.reductions, self.plan.inner, self.choice.block_s, "BLOCK_S")

    def outer(self, bases: Bases) -> Printer:
        """A printer for what depends on rows alone."""
        return Printer(self.builder, self.block, self.with_statistics(self.tile("r"), bases))

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
        first = f"{self.program} == 0" if self.choice.split == 1 else f"({self.program} == 0) & (tl.program_id(2) == 0)"
        body.attach(f"if {first}:", part)

    def over_k(self, outer: Printer, layout: str, block: int, constant: str, statistics: Bases) -> AbstractContextManager[Printer]:
        """A loop over the contracted dimension in steps of `block` (no loop where one step covers it), printing over `layout`."""
        inner = sympy.sympify(self.plan.inner)
        names, known = self.builder.names, self.k_kept
        k = known or names.new("k")
        masked = not divisible(inner, block)
        size = outer.integer(normalise(inner), 1)
        tile = self.with_statistics(self.tile(layout, {"k": k, "s": k}, ("k", "s") if masked else ()), statistics)
        # The loop's surroundings are printed over the same axes, without k.
        around = outer.on(self.with_statistics(self.tile_without(tile), statistics))
        mask = [f"{k}_in = {k} < {size}"] if masked else []
        if masked and not known:
            names.new(f"{k}_in")
        if inner.is_Integer and int(inner) <= block:
            if self.kept:
                self.k_kept = k
            for line in (f"{k} = tl.arange(0, {constant})", *mask) if k != known else ():
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

    def segment(
        self, body: Block, segment: t.Segment, columns: Columns, start: sympy.Expr, statistics: Bases, ahead: bool, first: bool
    ) -> None:
        """Accumulates one segment's windows and writes its epilogue, part by part. `ahead`: the kernels before have not been waited for;
        `first`: of the programs' columns."""
        self.limits.update(columns.limits())
        c, masked, lane_in = self.positions(body, columns, start)
        printers = self.printers(body, columns, c, masked)
        for printer in printers:
            printer.expect(store.value for store in segment.stores)
        scales: dict[tuple[int, int], str] = {}
        products = Products(self, body, segment, columns, c, masked)
        if ahead:
            products.ahead()
            scales = self.scales(printers, segment, lambda number: number in self.spec.constants)
            self.load_early(printers, segment, lambda load: constant(load, self.spec.constants))
            products.ahead_sums()
            self.builder.wait(body)
            statistics = self.statistics(body)
            if first:
                self.row_stores(body, statistics)
            self.load_early(printers, segment, lambda load: not constant(load, self.spec.constants))
        scales = {**scales, **self.scales(printers, segment, lambda number: not ahead or number not in self.spec.constants)}
        sums = products.run(statistics)
        done, header = body, ""
        if self.choice.split > 1:
            header, done = combined(self, body, sums, products.squares)
        if products.squares:
            self.scale(done, sums, products.squares)
        for key, name in sums.items():
            rows = [f"{self.step}[:, None]" if not self.single else self.step] if self.step else []
            if self.given is not None and self.given.unit is not None:
                printers[0].block = done
                rows.append(printers[0].load(t.Load(self.given.unit, (t.R,), torch.float32)).code)
            for factor in (*rows, *([scales[key]] if key in scales else [])):
                done.line(f"{name} *= {factor}")
        axes = frozenset(range(len(printers[0].tile.shape)))
        for printer in printers:
            printer.block = done
            printer.tile.accumulators.update({key: Text(name, axes) for key, name in sums.items()})
        if segment.reductions:
            held_statistics(printers, segment.reductions, columns, self.choice.block_n, lane_in)
        for part, printer in enumerate(printers):
            if columns.parts > 1:
                done.comment(f"part {part} of {columns.parts}: column {printer.integer(printer.index(t.C))}")
            for store in segment.stores:
                printer.store(store)
        if header:
            body.attach(header, done)

    def printers(self, body: Block, columns: Columns, c: str, masked: bool) -> list[Printer]:
        """What prints the epilogue, a printer a part."""
        tile = self.tile("rc", {"c": c}, ("c",) if masked else ())
        tile.columns = columns
        if columns.groups(self.choice.block_n) > 1 and columns.held:
            tile.group_start = f"tl.arange(0, BLOCK_N) // {columns.padded} * {columns.padded}"
        return [Printer(self.builder, body, self.part(tile, columns, part)) for part in range(columns.parts)]

    def load_early(self, printers: list[Printer], segment: t.Segment, wanted: Callable[[t.Load], bool]) -> None:
        """Loads what the epilogue will need, so that it does not wait for memory a second time: for a few rows values of columns alone,
        for one row everything."""
        roots = [*(store.value for store in segment.stores)]
        roots += [coord for store in segment.stores for coord in store.coords if isinstance(coord, t.Expr)]
        for printer in printers:
            for load in unconditional(roots):
                if wanted(load) and (self.single or t.R not in printer.interner.symbols(load)):
                    printer.value(load)

    def scales(self, printers: list[Printer], segment: t.Segment, wanted: Callable[[int], bool]) -> dict[tuple[int, int], str]:
        """Loads the scales of whole rows of int8 weights, by window and part, where their input is `wanted`."""
        found = {}
        for part, printer in enumerate(printers):
            for number, window in enumerate(segment.windows):
                scale = window.scale
                if scale is not None and not scale.group and wanted(scale.input):
                    found[(number, part)] = printer.load(t.Load(scale.input, scale.coords, self.spec.inputs[scale.input].dtype)).code
        return found

    def scale(self, body: Block, sums: dict[tuple[int, int], str], squares: str) -> None:
        """Multiplies the sums by the factor of a deferred norm."""
        (reduction,) = self.plan.reductions
        count = Printer(self.builder, body, Tile((), {})).integer(normalise(reduction.size), 3)
        rstd = self.builder.names.new("rstd")
        body.comment("the norm's factor, which is the same for a whole row")
        body.line(f"{rstd} = tl.rsqrt({squares} / {count} + {reduction.eps!r})")
        for name in sums.values():
            body.line(f"{name} *= {rstd}{'[:, None]' if self.choice.schedule == 'skinny' else ''}")

    def part(self, tile: Tile, columns: Columns, part: int) -> Tile:
        """The tile for one part's columns."""
        return replace(
            tile,
            fixed={**tile.fixed, t.C: columns.column(part)},
            limits={**tile.limits},
            statistics=dict(tile.statistics),
            accumulators=dict(tile.accumulators),
            part=part,
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
