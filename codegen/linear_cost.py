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

from .columns import Columns, columns_of, cuts_of
from .deferred import behind_product, deferred_norm, is_deferred, peel_of
from .devices import Device
from .kernel import Choice
from .layout import Interner
from .roofline import evaluate, traffic, typical
from .word_cost import EXCHANGE, LAUNCHED, QUARTERS, WORD_SPREAD, word_registers, word_slots
from .words import WORD, words_possible

REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of one processor
ALIGNED = 16  # columns of which loads take several at once


@dataclass(frozen=True)
class Fit:
    """What of a schedule's time is not derived but fitted: to 3,500 kernels measured on an H200 one behind another, over weights past its
    cache: gemv at one row, skinny at 1 and 16, tiled at 512. Between measurement and model lie 14 %, 14 % and 9 % of the fastest kernels'
    time, root mean square; the best of the model's first eight loses 4 %, 1 % and 1 % to the best of all that were measured.

    `latency`, in the device's, from asking for a tile to using it. Seconds: `once` a kernel, `program` a program, `step` a step of the loop
    at least, `norm` where rows are computed, `reading` a pass over the rows for statistics, `meeting` where programs share a sum, `apart`
    for a kernel of the prologue. `stream` and `cache`: the shares of the rates of memory and of the last-level cache that count.
    `sharpness`: how hard the slowest of several limits decides; the larger, the nearer to a plain maximum. `registers` of a thread beside
    its sums and tiles.
    """

    latency: float
    once: float
    program: float
    step: float
    norm: float
    reading: float
    meeting: float
    apart: float
    stream: float
    cache: float
    sharpness: float
    registers: int


FITS = {
    "gemv": Fit(1.42, 0.50e-6, 0.14e-6, 0.0, 0.52e-6, 0.51e-6, 1.74e-6, 0.41e-6, 1.03, 8.0, 4.1, 12),
    "skinny": Fit(1.39, 1.90e-6, 0.47e-6, 0.07e-6, 2.66e-6, 2.54e-6, 0.96e-6, 2.6e-6, 0.97, 0.86, 2.5, 96),
    "tiled": Fit(1.53, 2.49e-6, 0.0, 0.13e-6, 0.17e-6, 2.7e-6, 0.0, 8.6e-6, 1.0, 3.0, 3.6, 48),
}
# Also fitted. Operations of the vector units: for each element of a weight beside the multiply-adds of gemv, by its size; for int8 on its
# way to the matrix units; for each element of the rows that gemv, skinny and tiled compute in every program, by the norm (a layer norm's
# passes are in it). How much of one step's arithmetic comes on top of its latency.
CONVERSIONS, CONVERTED = {1: 10.9, 2: 9.8, 4: 2.0}, 12.6
ROWS = {
    "gemv": {"": 0.0, "rms": 7.2, "layer": 132.0},
    "skinny": {"": 1.4, "rms": 9.0, "layer": 12.5},
    "tiled": {"": 4.0, "rms": 20.0, "layer": 20.0},
}
EXPOSED = 0.22
# By which memory is slower for each doubling of the rows of a weight that a program of gemv reads side by side.
SPREAD = 0.1
# Shares of the matrix units' rate. Of skinny's tiles at least 64 columns tall, as the newer units want it, and of others; of tiled's, whose
# small tiles read their operands more often than they multiply: the area at which half of it is reached; with rows that are computed on
# their way, and not loaded straight into shared memory.
TALL, SHORT = 0.43, 0.4
TILED, HALF_AREA, COMPUTED = 0.89, 2600, 0.68
CROWDED = 0.7  # further registers for each sum where an epilogue works on several parts
# Predicted; bench/NOTES.md has how unevenly it was measured to gain. A peeled first step saves the latency of the first load, where
# another kernel's program fits on a processor beside those of the one that runs (else it starts as late as it would have waited);
# behind a kernel of the rows, which leaves memory idle, it saves the load. Multiplied last it costs the tile's way through shared
# memory, in bytes/s of a processor.
SOONER, CROWDED_OUT, THROUGH = 0.7e-6, 0.2e-6, 110e9
UNROUNDED = 3  # waves of programs from which on the last need not be a whole one


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
    fused: bool  # several cuts read one weight
    across: bool  # weights are stored [K, N]: what lies side by side in memory are columns
    reductions: tuple[str, ...]  # kinds of the row statistics
    deferred: frozenset[str]  # schedules that need no pass for them, since the norm's factor comes after the product
    bare: bool  # the rows are multiplied as they are loaded
    group: int | None  # elements along K with one scale, where all weights are int8 (0: a row's); None where one is not
    rounded: bool  # rows are rounded to int8 too
    crowded: bool  # an epilogue needs registers for more than its sums
    joined: bool  # an epilogue reads another tensor by row and column
    wide: bool  # products in fp32, outside the matrix units
    words: bool = False  # int8 weights can be read as words
    constant: bool = False  # no kernel of the graph writes the weights
    behind: bool = False  # a layer norm may correct gemv's sums instead of the rows

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
        """Whether rows meet the weights as int8: on the matrix units, or as words."""
        if choice.schedule == "gemv":
            return self.words and choice.digits > 0
        whole = self.group is not None and (not self.group or self.group % choice.block_k == 0)
        return choice.schedule in ("skinny", "tiled") and (choice.digits > 0 or self.rounded) and whole

    def peel(self, choice: Choice) -> str:
        """When a choice's first step is multiplied, where it is peeled (deferred.peeled)."""
        return peel_of(sympy.Integer(self.inner), choice) if self.constant and choice.peel else ""

    def is_deferred(self, choice: Choice) -> bool:
        """Whether the norm before the product comes behind it."""
        return choice.schedule in self.deferred or (self.behind and is_deferred(choice, self.accumulators))

    def passes(self, choice: Choice) -> int:
        """Times that a program reads its rows before the products."""
        if self.is_deferred(choice):
            return 0
        kept = self.inner <= choice.block_s
        return sum(2 if kind == "layer" and not kept else 1 for kind in self.reductions)

    def tile_bytes(self, choice: Choice) -> int:
        """Bytes of the weights' and the rows' tiles of one step, as a program reads them."""
        rows = choice.block_m * (1 if self.rounded else 2 if self.as_int8(choice) else self.x_bytes)
        return choice.block_k * (choice.block_n * max(cut.weight_bytes for cut in self.cuts) + rows)


def linear_work(spec: t.KernelSpec, rows: int, assumed: dict[sympy.Symbol, int]) -> LinearWork:
    """The work of a linear region at `rows` rows; `assumed` are the values of its size symbols."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    cuts, read = [], []
    for _, segment, columns in cuts_of(plan):
        weights = sum(spec.inputs[window.weight].dtype.itemsize for window in segment.windows)
        cuts.append(Cut(columns, typical(columns.positions), len(segment.windows) * columns.parts, weights * columns.parts))
        read += [window.weight for window in segment.windows]
    return LinearWork(
        rows,
        typical(plan.inner),
        evaluate(traffic(spec), assumed),
        plan.x_dtype.itemsize,
        tuple(cuts),
        len(read) > len(set(read)),
        any(window.across(spec.inputs[window.weight]) for segment in plan.segments for window in segment.windows),
        tuple(reduction.kind for reduction in plan.reductions),
        frozenset(schedule for schedule in FITS if deferred_norm(plan, schedule) is not None),
        isinstance(plan.x, t.Load),
        _group(plan),
        bool(plan.activations),
        _crowded(plan) or (_joined(plan) and any(cut.positions % ALIGNED for cut in cuts)),
        _joined(plan),
        plan.x_dtype.itemsize >= 4,
        words_possible(spec),
        all(window.weight in spec.constants for segment in plan.segments for window in segment.windows),
        behind_product(plan) is not None,
    )


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
    return any(isinstance(expr, t.Load) and {t.R, t.C} <= interner.symbols(expr) for expr in t.parts_of(*roots))


# ---------------------------------------------------------------------------------------------------------------------- resources


def shared_bytes(work: LinearWork, choice: Choice) -> int:
    """Bytes of shared memory that a program needs for the tiles of its loop."""
    if choice.schedule == "gemv":
        return 0
    rows = choice.block_m * work.x_bytes * (1 if work.bare or choice.apart or work.as_int8(choice) else 2)
    tiles = [choice.block_n * cut.weight_bytes + rows for cut in work.cuts]
    # What compiled kernels have: the tiles of branches that exclude each other lie side by side, up to three. They share their place where
    # each branch reads a weight of its own and its epilogue exchanges columns, held or in parts (rope), which sets the branches apart.
    together = min(sum(tiles), 3 * max(tiles)) if work.fused or not (work.held > 1 or work.crowded) else max(tiles)
    # A peeled step takes the loop's place behind it, and a further one beside it.
    return together * choice.block_k * (max(choice.num_stages, 1) + (work.peel(choice) == "first"))


def registers(work: LinearWork, choice: Choice) -> int:
    """About how many registers a thread needs."""
    threads, least = 32 * choice.num_warps, FITS[choice.schedule].registers
    if choice.schedule == "gemv":
        elements = choice.block_n * choice.block_k / threads
        if work.as_int8(choice):
            return word_registers(work, choice)
        loaded = elements * max(cut.weight_bytes for cut in work.cuts) / 4
        if work.behind and work.is_deferred(choice) and choice.block_k < work.inner:
            loaded += 2 * elements * work.accumulators  # the sums without the rows, which several steps carry, too
        return max(int(least + (elements * work.accumulators + (4 if work.bare else 8)) * choice.block_m + 2 * loaded), 24)
    sums = work.accumulators * choice.block_m * choice.block_n / threads
    held = work.tile_bytes(choice) // (4 * threads) if work.peel(choice) else 0
    return int(least + sums * (1 + (CROWDED if work.crowded else 0.0)) + (sums if work.wide else 0)) + held


def resident(work: LinearWork, choice: Choice, device: Device) -> int:
    """Programs that one processor runs at a time."""
    threads = 32 * choice.num_warps
    shared = shared_bytes(work, choice)
    by_shared = device.shared // shared if shared else PROGRAMS
    by_registers = REGISTERS // (registers(work, choice) * threads)
    if choice.schedule == "gemv" and work.as_int8(choice):
        by_registers = QUARTERS * (REGISTERS // QUARTERS // (registers(work, choice) * 32)) // choice.num_warps
    return max(1, min(by_registers, THREADS // threads, by_shared, PROGRAMS))


def programs_of(work: LinearWork, choice: Choice) -> int:
    """Programs of a launch."""
    shares = math.ceil(work.rows / choice.block_m) * choice.split
    return shares * sum(math.ceil(cut.positions / cut.columns.width(choice.block_n)) for cut in work.cuts)


# ------------------------------------------------------------------------------------------------------------------------- time


def linear_seconds(work: LinearWork, choice: Choice, device: Device) -> float:
    """Seconds of one launch behind another kernel, the gap between them included; of two, where the prologue is a kernel of its own."""
    seconds, int8 = 0.0, work.as_int8(choice)
    apart = int8 or (choice.apart and not work.bare)
    if apart:
        fit = FITS[choice.schedule]
        # Digits of words need a pass of their own for each row's unit; in the other schedules' fit it is contained.
        passes = len(work.reductions) + (1 if choice.schedule == "gemv" and int8 else 0)
        seconds = fit.apart + fit.reading * passes + 2 * work.rows * work.inner * work.x_bytes / device.bandwidth
        work = replace(work, reductions=(), bare=True, x_bytes=(1 if work.rounded else 2) if int8 else work.x_bytes)
    return seconds + _product_seconds(work, choice, int8, device) - _sooner(work, choice, apart, device)


def _sooner(work: LinearWork, choice: Choice, apart: bool, device: Device) -> float:
    """Seconds by which a kernel ends sooner whose first step is peeled. `apart`: the kernel before it computes its rows alone."""
    peel = work.peel(choice)
    if not peel or device.capability < 90:
        return 0.0
    together, programs, tile = resident(work, choice, device), programs_of(work, choice), work.tile_bytes(choice)
    first = min(programs, device.processors * together)  # programs that can start while the kernel before still runs
    if apart:
        gain = min(SOONER + first * tile / device.bandwidth, FITS[choice.schedule].apart)
    else:
        gain = SOONER if math.ceil(programs / device.processors) < together else CROWDED_OUT
    return gain - (0.5 * tile / THROUGH if peel == "last" else 0.0)  # what one program waits for, another may overlap


def _product_seconds(work: LinearWork, choice: Choice, int8: bool, device: Device) -> float:
    fit, processors = FITS[choice.schedule], device.processors
    programs, together = programs_of(work, choice), resident(work, choice, device)
    on_processor = min(together, math.ceil(programs / processors))
    share = work.inner / choice.split
    steps = math.ceil(share / choice.block_k)
    blocks = math.ceil(work.rows / choice.block_m) * choice.split
    counts = [(blocks * math.ceil(cut.positions / cut.columns.width(choice.block_n)), cut) for cut in work.cuts]
    rows_read = min(choice.block_m, work.rows) * share * work.x_bytes  # by each program, in one pass
    read = sum(count * share * choice.block_n * cut.weight_bytes for count, cut in counts) + programs * rows_read
    fill = programs / (math.ceil(programs / processors) * processors)
    tiles = sum(count * cut.accumulators for count, cut in counts) * steps
    arithmetic = _arithmetic(work, choice, int8, device, tiles, programs * steps)

    waves = programs / (processors * together)
    waves = math.ceil(waves) if waves <= UNROUNDED else waves + 0.5
    latency, spread, words = fit.latency * device.latency, 1.0, int8 and choice.schedule == "gemv"
    launched = programs * LAUNCHED if words else 0.0
    if choice.schedule == "gemv":  # each step's tile is asked for a step ahead
        busy = arithmetic / (programs * steps) * processors * on_processor
        turns = (steps - 1) // 2 if words else steps - 1  # two tiles are under way at a time
        one = latency + turns * max(latency, 2 * busy if words else busy) + EXPOSED * busy
        one += EXCHANGE if words and choice.num_warps > 1 else 0.0
        if not work.across:
            spread = 1 + (WORD_SPREAD if words else SPREAD) * math.log2(choice.block_n)
    else:
        one = latency + steps * max(latency / max(choice.num_stages - 1, 1), fit.step)
    limits = (
        spread * work.moved / (fit.stream * device.bandwidth),
        waves * (one + fit.program),
        read / (device.vector / 2 if words else fit.cache * device.cache),
        arithmetic / fill,
        launched,
    )
    seconds = sum(limit**fit.sharpness for limit in limits) ** (1 / fit.sharpness) + fit.once
    if not work.bare:
        seconds += fit.norm
    seconds += work.passes(choice) * (fit.reading + rows_read * on_processor / (fit.cache * device.cache / processors))
    if choice.split > 1:
        seconds += fit.meeting + 2 * 4 * choice.split * work.rows * work.columns / (fit.cache * device.cache)
    return seconds + (0.0 if device.capability >= 90 else device.launch - device.dependent)


def _arithmetic(work: LinearWork, choice: Choice, int8: bool, device: Device, tiles: int, steps: int) -> float:
    """Seconds that the device's units need for `tiles` tiles of a weight in `steps` steps of programs, if all of them are busy."""
    elements, lanes = tiles * choice.block_n * choice.block_k, device.vector / 2
    behind = work.behind and work.is_deferred(choice)
    norm = "rms" if behind else max(work.reductions, key=lambda kind: ROWS["gemv"][kind], default="")
    rows = 0.0 if work.bare else ROWS[choice.schedule][norm] * steps * choice.block_k * min(choice.block_m, work.rows) / lanes
    if choice.schedule == "gemv" and int8:
        return elements / WORD * word_slots(work, choice) / lanes
    if choice.schedule == "gemv":
        return elements * (choice.block_m + (2 if behind else 0) + CONVERSIONS[work.element_bytes]) / lanes + rows
    products = 2 * elements * max(choice.block_m, 8) / _matrix_rate(work, choice, int8, device)
    if int8:
        return products * (1 if work.rounded else 2) + rows
    return max(products, elements * CONVERTED / lanes if work.element_bytes == 1 else 0.0) + rows


def _matrix_rate(work: LinearWork, choice: Choice, int8: bool, device: Device) -> float:
    if work.wide and not int8:
        return device.vector * 0.5
    rate = device.matrix[2] * (2 if int8 else 1)
    if choice.schedule == "skinny":
        return rate * (TALL if choice.block_n >= 64 and choice.num_warps % 4 == 0 and device.capability >= 90 else SHORT)
    area = choice.block_m * choice.block_n * work.accumulators
    rate *= TILED * area / (area + HALF_AREA) * (1.0 if work.bare else COMPUTED)
    return rate if choice.block_m >= 64 else rate * SHORT
