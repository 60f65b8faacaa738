"""Skinny linears whose weights go from memory straight into the registers that the matrix units read.

A program has the contracted dimension shared among its warps, and each warp multiplies what it has loaded itself: no shared memory, and no
barrier before the sums of the warps are added up in the end. Such programs are as small as those of `gemv`, so that several, and those of
the next kernel, fit on a processor.

Tiles have five axes: [8, warps, n / 8, chunks, 32]. Of the last, which is contiguous in memory, a thread loads 16 bytes, and so Triton lays
4 lanes along it and 8 along the first: lane 4 i + j has columns (or rows) i, i + 8, … of the block, as an operand of `mma.m16n8k16` wants
it. Which k it has is not what that operand says, but a product does not care for the order of k as long as both operands have the same
one (pointwise.HELPERS: `by_lane`, `by_lane_across`).

The loop holds one step's weights and rows in registers, multiplies them, and asks for those of the next step at its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from dsi.ir import tile as t

from .columns import U
from .deferred import constant, unconditional
from .layout import Bound, Interner, Text, Tile
from .printer import Printer

if TYPE_CHECKING:
    from .kernel import Choice
    from .linear import Bases, Linear
    from .products import Products, Sums, Tiles

LANES, CHUNK = 8, 32  # columns (or rows) and elements along k of what a warp loads at once
AXES, AXES_N, AXES_K = frozenset(range(5)), frozenset((0, 2)), frozenset((1, 3, 4))
REGISTERS, BESIDE = 65536, 24  # of a processor; of a thread beside what it holds
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


def most_registers(held: int, warps: int) -> int:
    """Registers that a thread may have which holds tiles and sums in `held` of them."""
    programs = REGISTERS // (32 * warps * (held + BESIDE))
    return min(255, REGISTERS // (32 * warps * max(programs, 1)) // 8 * 8)


def spread(block: str) -> str:
    """Source of the positions 0 to `block` - 1 along the two axes of columns, or of rows."""
    return f"(tl.arange(0, {block} // 8) * 8)[None, None, :, None, None] + tl.arange(0, 8)[:, None, None, None, None]"


def spread_k() -> str:
    """Source of the positions of a step along the three axes of the contracted dimension: a warp's lie side by side."""
    warps = "(tl.arange(0, WARPS) * (BLOCK_K // WARPS))[None, :, None, None, None]"
    chunks = "(tl.arange(0, BLOCK_K // (32 * WARPS)) * 32)[None, None, None, :, None]"
    return f"{warps} + {chunks} + tl.arange(0, 32)[None, None, None, None, :]"


class Direct:
    """What `Products` does otherwise where a choice is direct."""

    def __init__(self, products: Products):
        self.products, self.linear = products, products.linear
        self.carried: list[tuple[t.Load, str]] = []  # loads of the rows, and what holds them for the step that is multiplied next
        self.first: dict[t.Load, str] = {}  # as they are loaded for the first step

    # ------------------------------------------------------------------------------------------------------------------ tiles

    def tile(self, letter: str, variable: str, k: str, masks: tuple[str, ...]) -> Tile:
        """The tile of the rows (`letter` "r") or of a weight ("c") at the positions `variable` and `k`; `masks` as in `Linear.tile`."""
        shape = ("8", "WARPS", f"{'BLOCK_M' if letter == 'r' else 'BLOCK_N'} // 8", "BLOCK_K // (32 * WARPS)", "32")
        linear = self.linear
        tile = Tile(shape, {}, fixed=dict(linear.fixed), limits=dict(linear.limits), thin=AXES_K)
        tile.bound[t.R if letter == "r" else U] = Bound(variable, AXES_N)
        tile.bound[t.K] = Bound(k, AXES_K)
        if letter in masks or (letter == "r" and linear.row_mask):
            tile.masks[0] = f"{variable}_in"
        if "k" in masks:
            tile.masks[max(AXES_K)] = f"{k}_in"
        return tile

    def with_statistics(self, tile: Tile, bases: Bases) -> Tile:
        """The tile of the rows with row statistics (1-d over the rows) laid out along its axes of rows."""
        if bases:
            self.linear.builder.use("along_lanes")
        return replace(tile, statistics={key: Text(f"along_lanes({name})", AXES_N) for key, name in bases.items()})

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
        most = most_registers(held // (4 * 32 * choice.num_warps) + sums, choice.num_warps)
        self.linear.builder.registers = max(self.linear.builder.registers, most)

    # ------------------------------------------------------------------------------------------------------------------- loop

    def step(self, printer: Printer, k: str, sums: Sums, current: Tiles, statistics: Bases) -> None:
        """One turn of the loop: multiplies what is held, and asks for the next step's."""
        products, block = self.products, printer.block
        for load, held in self.carried:
            _stand_in(printer, load, held)
        products.matrix_step(printer, k, sums, current)
        following = products.steps_at(block, "k_next", f"{k} + BLOCK_K", beyond=True)
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
        return printer.statement(f"by_lane_across({code})", AXES, "x_t").code

    def weight(self, code: str) -> str:
        """Source of a weight's tile, called `code`, as an operand."""
        self.linear.builder.use("by_lane")
        return f"by_lane({code})"

    def squared(self, printer: Printer, value: str) -> None:
        """One step of the sum of squares of a deferred norm."""
        printer.block.line(f"{self.products.squares} += tl.sum({value} * {value}, 3)")

    def finish(self, sums: Sums) -> None:
        """Adds up what the warps have summed."""
        body, squares = self.products.body, self.products.squares
        for name in sums.values():
            body.line(f"{name} = tl.trans(tl.sum({name}, 0))")
        if squares:
            body.line(f"{squares} = tl.reshape(tl.trans(tl.sum(tl.sum({squares}, 3), 1)), [BLOCK_M])")


def write_rows(linear: Linear, rows: str) -> None:
    """Writes the positions of the rows along the axes of a tile: `r_lanes`, and `r_lanes_in` where they need a mask, being `rows` many."""
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
