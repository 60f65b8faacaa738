"""The schedule of row regions: elementwise work and row statistics, without a contraction.

Without statistics a program owns a block of rows and columns. With them it owns whole rows: kept in registers where a row fits one block,
else read again for every pass.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from dsi.ir import tile as t

from .builder import Builder
from .columns import ceil_div
from .integers import normalise
from .kernel import Choice
from .printer import SUBSCRIPTS, Bound, Printer, Text, Tile
from .statistics import Straight, divisible, row_statistics


class Row:
    """Writes the kernel of one row plan under one choice of blocks."""

    def __init__(self, spec: t.KernelSpec, choice: Choice):
        assert isinstance(spec.plan, t.RowPlan)
        self.spec, self.plan, self.choice = spec, spec.plan, choice
        self.builder = Builder(spec)
        self.block = self.builder.body
        rows = sympy.sympify(self.plan.rows)
        # One row a program: tiles have no row axis, and r is a number.
        self.single = choice.block_m == 1
        self.limits = {t.R: (rows,), t.C: (sympy.sympify(self.plan.columns),)}
        self.fixed: dict[sympy.Symbol, sympy.Expr] = {t.R: sympy.Integer(0)} if rows == 1 else {}
        self.row_mask = False

    def tile(self, c: str = "", masked: bool = False) -> Tile:
        """Rows and, where `c` names the block variable, columns."""
        letters = ([] if self.single else ["r"]) + (["c"] if c else [])
        tile = Tile(tuple({"r": "BLOCK_M", "c": "BLOCK_N"}[x] for x in letters), {}, fixed=dict(self.fixed), limits=dict(self.limits))
        if self.single and not self.fixed:
            tile.bound[t.R] = Bound("r")
        for axis, letter in enumerate(letters):
            subscript = SUBSCRIPTS[len(letters)][axis]
            bound = Bound((c if letter == "c" else "r") + subscript, frozenset((axis,)))
            for symbol in (t.C, t.K) if letter == "c" else (t.R,):
                tile.bound[symbol] = bound
            if masked if letter == "c" else self.row_mask:
                tile.masks[axis] = f"{c if letter == 'c' else 'r'}_in{subscript}"
        return tile

    def with_statistics(self, tile: Tile, bases: dict[tuple[int, str], str]) -> Tile:
        """The tile with row statistics laid out along its row axis."""
        if self.single:
            return replace(tile, statistics={key: Text(name) for key, name in bases.items()})
        subscript = SUBSCRIPTS[len(tile.shape)][0]
        return replace(tile, statistics={key: Text(name + subscript, frozenset((0,))) for key, name in bases.items()})

    def outer(self, bases: dict[tuple[int, str], str]) -> Printer:
        """A printer for what depends on rows alone."""
        return Printer(self.builder, self.builder.body, self.with_statistics(self.tile(), bases))

    def write(self) -> tuple[Builder, tuple[sympy.Expr, ...]]:
        """Writes the whole body and returns the builder and the launch grid."""
        plan, choice, body = self.plan, self.choice, self.builder.body
        self.builder.names.new("r"), self.builder.names.new("r_in")
        self.builder.constant("BLOCK_N", choice.block_n)
        self.builder.start(body)
        self.builder.wait(body)
        blocks = ceil_div(plan.rows, choice.block_m)
        scalar = Printer(self.builder, body, Tile((), {}))
        if self.single:
            if not self.fixed:
                body.line("r = tl.program_id(0)")
        else:
            self.builder.constant("BLOCK_M", choice.block_m)
            body.line("r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)")
            self.row_mask = not divisible(plan.rows, choice.block_m)
            if self.row_mask:
                body.line(f"r_in = r < {scalar.integer(normalise(plan.rows), 1)}")
        bases: dict[tuple[int, str], str] = {}
        if plan.reductions:
            bases = row_statistics(self, plan.reductions, plan.columns, choice.block_n, "BLOCK_N")
            with self.steps(bases) as printer:
                self.stores(printer)
            return self.builder, (blocks,)
        columns = ceil_div(plan.columns, choice.block_n)
        c = self.builder.names.new("c")
        start = "" if columns == 1 else "tl.program_id(1) * BLOCK_N + "
        body.line(f"{c} = {start}tl.arange(0, BLOCK_N)")
        masked = not divisible(plan.columns, choice.block_n)
        if masked:
            self.builder.names.new(f"{c}_in")
            body.line(f"{c}_in = {c} < {scalar.integer(normalise(plan.columns), 1)}")
        self.stores(Printer(self.builder, body, self.tile(c, masked)))
        return self.builder, (blocks, columns)

    def stores(self, printer: Printer) -> None:
        printer.expect(store.value for store in self.plan.stores)
        for store in self.plan.stores:
            printer.store(store)

    def steps(self, bases: dict[tuple[int, str], str]):
        """A loop over the columns (none where one block covers them: then every pass prints into the same statements)."""
        columns, size = sympy.sympify(self.plan.columns), self.choice.block_n
        masked = not divisible(columns, size)
        body, names = self.builder.body, self.builder.names
        if columns.is_Integer and int(columns) <= size:
            if not hasattr(self, "_whole"):
                c = names.new("c")
                body.line(f"{c} = tl.arange(0, BLOCK_N)")
                if masked:
                    names.new(f"{c}_in")
                    body.line(f"{c}_in = {c} < {columns}")
                self._whole = Printer(self.builder, body, self.tile(c, masked)), c
            printer, c = self._whole
            return Straight(printer.on(self.with_statistics(self.tile(c, masked), bases)))
        c, c0 = names.new("c"), names.new("c0")
        outer = self.outer(bases)
        limit = outer.integer(normalise(columns), 1)
        first = [f"{c} = {c0} + tl.arange(0, BLOCK_N)"]
        if masked:
            names.new(f"{c}_in")
            first.append(f"{c}_in = {c} < {limit}")
        tile = self.with_statistics(self.tile(c, masked), bases)
        # Before the loop, over the same axes.
        bound = {symbol: value for symbol, value in tile.bound.items() if symbol == t.R}
        masks = {axis: mask for axis, mask in tile.masks.items() if mask.startswith("r_in")}
        around = outer.on(replace(tile, bound=bound, masks=masks))
        return around.loop(f"for {c0} in range(0, {limit}, BLOCK_N):", tile, first)
