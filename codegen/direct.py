"""Skinny linears whose weights go from memory straight into the registers that the matrix units read.

A program has the contracted dimension shared among its warps, and each warp multiplies what it has loaded itself: no shared memory, and no
barrier before the sums of the warps are added up in the end. Such programs are as small as those of `gemv`, so that several, and those of
the next kernel, fit on a processor.

Tiles are [n / 8 * chunks * warps * 8, 32]: 32 elements along k, which are contiguous in memory, of all columns (or rows) and all chunks
of k. A thread loads 16 bytes, and so Triton lays 4 lanes along the 32, 8 along the first axis, and the warps behind them: lane 4 i + j has
columns i, i + 8, … of the block, as an operand of `mma.m16n8k16` wants it. Which k it has is not what that operand says, but a product
does not care for the order of k as long as both operands have the same one (pointwise.HELPERS: `by_lane`, `by_lane_across`).

The loop holds one step's weights and rows in registers, multiplies them, and asks for those of the next step at its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from dsi.ir import tile as t

from .builder import Block
from .columns import U
from .deferred import constant, unconditional
from .layout import Bound, Interner, Text, Tile
from .printer import Printer
from .statistics import divisible

if TYPE_CHECKING:
    from .kernel import Choice
    from .linear import Bases, Linear
    from .products import Products, Sums, Tiles

REGISTERS, BESIDE = 65536, 24  # of a processor; of a thread beside what it holds
LANES, CHUNK = 8, 32  # columns (or rows) and elements along k of what a warp loads at once
DOWN, WHOLE = frozenset((0,)), frozenset((0, 1))  # axes of columns (or rows), which k varies along, too
SHORTEST_N = 16  # columns of a block at least: the height of the matrix units' tile


def refusal(spec: t.KernelSpec, choice: Choice) -> str:
    """Why a choice that is `direct` cannot be for a region; "" where it can, and where a choice is not."""
    plan = spec.plan
    if not choice.direct:
        return ""
    if choice.schedule != "skinny" or not isinstance(plan, t.LinearPlan):
        return f"direct is a way of the schedule skinny, not of {choice.schedule}"
    if choice.num_stages != 1:
        return f"direct holds one step in registers: it needs num_stages=1, not {choice.num_stages}"
    chunk = CHUNK * choice.num_warps
    if choice.block_k % chunk or choice.block_n < SHORTEST_N or choice.block_m < LANES:
        return (
            f"direct needs block_k a multiple of {chunk} (32 a warp), block_n of {SHORTEST_N} and block_m of {LANES} at least; "
            f"they are {choice.block_k}, {choice.block_n}, {choice.block_m}"
        )
    if plan.x_dtype not in (torch.float16, torch.bfloat16) or plan.activations or choice.digits:
        return f"direct multiplies fp16 and bf16, not {'int8' if plan.activations or choice.digits else plan.x_dtype}"
    for window in (window for segment in plan.segments for window in segment.windows):
        tensor = spec.inputs[window.weight]
        if tensor.dtype != plan.x_dtype:
            return f"direct needs weights of the rows' dtype; {tensor.name} is {tensor.dtype}, the rows are {plan.x_dtype}"
        if window.across(tensor):
            return f"direct needs weights that lie contiguous along the contracted dimension, which {tensor.name} does not"
    return ""


def most_registers(held: int, warps: int, beside: int = BESIDE) -> int:
    """Registers that a thread may have which holds tiles and sums in `held` of them, and needs `beside` more."""
    programs = REGISTERS // (32 * warps * (held + beside))
    return min(255, REGISTERS // (32 * warps * max(programs, 1)) // 8 * 8)


def spread(block: str) -> str:
    """Source of the column (or row) of a block at each place of a tile's first axis; `block` is how many there are."""
    places = f"tl.arange(0, {block} * BLOCK_K // 32)"
    return f"{places} // (BLOCK_K // 4) * 8 + {places} % 8"


def spread_k(block: str) -> str:
    """Source of the positions of a step at each place of a tile. Those of a warp lie side by side."""
    places = f"tl.arange(0, {block} * BLOCK_K // 32)"
    warp, chunk = f"{places} // 8 % WARPS", f"{places} // (8 * WARPS) % (BLOCK_K // (32 * WARPS))"
    return f"(({warp} * (BLOCK_K // (32 * WARPS)) + {chunk}) * 32)[:, None] + tl.arange(0, 32)[None, :]"


class Direct:
    """What `Products` does otherwise where a choice is direct."""

    def __init__(self, products: Products):
        self.products, self.linear = products, products.linear
        self.carried: list[tuple[t.Load, str]] = []  # loads of the rows, and what holds them for the step that is multiplied next
        self.first: dict[t.Load, str] = {}  # as they are loaded for the first step
        self.spreads: dict[str, str] = {}  # names of `spread_k` by block
        self.beside: dict[str, str] = {}  # names of the positions of a step in a weight's tile by those in the tile of the rows

    # ------------------------------------------------------------------------------------------------------------------ tiles

    def steps(self, block: Block, hint: str, start: str, masked: bool) -> str:
        """Writes the positions of the step that begins at `start`, which need a mask if `masked`; returns their name in the tile of the
        rows."""
        new = self.linear.builder.names.new
        whole = divisible(self.products.inner, self.linear.choice.block_k)
        k = new(hint)
        self.beside[k] = new(f"{k}_w")
        for name, size in ((k, "BLOCK_M"), (self.beside[k], "BLOCK_N")):
            before, plus, step = start.partition(" + BLOCK_K")  # constants last, so that addresses differ by constants alone
            block.line(f"{name} = {' + '.join(part for part in (before, self.positions(size)) if part)}{plus}{step}")
            if masked:
                new(f"{name}_in")
                inside = start if whole and start else name  # a step is inside or not
                block.line(f"{name}_in = {inside} < {self.linear.k_end or self.products.size()}")
        return k

    def positions(self, size: str = "BLOCK_M") -> str:
        """The name of the positions of a step that begins at 0, in a tile with `size` columns or rows."""
        if size not in self.spreads:
            self.spreads[size] = self.linear.builder.names.new("k_rows" if size == "BLOCK_M" else "k_columns")
            self.products.body.line(f"{self.spreads[size]} = {spread_k(size)}")
        return self.spreads[size]

    def tile(self, letter: str, variable: str, k: str, masks: tuple[str, ...]) -> Tile:
        """The tile of the rows (`letter` "r") or of a weight ("c") at the positions `variable` and `k`; `masks` as in `Linear.tile`."""
        linear = self.linear
        k = k if letter == "r" else self.beside.get(k, k)
        tile = Tile(
            (f"{'BLOCK_M' if letter == 'r' else 'BLOCK_N'} * BLOCK_K // 32", "32"), {}, fixed=dict(linear.fixed), limits=dict(linear.limits)
        )
        tile.bound[t.R if letter == "r" else U] = Bound(f"{variable}[:, None]", DOWN)
        tile.bound[t.K] = Bound(k, WHOLE)
        if letter in masks or (letter == "r" and linear.row_mask):
            tile.masks[0] = f"{variable}_in[:, None]"
        if "k" in masks:
            tile.masks[1] = f"{k}_in"
        return tile

    def with_statistics(self, tile: Tile, bases: Bases) -> Tile:
        """The tile of the rows with row statistics (1-d over the rows) laid out along its axis of rows."""
        if bases:
            self.linear.builder.use("along_lanes")
        texts = {key: Text(f"along_lanes({name}, WARPS, BLOCK_K)", DOWN) for key, name in bases.items()}
        return replace(tile, statistics=texts)

    # ------------------------------------------------------------------------------------------------------------------- rows

    def loads(self) -> list[t.Load]:
        """What of the rows' loads can be asked for a step ahead."""
        interner = Interner()
        found: dict[int, t.Load] = {}
        for load in unconditional([self.products.x]):
            gathered = any(isinstance(coord, t.Expr) for coord in load.coords)
            if t.K in interner.symbols(load) and not gathered:
                found.setdefault(interner.number(load), load)
        return list(found.values())

    def load_first(self, statistics: Bases, constants: bool) -> None:
        """Loads for the first step; of the `constants`, before the wait, or of the rest."""
        printer = self.products.step_printer(self.products.outer(statistics), statistics)
        for load in self.loads():
            if load not in self.first and (not constants or constant(load, self.products.spec.constants)):
                self.first[load] = printer.load(load, raw=True).code

    def hold(self, statistics: Bases) -> None:
        """Puts what the first step needs of the rows into variables of their own."""
        self.load_first(statistics, constants=False)
        self.limit_registers()
        for load, name in self.first.items():
            self.carried.append((load, self.linear.builder.names.new(f"{name}_now")))
            self.products.body.line(f"{self.carried[-1][1]} = {name}")

    def limit_registers(self) -> None:
        """States how many registers a thread may have: as many as let no fewer programs on a processor than what they hold does. Without a
        limit ptxas takes twice as many, a second set for the tiles that it loads."""
        choice, products = self.linear.choice, self.products
        dtypes = [products.spec.inputs[window.weight].dtype for window in products.segment.windows] * products.columns.parts
        rows = sum(load.dtype.itemsize for load in self.first) * choice.block_m * choice.block_k
        held = rows + sum(dtype.itemsize for dtype in dtypes) * choice.block_n * choice.block_k
        sums = len(dtypes) * choice.block_m * choice.block_n // 32 + (choice.block_m if products.squares else 0)
        steps = max(len(self.first) - 1, 0)  # of computing rows, in fp32
        held += 4 * steps * choice.block_m * choice.block_k
        most = most_registers(held // (4 * 32 * choice.num_warps) + sums, choice.num_warps, BESIDE * max(steps, 1))
        self.linear.builder.registers = max(self.linear.builder.registers, most)

    # ------------------------------------------------------------------------------------------------------------------- loop

    def step(self, printer: Printer, k: str, sums: Sums, current: Tiles, statistics: Bases) -> None:
        """One turn of the loop: multiplies what is held, and asks for the next step's."""
        products, block = self.products, printer.block
        for load, held in self.carried:
            _stand_in(printer, load, held)
        products.matrix_step(printer, k, sums, current)
        following = self.steps(block, "k_next", f"{products.k0} + BLOCK_K", masked=True)
        tile, around = products.x_tile(following, statistics)
        outer = Printer(self.linear.builder, products.body, around)
        ahead = Printer(self.linear.builder, block, tile, outer, hoist=True)
        rows = [(held, ahead.load(load, raw=True).code) for load, held in self.carried]
        weights = products.load_tiles(block, products.body, following, hoist=True)
        self.linear.builder.use("asked")
        block.line("asked(PDL)")
        for held, name in (*rows, *((name, weights[key][0]) for key, (name, _) in current.items())):
            block.line(f"{held} = {name}")

    def operand(self, printer: Printer, code: str) -> str:
        """The name of the rows, called `code`, as the operand beside the weights."""
        self.linear.builder.use("by_lane_across")
        return printer.statement(f"by_lane_across({code}, WARPS, BLOCK_K)", WHOLE, "x_t").code

    def weight(self, code: str) -> str:
        """Source of a weight's tile, called `code`, as an operand."""
        self.linear.builder.use("by_lane")
        return f"by_lane({code}, WARPS, BLOCK_K)"

    def squared(self, printer: Printer, value: str) -> None:
        """One step of the sum of squares of a deferred norm."""
        chunks = "[BLOCK_M // 8, BLOCK_K // (32 * WARPS), WARPS, 8, 32]"
        printer.block.line(f"{self.products.squares} += tl.sum(tl.reshape({value} * {value}, {chunks}), 1)")

    def finish(self, sums: Sums) -> None:
        """Adds up what the warps have summed."""
        body, squares = self.products.body, self.products.squares
        for name in sums.values():
            body.line(f"{name} = tl.trans(tl.sum({name}, 0))")
        if squares:
            body.line(f"{squares} = tl.reshape(tl.sum(tl.sum({squares}, 3), 1), [BLOCK_M])")


def write_rows(linear: Linear, rows: str) -> None:
    """Writes the rows along the first axis of their tile: `r_lanes`, and `r_lanes_in` where they need a mask, being `rows` many."""
    body = linear.builder.body
    linear.builder.constant("WARPS", linear.choice.num_warps)
    linear.builder.names.new("r_lanes"), linear.builder.names.new("r_lanes_in")
    body.line(f"r_lanes = {'' if linear.one_block else 'tl.program_id(1) * BLOCK_M + '}{spread('BLOCK_M')}")
    if linear.row_mask:
        body.line(f"r_lanes_in = r_lanes < {rows}")


def _stand_in(printer: Printer, load: t.Load, held: str) -> None:
    """Has `held` stand for a load of the printer's step, which is not written then."""
    block = printer.block
    before = len(block.lines)
    text = printer.load(load, raw=True)
    if len(block.lines) > before and block.lines[-1].startswith(f"{text.code} = tl.load("):
        block.lines.pop()
        block.rename(text.code, held)
