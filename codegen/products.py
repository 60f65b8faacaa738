"""The products of linear regions: one block of columns times the rows, summed over the contracted dimension.

Three ways: `gemv` multiplies in fp32 and sums at the end; `skinny` has the weights as the tall operand of the matrix units, whose short
one is a few rows; `tiled` has the rows as the tall operand. Weights that no kernel of the graph writes are asked for *ahead*: before the
kernel waits for the one before it. `gemv` holds its first tile in registers by then, and in its loop always loads one tile ahead of the
one that it multiplies. `skinny`, whose loop copies tiles to shared memory several steps ahead, can have its first step *peeled*: the tile
is in registers before the wait, the loop begins with the second step, and the first is multiplied last, so that nothing stands between the
wait and the copies ("last"); or it is in the first turn of the loop, while the copies are under way ("first").
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.errors import refuse

from .behind import Behind
from .builder import Block, triton_type
from .columns import Columns
from .deferred import constant, peeled, unconditional
from .digit_products import Digits, joined
from .integers import normalise
from .peel import first_rows, first_step
from .printer import Printer, Tile, unrounded
from .quantised import rounded_rows, scaled, step_scale, within_step, word_step
from .statistics import Straight, divisible

if TYPE_CHECKING:
    from .linear import Bases, Linear

Sums = dict[tuple[int, int], str]  # names of accumulators by (window, part)
Tiles = dict[tuple[int, int], tuple[str, frozenset[int]]]  # names and axes of weights' tiles by (window, part)


class Products:
    """Writes the products of one set of a segment's columns into `body`; `c` names their positions, which need a mask if `masked`."""

    def __init__(self, linear: Linear, body: Block, segment: t.Segment, columns: Columns, c: str, masked: bool):
        self.linear, self.body, self.segment, self.columns, self.c, self.masked = linear, body, segment, columns, c, masked
        self.spec, self.plan, self.choice, self.builder = linear.spec, linear.plan, linear.choice, linear.builder
        self.schedule = linear.choice.schedule
        self.inner = sympy.sympify(self.plan.inner)
        # Elements of the contracted dimension that this program sums; all of them where it is not shared.
        self.span = self.inner if self.choice.split == 1 else linear.span
        self.straight = self.span.is_Integer and int(self.span) <= self.choice.block_k
        self.first: Tiles = {}  # the tiles loaded ahead
        self.first_x: dict[str, torch.dtype] = {}  # what a peeled step has loaded of the rows
        self.digits = Digits(self, linear.given) if linear.given is not None and linear.given.unit is not None else None
        self.words = linear.given is not None and bool(linear.given.words)
        self.k0, self.current = "", ""  # in the loop: the first element of a step, its positions
        self.k = ""  # the block variable of the first step, where it is written already
        self.x_printer: Printer | None = None  # what prints x of a step that has no loop around it: the only one, or the first, peeled
        self.peeled = ""  # when the first step is multiplied that is taken out of the loop ("last", "first")
        self.x = linear.deferred or unrounded(self.plan.x, self.plan.x_dtype)
        self.behind = None if linear.layer is None else Behind(self, linear.layer)
        self.squares = ""  # the sum of squares of a deferred norm

    # ------------------------------------------------------------------------------------------------------------------- ahead

    def ahead(self) -> None:
        """What may come before the wait: the first tiles of the weights (gemv, and skinny whose first step is peeled), and what else of a
        single step is constant."""
        if any(window.weight not in self.spec.constants for window in self.segment.windows):
            return
        self.peeled = peeled(self.spec, self.choice)
        if self.schedule == "gemv" or self.peeled:
            self.k = self.steps_at(self.body, "k" if self.straight else "k_first", self.linear.k_start)
            self.first = self.load_tiles(self.body, self.body, self.k)
        if self.schedule == "gemv" and self.straight:
            self.x_printer = self.step_printer(self.outer({}), {})
            roots = [self.x] if self.behind is None else self.behind.roots
            self.x_printer.expect(roots)
            for load in unconditional(roots):
                if constant(load, self.spec.constants):
                    self.x_printer.value(load)

    def ahead_sums(self) -> None:
        """What is summed before the wait, when everything that is asked for before it is under way."""
        if self.behind is not None and self.x_printer is not None:
            self.behind.ahead(self.first, self.x_printer)

    # -------------------------------------------------------------------------------------------------------------------- loop

    def run(self, statistics: Bases) -> Sums:
        """The loop over the contracted dimension; returns the fp32 sums by window and part, [rows, columns] ([columns] for a single
        row), and sets `squares` where a norm is deferred."""
        sums = self.zeros()
        if self.behind is not None:
            self.behind.begin(sums, self.shape(), statistics)
        current = self.held() if self.schedule == "gemv" and not self.straight else {}
        if self.peeled:
            first_rows(self, statistics)
        with self.loop(statistics) as printer:
            k = printer.tile.bound[t.K].code.split("[")[0]
            if self.schedule != "gemv":
                if self.peeled == "first":
                    turn = Block(printer.block)
                    first_step(self, turn, sums)
                    printer.block.attach(f"if {self.k0} == {self.loop_start()}:", turn)
                self.matrix_step(printer, k, sums)
            elif self.straight:
                tiles = self.first or self.load_tiles(printer.block, self.body, k)
                self.vector_step(printer, tiles, sums)
            else:
                following = self.steps_at(printer.block, "k_next", f"{k} + BLOCK_K", beyond=True)
                ahead = self.load_tiles(printer.block, self.body, following, hoist=True)
                self.vector_step(printer, current, sums)
                for key, (name, _) in current.items():
                    printer.block.line(f"{name} = {ahead[key][0]}")
        if self.peeled == "last":
            first_step(self, self.body, sums)
        if self.behind is not None:
            self.behind.finish(sums)
            return sums
        along = 1 if self.linear.single else 2
        whole = {} if self.digits is None else self.digits.sums
        if self.digits is not None:
            self.digits.finish(sums, along if self.words else None)
        for key, name in sums.items():
            if self.schedule == "gemv" and not (self.words and key in whole):
                self.body.line(f"{name} = tl.sum({name}, {along})")
            elif self.schedule == "skinny":
                self.body.line(f"{name} = tl.trans({name})")
        if self.squares:
            self.body.line(f"{self.squares} = tl.sum({self.squares}, {2 if self.schedule == 'gemv' and not self.linear.single else 1})")
        return sums

    def shape(self) -> str:
        """Source of an accumulator's shape."""
        inner = "BLOCK_K // 4" if self.words else "BLOCK_K"  # of words, a thread sums four in one place
        if self.linear.single:
            return f"[BLOCK_N, {inner}]"
        return {"gemv": f"[BLOCK_M, BLOCK_N, {inner}]", "skinny": "[BLOCK_N, BLOCK_M]", "tiled": "[BLOCK_M, BLOCK_N]"}[self.schedule]

    def zeros(self) -> Sums:
        """The accumulators, all zero."""
        sums: Sums = {}
        if self.digits is not None:
            self.digits.name_rows()
        shape = self.shape()
        for number, window in enumerate(self.segment.windows):
            for part in range(self.columns.parts):
                suffix = f"_{part}" if self.columns.parts > 1 else ""
                sums[(number, part)] = self.builder.names.new(f"sum_{self.spec.inputs[window.weight].name}{suffix}")
                if self.digits is not None and window.scale is not None and not window.scale.group:
                    self.digits.zeros((number, part), sums[(number, part)], shape)
                    continue
                if self.behind is None or not self.straight:
                    self.body.line(f"{sums[(number, part)]} = tl.zeros({shape}, tl.float32)")
        if self.linear.deferred is not None:
            rows = "[1, BLOCK_K]" if self.linear.single else "[BLOCK_M, 1, BLOCK_K]" if self.schedule == "gemv" else "[BLOCK_M, BLOCK_K]"
            self.squares = self.builder.names.new("squares")
            self.body.line(f"{self.squares} = tl.zeros({rows}, tl.float32)")
        return sums

    def held(self) -> Tiles:
        """The tiles that the loop multiplies next, in variables of their own."""
        if not self.first:
            self.k = self.steps_at(self.body, "k_first", self.linear.k_start)
            self.first = self.load_tiles(self.body, self.body, self.k)
        held = {}
        for key, (name, axes) in self.first.items():
            held[key] = (self.builder.names.new(f"{name}_now"), axes)
            self.body.line(f"{held[key][0]} = {name}")
        return held

    # ------------------------------------------------------------------------------------------------------------------- steps

    def size(self) -> str:
        return Printer(self.builder, self.body, self.linear.tile("r")).integer(normalise(self.inner), 1)

    def mask_needed(self, beyond: bool = False) -> bool:
        """Whether a step may hold positions beyond the end: the last one; one of a program that has nothing to sum, where a step is taken
        without a loop around it."""
        if self.peeled and not self.k0:  # the first of several steps is whole, but for programs with less than one to sum
            start = (self.choice.split - 1) * self.span
            return not (self.inner.is_Integer and start + self.choice.block_k <= self.inner)
        cut = not divisible(self.inner, self.choice.block_k)
        return beyond or cut or (not self.linear.even and (self.straight or self.schedule == "gemv"))

    def steps_at(self, block: Block, hint: str, start: str, beyond: bool = False) -> str:
        """Writes the positions of one step, from `start` on; `beyond`: a step may lie beyond the end."""
        k = self.builder.names.new(hint)
        arange = "" if start.endswith("BLOCK_K") else "tl.arange(0, BLOCK_K)"
        block.line(f"{k} = {' + '.join(part for part in (start, arange) if part)}")
        if self.mask_needed(beyond):
            self.builder.names.new(f"{k}_in")
            block.line(f"{k}_in = {k} < {self.linear.k_end or self.size()}")
        return k

    def outer(self, statistics: Bases) -> Printer:
        return Printer(self.builder, self.body, self.linear.with_statistics(self.linear.tile("r"), statistics))

    def x_tile(self, k: str, statistics: Bases) -> tuple[Tile, Tile]:
        """The tile of x at step `k`, and as it is outside of the loop."""
        layout = "rck" if self.schedule == "gemv" else "rk"
        masks = ("k",) if self.mask_needed() else ()
        tile = self.linear.with_statistics(self.linear.tile(layout, {"k": k}, masks), statistics)
        return tile, self.linear.with_statistics(self.linear.tile_without(tile), statistics)

    def step_printer(self, outer: Printer, statistics: Bases) -> Printer:
        """What prints x where one step covers everything."""
        tile, around = self.x_tile(self.k, statistics)
        return Printer(self.builder, self.body, tile, outer.on(around))

    def loop(self, statistics: Bases) -> AbstractContextManager[Printer]:
        """The steps over the contracted dimension, printing over the tile of x."""
        linear, outer = self.linear, self.outer(statistics)
        if self.straight:
            self.k = self.current = self.k or self.steps_at(self.body, "k", linear.k_start)
            printer = self.x_printer or self.step_printer(outer, statistics)
            printer.tile.statistics.update(self.x_tile(self.k, statistics)[0].statistics)
            return Straight(printer)
        k = self.current = self.builder.names.new("k")
        k0 = self.k0 = self.builder.names.new("k0")
        first = [f"{k} = {k0} + tl.arange(0, BLOCK_K)"]
        if self.mask_needed():
            self.builder.names.new(f"{k}_in")
            first.append(f"{k}_in = {k} < {linear.k_end or self.size()}")
        tile, around = self.x_tile(k, statistics)
        if self.schedule != "gemv" and self.choice.block_k == 32 * self.choice.num_warps:
            # Two bytes a thread (a norm's weight) are no asynchronous copy, and the loop would wait for them in every step.
            tile.thin = frozenset((1,))
        header = f"for {k0} in range({self.loop_start()}, {linear.k_end or self.size()}, BLOCK_K):"
        return outer.on(around).loop(header, tile, first)

    def loop_start(self) -> str:
        """Source of the first element of the loop."""
        start = self.linear.k_start
        return (f"{start} + BLOCK_K" if start else "BLOCK_K") if self.peeled else start or "0"

    def load_tiles(self, block: Block, body: Block, k: str, hoist: bool = False) -> Tiles:
        """Loads the tiles of every window and part at step `k`: names and axes."""
        gemv = self.schedule == "gemv"
        layout = "rck" if gemv else "ck" if self.schedule == "skinny" else "kc"
        masked = self.masked_at(k)
        tiles = {}
        for part in range(self.columns.parts):
            tile = self.linear.tile(layout, {"c": self.c, "k": k}, (*(("c",) if self.masked else ()), *(("k",) if masked else ())))
            tile = self.linear.part(tile, self.columns, part)
            around = Printer(self.builder, body, self.linear.tile_without(tile))
            right = Printer(self.builder, block, tile, around, hoist=hoist or block is not body)
            for number, window in enumerate(self.segment.windows):
                tiles[(number, part)] = self.load_weight(right, window)
        return tiles

    def masked_at(self, k: str) -> bool:
        """Whether the positions `k` have a mask."""
        return k.startswith("k_next") or self.mask_needed()

    def load_weight(self, right: Printer, window: t.WeightWindow) -> tuple[str, frozenset[int]]:
        """One tile of a weight as it is stored, 0 beyond the end of the contracted dimension."""
        tensor = self.spec.inputs[window.weight]
        if tensor.dtype != (self.plan.x_dtype if window.scale is None else torch.int32 if self.words else torch.int8):
            raise refuse(
                f"the weight {tensor.name} is {tensor.dtype}, the other operand {self.plan.x_dtype}; the product of both has no kernel"
            )
        coords = (t.K, window.n) if window.kn else (window.n, t.K)
        policy = "evict_first" if self.linear.one_block else ""
        text = right.load(t.Load(window.weight, coords, tensor.dtype), raw=True, policy=policy)
        w, axes = text.code, text.axes
        # A weight that repeats one value along the contracted dimension is not 0 beyond its end, and the other operand need not be either.
        k_axis = max(right.tile.bound[t.K].axes)
        if k_axis in right.tile.masks and k_axis not in axes:
            axes = axes | {k_axis}
            w = right.statement(f"tl.where({right.tile.masks[k_axis]}, {w}, 0.0).to({triton_type(tensor.dtype)})", axes, "w").code
        return w, axes

    # ---------------------------------------------------------------------------------------------------------------- operands

    def rows(self, printer: Printer, wide: bool) -> str:
        """The block of x: the prologue at (r, k), rounded to the operand's dtype (not where a norm is deferred and sums are fp32).
        `wide`: as fp32 all the same."""
        plan, x = self.plan, self.x
        bare = isinstance(x, t.Load) and x.dtype == plan.x_dtype
        printer.expect([x])
        text = printer.load(x, raw=not wide) if isinstance(x, t.Load) and bare else printer.value(x, name=True)
        k_axis = max(printer.tile.bound[t.K].axes)
        code = text.code
        rounded = f".to({triton_type(plan.x_dtype)})" + (".to(tl.float32)" if wide else "") if plan.x_dtype != torch.float32 else ""
        if wide and self.linear.deferred is not None:
            rounded = ""
        if not bare:
            code = f"{text.at(3)}{rounded}" if rounded else code
            if k_axis in printer.tile.masks:
                # Beyond the last element the prologue of 0 need not be 0.
                code = f"tl.where({printer.tile.masks[k_axis]}, {text.code}, 0.0){rounded}"
        gemv = self.schedule == "gemv"
        axes = text.axes if gemv else frozenset((0, 1))
        if not gemv and (text.axes != axes or sympy.sympify(plan.rows) == 1):  # what is read of a single row has one, whatever is said
            code = f"tl.broadcast_to({code}, [BLOCK_M, BLOCK_K])"
        if self.linear.deferred is not None:
            self.square(printer)
        return code if code == text.code else printer.statement(code, axes, "x").code

    def square(self, printer: Printer) -> None:
        """One step of the sum of squares of a deferred norm."""
        (reduction,) = self.plan.reductions
        value = printer.value(reduction.body, name=True)
        k_axis = max(printer.tile.bound[t.K].axes)
        code = value.at(1)
        if k_axis in printer.tile.masks and (not isinstance(reduction.body, t.Load) or k_axis not in value.axes):
            code = printer.statement(f"tl.where({printer.tile.masks[k_axis]}, {value.code}, 0.0)", value.axes | {k_axis}, "x").code
        printer.block.line(f"{self.squares} += {code} * {code}")

    def vector_step(self, printer: Printer, tiles: Tiles, sums: Sums) -> None:
        """One step of fp32 multiply-adds."""
        if self.words:
            return word_step(self, printer, tiles, sums)
        if self.behind is not None:
            return self.behind.step(printer, tiles, sums)
        x = self.rows(printer, wide=True)
        if self.plan.activations:
            x = rounded_rows(printer, x, self.linear.step if self.linear.single else f"{self.linear.step}[:, None, None]")
        for key, (name, _) in tiles.items():
            printer.block.line(f"{sums[key]} += {x} * {self.widened(printer, key, name)}")

    def widened(self, printer: Printer, key: tuple[int, int], name: str) -> str:
        """Source of a tile of a weight, called `name`, in fp32, with the scales of its groups where it has any."""
        number, part = key
        window = self.segment.windows[number]
        if window.scale is not None and window.scale.group:
            return f"({scaled(self, printer.block, self.weight_printer(printer.block, part), window, part, name, self.step_start())})"
        return f"{name}.to(tl.float32)" if window.scale is not None or self.plan.x_dtype != torch.float32 else name

    def matrix_step(self, printer: Printer, k: str, sums: Sums, tiles: Tiles | None = None) -> None:
        """One step on the matrix units, over `tiles` of the weights where they are loaded already."""
        skinny, block = self.schedule == "skinny", printer.block
        whole = frozenset((0, 1))
        # Scales that change within a step multiply the weights, which then need fp32.
        exact = self.digits is None and any(
            w.scale is not None and not within_step(w.scale, self.choice.block_k) for w in self.segment.windows
        )
        if self.digits is not None:
            left = self.digits.operands(printer, block, k)
        elif self.plan.activations:
            # Whole numbers up to 127, which every dtype of an operand holds.
            whole_rows = rounded_rows(printer, self.rows(printer, wide=True), f"{self.linear.step}[:, None]")
            operand = torch.float32 if exact else self.plan.x_dtype
            left = [whole_rows if operand == torch.float32 else f"{whole_rows}.to({triton_type(operand)})"]
        else:
            left = [self.rows(printer, wide=exact)]
        if skinny:
            left = [printer.statement(f"tl.trans({part})", whole, "x_t").code for part in left]
        tiles = tiles or self.load_tiles(block, self.body, k, hoist=block is not self.body)
        precision = ', input_precision="ieee"' if exact or self.plan.x_dtype == torch.float32 else ""
        shape = "[BLOCK_N, BLOCK_K]" if skinny else "[BLOCK_K, BLOCK_N]"
        for (number, part), (w, axes) in tiles.items():
            window, name = self.segment.windows[number], sums[(number, part)]
            w = w if axes == whole else f"tl.broadcast_to({w}, {shape})"
            grouped = window.scale is not None and window.scale.group
            if exact and grouped:
                w = f"({scaled(self, block, self.weight_printer(block, part), window, part, w, self.step_start())})"
            elif self.digits is None and (window.scale is not None or exact):
                w = f"{w}.to({'tl.float32' if exact else triton_type(self.plan.x_dtype)})"

            def dot(rows: str, more: str, w: str = w) -> str:
                return f"tl.dot({f'{w}, {rows}' if skinny else f'{rows}, {w}'}{more})"

            if grouped and not exact:
                scale = step_scale(self, block, window, part, self.step_start())
                products = [dot(rows, ", out_dtype=tl.int32" if self.digits else precision) for rows in left]
                product = products[0] if self.digits is None else joined([f"({p})" for p in products])
                block.line(f"{name} += {product} * {scale}")
            elif self.digits is not None:
                for digit, rows in zip(self.digits.sums[(number, part)], left, strict=True):
                    block.line(f"{digit} = {dot(rows, f', {digit}, out_dtype=tl.int32')}")
            else:
                block.line(f"{name} = {dot(left[0], f', {name}{precision}')}")

    def step_start(self) -> str:
        """Source of the first element of the current step."""
        return self.k0 or self.linear.k_start or "0"

    def weight_printer(self, block: Block, part: int) -> Printer:
        """What prints over the tile of a weight at the current step."""
        layout = {"gemv": "rck", "skinny": "ck", "tiled": "kc"}[self.schedule]
        masks = (*(("c",) if self.masked else ()), *(("k",) if self.mask_needed() else ()))
        tile = self.linear.part(self.linear.tile(layout, {"c": self.c, "k": self.current}, masks), self.columns, part)
        return Printer(self.builder, block, tile)
