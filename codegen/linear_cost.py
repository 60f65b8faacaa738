"""The time of a linear region's kernel, in closed form.

A program streams tiles of the weights. How fast is decided by the slowest of: memory at its full rate; the programs' own pace, which is the
bytes that they have asked for and not yet got, over the latency of memory (Little's law); the last-level cache, from which every column
program reads the rows again; the processor with the most programs; the arithmetic. Around that come costs a kernel has once: the gap to
the kernel before, the first tile, the passes for row statistics, and where programs share the contracted dimension, their meeting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy
from dsi.ir import tile as t

from .columns import Columns, columns_of
from .deferred import deferred_norm
from .devices import Device
from .kernel import Choice
from .layout import Interner
from .roofline import evaluate, traffic, typical, within

# Seconds of a kernel's first and last instructions: arguments and index arithmetic; epilogue and stores. The matrix units come on top of
# that with their way through shared memory and the change of layouts behind them.
START, END, MATRIX = 0.4e-6, 0.4e-6, 0.5e-6
PASS = 0.7e-6  # a pass over rows for a statistic: read once more, and a reduction across the program
MEETING = 1.2e-6  # programs that share a sum: writing it, counting arrivals, reading the others'
STEP = {"gemv": 0.04e-6, "skinny": 0.12e-6, "tiled": 0.12e-6}  # the least that one step of a loop takes
# Operations of the vector units for each element of a weight, by its size: beside the multiply-adds of gemv, and for what is converted on
# its way to the matrix units.
CONVERSIONS, CONVERTED = {1: 10.0, 2: 1.5, 4: 0.0}, {1: 14.0}
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of one processor
# The share of the matrix units' rate that a tile reaches, where the operand that moves less is at least 64 tall (as the newer units want
# it) and where it is not.
TALL, SHORT = 0.8, 0.6
# What is left of that where the rows are computed on their way to the matrix units, and not loaded straight into shared memory.
COMPUTED = 0.6
ALIGNED = 16  # columns of which loads take several at once
SUSTAINED = 0.97  # of the bandwidth of a plain stream, where tiles are read
OVERDRAW = 1.6  # times its even share of the bandwidth that one processor can draw
RESIDENT = 0.6  # of memory's latency, where most tiles come from the last-level cache
SHARPNESS = 5  # how hard the slowest of several limits decides; the larger, the nearer to a plain maximum


@dataclass(frozen=True)
class Cut:
    """One set of a segment's columns: `positions` in each part, and for one position, its accumulators (windows times parts) and the bytes
    of their weights along one k."""

    columns: Columns
    positions: int
    accumulators: int
    weight_bytes: int


@dataclass(frozen=True)
class LinearWork:
    """What the time of a linear region depends on at a number of rows, worked out once for all choices."""

    rows: int
    inner: int
    moved: float  # bytes that memory must read and write at least
    x_bytes: int  # of one element of the rows
    cuts: tuple[Cut, ...]
    across: bool  # weights are stored [K, N]: what lies side by side in memory are columns
    reductions: tuple[str, ...]  # kinds of the row statistics
    deferred: frozenset[str]  # schedules that need no pass for them, since the norm's factor comes after the product
    bare: bool  # the rows are multiplied as they are loaded
    group: int | None  # elements along K with one scale, where all weights are int8 (0: a row's); None where one is not
    rounded: bool  # rows are rounded to int8 too
    crowded: bool  # an epilogue needs registers for more than its sums
    joined: bool  # an epilogue reads another tensor by row and column
    wide: bool  # products in fp32, outside the matrix units

    @property
    def held(self) -> int:
        """Positions that a block must have so that it holds whole groups of every segment that needs them; 1 where none does."""
        return max(cut.columns.padded for cut in self.cuts)

    @property
    def accumulators(self) -> int:
        """The most sums that a program holds side by side."""
        return max(cut.accumulators for cut in self.cuts)

    @property
    def columns(self) -> int:
        """Columns of all accumulators together."""
        return sum(cut.positions * cut.accumulators for cut in self.cuts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.inner * sum(cut.positions * cut.weight_bytes for cut in self.cuts)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return max(self.weight_bytes // (self.inner * self.columns), 1)

    def as_int8(self, choice: Choice) -> bool:
        """Whether rows meet the weights as int8 on the matrix units."""
        whole = self.group is not None and (not self.group or self.group % choice.block_k == 0)
        return choice.schedule in ("skinny", "tiled") and (choice.digits > 0 or self.rounded) and whole

    def passes(self, choice: Choice) -> int:
        """Times that a program reads its rows before the products."""
        if choice.schedule in self.deferred:
            return 0
        kept = self.inner <= choice.block_s
        return sum(2 if kind == "layer" and not kept else 1 for kind in self.reductions)


def linear_work(spec: t.KernelSpec, rows: int, assumed: dict[sympy.Symbol, int]) -> LinearWork:
    """The work of a linear region at `rows` rows; `assumed` are the values of its size symbols."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    cuts = []
    for segment in plan.segments:
        weights = sum(spec.inputs[window.weight].dtype.itemsize for window in segment.windows)
        for columns in columns_of(segment):
            cuts.append(Cut(columns, typical(columns.positions), len(segment.windows) * columns.parts, weights * columns.parts))
    return LinearWork(
        rows,
        typical(plan.inner),
        evaluate(traffic(spec), assumed),
        plan.x_dtype.itemsize,
        tuple(cuts),
        any(_across(spec.inputs[window.weight], window) for segment in plan.segments for window in segment.windows),
        tuple(reduction.kind for reduction in plan.reductions),
        frozenset(schedule for schedule in STEP if deferred_norm(plan, schedule) is not None),
        isinstance(plan.x, t.Load),
        _group(plan),
        bool(plan.activations),
        _crowded(plan) or (_joined(plan) and any(cut.positions % ALIGNED for cut in cuts)),
        _joined(plan),
        plan.x_dtype.itemsize >= 4,
    )


def _across(weight: t.Tensor, window: t.WeightWindow) -> bool:
    """Whether what lies side by side in memory are a weight's columns (it may be a transposed view)."""
    down, along = weight.strides[0 if window.kn else 1], weight.strides[1 if window.kn else 0]
    return down != 1 and along == 1


def held_lanes(plan: t.LinearPlan) -> int:
    """`LinearWork.held` of a plan."""
    return max(columns.padded for segment in plan.segments for columns in columns_of(segment))


def accumulators(plan: t.LinearPlan) -> int:
    """`LinearWork.accumulators` of a plan."""
    return max(len(segment.windows) * columns.parts for segment in plan.segments for columns in columns_of(segment))


def _group(plan: t.LinearPlan) -> int | None:
    groups = {None if window.scale is None else window.scale.group for segment in plan.segments for window in segment.windows}
    return None if None in groups else min(groups - {0}, default=0)  # type: ignore[type-var]


def _crowded(plan: t.LinearPlan) -> bool:
    """Whether an epilogue works on several parts, or takes norms over groups."""
    return any(segment.reductions or any(columns.parts > 1 for columns in columns_of(segment)) for segment in plan.segments)


def _joined(plan: t.LinearPlan) -> bool:
    """Whether an epilogue reads another tensor by row and column."""
    interner = Interner()
    stores = [store for segment in plan.segments for store in segment.stores]
    roots = [*(store.value for store in stores), *(c for store in stores for c in store.coords if isinstance(c, t.Expr))]
    return any(isinstance(expr, t.Load) and {t.R, t.C} <= interner.symbols(expr) for expr in within(roots))


# ---------------------------------------------------------------------------------------------------------------------- resources


def shared_bytes(work: LinearWork, choice: Choice) -> int:
    """Bytes of shared memory that a program needs for the tiles of its loop."""
    if choice.schedule == "gemv":
        return 0
    tile = choice.block_n * max(cut.weight_bytes for cut in work.cuts) + choice.block_m * work.x_bytes
    return tile * choice.block_k * max(choice.num_stages, 1)


def registers(work: LinearWork, choice: Choice) -> int:
    """About how many registers a thread needs."""
    threads = 32 * choice.num_warps
    if choice.schedule == "gemv":
        elements = choice.block_n * choice.block_k * work.accumulators / threads
        loaded = choice.block_n * choice.block_k * max(cut.weight_bytes for cut in work.cuts) / threads / 4
        return int(32 + elements * choice.block_m + 2 * loaded + 8 * choice.block_m)
    sums = work.accumulators * choice.block_m * choice.block_n / threads
    return int(48 + sums * (1.5 if work.crowded else 1.0) + (sums if work.wide else 0))


def resident(work: LinearWork, choice: Choice, device: Device) -> int:
    """Programs that one processor runs at a time."""
    threads = 32 * choice.num_warps
    shared = shared_bytes(work, choice)
    by_shared = device.shared // shared if shared else PROGRAMS
    return max(1, min(REGISTERS // (registers(work, choice) * threads), THREADS // threads, by_shared, PROGRAMS))


def programs_of(work: LinearWork, choice: Choice) -> int:
    """Programs of a launch."""
    shares = math.ceil(work.rows / choice.block_m) * choice.split
    return shares * sum(math.ceil(cut.positions / cut.columns.width(choice.block_n)) for cut in work.cuts)


# ------------------------------------------------------------------------------------------------------------------------- time


def linear_seconds(work: LinearWork, choice: Choice, device: Device) -> float:
    """Seconds of one launch behind another kernel, the gap between them included; of two, where the prologue is a kernel of its own."""
    seconds, int8 = 0.0, work.as_int8(choice)
    if int8 or (choice.apart and not work.bare):
        read = work.rows * work.inner * work.x_bytes
        seconds = device.dependent + START + END + PASS * (1 + len(work.reductions)) + 2 * read / (SUSTAINED * device.bandwidth)
        work = replace(work, reductions=(), bare=True, x_bytes=(1 if work.rounded else 2) if int8 else work.x_bytes)
    return seconds + _product_seconds(work, choice, int8, device)


def _product_seconds(work: LinearWork, choice: Choice, int8: bool, device: Device) -> float:
    processors, few = device.processors, choice.schedule in ("gemv", "skinny")
    programs, together = programs_of(work, choice), resident(work, choice, device)
    share = work.inner / choice.split
    steps = math.ceil(share / choice.block_k)
    blocks = math.ceil(work.rows / choice.block_m) * choice.split
    tiles = [(blocks * math.ceil(cut.positions / cut.columns.width(choice.block_n)), cut) for cut in work.cuts]
    rows_read = min(choice.block_m, work.rows) * share * work.x_bytes  # by each program, in one pass
    read = share * choice.block_n * max(cut.weight_bytes for _, cut in tiles) + rows_read
    again = sum(count * share * choice.block_n * cut.weight_bytes for count, cut in tiles) + programs * rows_read
    fill = programs / (math.ceil(programs / processors) * processors)

    waves = math.ceil(programs / (processors * together))
    latency = device.latency * (1.0 if few else RESIDENT)
    step = max(latency / max(choice.num_stages - 1, 1), STEP[choice.schedule])
    limits = (
        work.moved / (SUSTAINED * device.bandwidth),
        waves * (latency + steps * step),
        again / device.cache,
        math.ceil(programs / processors) * read / (OVERDRAW * device.bandwidth / processors),
        _arithmetic(work, choice, int8, device, sum(count * steps * cut.accumulators for count, cut in tiles)) / fill,
    )
    busy = sum(limit**SHARPNESS for limit in limits) ** (1 / SHARPNESS)

    once = START + END + (device.dependent if few else device.launch) + (0.0 if choice.schedule == "gemv" else MATRIX)
    on_processor = min(together, math.ceil(programs / processors))
    once += work.passes(choice) * (PASS + rows_read * on_processor / (device.cache / processors))
    if choice.split > 1:
        once += MEETING + 2 * 4 * choice.split * work.rows * work.columns / device.cache
    if few:
        # What is asked for before the wait arrives during the gap.
        asked = choice.prefetch * work.columns * choice.split
        if choice.schedule == "gemv":
            asked += programs * choice.block_n * choice.block_k * max(cut.weight_bytes for _, cut in tiles)
        once -= min(asked / device.bandwidth, device.dependent / 2)
    return busy + once


def _arithmetic(work: LinearWork, choice: Choice, int8: bool, device: Device, tiles: int) -> float:
    """Seconds that the device's units need for `tiles` tiles of a weight, if all of them are busy."""
    elements, lanes = tiles * choice.block_n * choice.block_k, device.vector / 2
    if choice.schedule == "gemv":
        return elements * (choice.block_m + CONVERSIONS[work.element_bytes]) / lanes
    products = 2 * elements * max(choice.block_m, 8) / _matrix_rate(work, choice, int8, device)
    if int8:
        return products * (1 if work.rounded else 2)
    return max(products, elements * CONVERTED.get(work.element_bytes, 0.0) / lanes)


def _matrix_rate(work: LinearWork, choice: Choice, int8: bool, device: Device) -> float:
    if work.wide and not int8:
        return device.vector * 0.5
    rate = device.matrix[2] * (2 if int8 else 1)
    if choice.schedule == "skinny":
        return rate * (TALL if choice.block_n >= 64 and choice.num_warps % 4 == 0 and device.capability >= 90 else SHORT)
    # Small tiles read their operands more often than they multiply: half of the rate at 64 x 64, most of it at 128 x 128.
    area = choice.block_m * choice.block_n * work.accumulators
    rate *= area / (area + 64 * 64)
    if not work.bare:
        rate *= COMPUTED
    return rate if choice.block_m >= 64 else rate * SHORT
