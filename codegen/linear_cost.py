"""The time of a linear region's kernel, in closed form.

A program streams tiles of the weights. How fast is decided by the slowest of: memory at its full rate; the programs' own pace, which is the
bytes that they have asked for and not yet got, over the latency of memory (Little's law); the last-level cache, from which every column
program reads the rows again; the processor with the most programs; the arithmetic. Around that come costs a kernel has once: the gap to
the kernel before, the first tile, the passes for row statistics, and where programs share the contracted dimension, their meeting.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .devices import Device
from .kernel import Choice
from .linear_fit import BLOCKS, FITS, WORDS, Fit
from .linear_occupancy import programs_of, registers, resident, shared_bytes
from .linear_work import LinearWork, linear_work
from .word_cost import EXCHANGE, LAUNCHED, WORD_SPREAD, word_slots
from .words import WORD

__all__ = ["LinearWork", "linear_seconds", "linear_work", "programs_of", "registers", "resident", "shared_bytes"]

# Fitted, too. Operations of the vector units: for each element of a weight beside the multiply-adds of gemv, by its size; for int8 on its
# way to the matrix units; for each element of the rows that gemv, skinny and tiled compute in every program, by the norm (a layer norm's
# passes are in it). How much of one step's arithmetic comes on top of its latency.
CONVERSIONS, CONVERTED = {1: 10.9, 2: 8.7, 4: 2.0}, {"skinny": 11.0, "tiled": 5.0}
ROWS = {
    "gemv": {"": 0.0, "rms": 7.2, "layer": 20.0},
    "skinny": {"": 1.4, "rms": 9.0, "layer": 12.5},
    "tiled": {"": 4.0, "rms": 20.0, "layer": 20.0},
}
EXPOSED, WORDS_EXPOSED = 0.15, 0.22
# By which memory is slower for each doubling of the rows of a weight that a program of gemv reads side by side.
SPREAD = 0.115
# Shares of the matrix units' rate. Of skinny's tiles at least 64 columns tall, as the newer units want it, and of others; of tiled's, whose
# small tiles read their operands more often than they multiply: the area at which half of it is reached; with rows that are computed on
# their way, and not loaded straight into shared memory.
TALL, SHORT = 0.43, 0.4
TILED, HALF_AREA, COMPUTED = 0.89, 2600, 0.68
# Of skinny's with more rows than 16: the tall operand is read from shared memory for few rows as for many, so that their number decides.
MANY, HALF_ROWS = 0.8, 24
# Seconds from a product of integers to the next of the same four warps: Triton waits for each, and other warps multiply meanwhile.
WAITED = 0.08e-6
# By which a thread's registers beyond those that there are slow the products of int8 weights: ptxas has each wait for the one before it
# then, between stores and loads. From totals of steps of 64, 128 and 512 rows.
SPILLED, MOST_REGISTERS = 3.0, 255
# Predicted; bench/NOTES.md has how unevenly it was measured to gain. A peeled first step saves the latency of the first load, where
# another kernel's program fits on a processor beside those of the one that runs (else it starts as late as it would have waited);
# behind a kernel of the rows, which leaves memory idle, it saves the load. Multiplied last it costs the tile's way through shared
# memory, in bytes/s of a processor.
SOONER, CROWDED_OUT, THROUGH = 0.7e-6, 0.2e-6, 110e9
UNROUNDED = 3  # waves of programs from which on the last need not be a whole one


def linear_seconds(work: LinearWork, choice: Choice, device: Device) -> float:
    """Seconds of one launch behind another kernel, the gap between them included; of two, where the prologue is a kernel of its own."""
    seconds, int8 = 0.0, work.as_int8(choice)
    apart = int8 or (choice.apart and not work.bare)
    if apart:
        # `tiled`'s was fitted to norms over 512 rows, beside which digits cost little: theirs is the kernel that skinny's few rows have.
        fit = FITS["skinny"] if int8 and choice.schedule == "tiled" else _fit(choice, int8)
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
    in_blocks, processors = work.in_blocks(choice), device.processors
    fit = BLOCKS if in_blocks else _fit(choice, int8)
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
    if int8 and choice.schedule != "gemv" and device.capability >= 90 and not in_blocks:
        waits = 1 if work.beside(choice) else max(choice.digits, 1)
        arithmetic += tiles * waits * WAITED / (processors * on_processor * max(choice.num_warps // 4, 1))
    if work.group is not None and choice.schedule != "gemv":
        arithmetic *= 1 + SPILLED * max(registers(work, choice) / MOST_REGISTERS - 1, 0)

    waves = programs / (processors * together)
    waves = math.ceil(waves) if waves <= UNROUNDED else waves + 0.5
    latency, spread, words = fit.latency * device.latency, 1.0, int8 and choice.schedule == "gemv"
    launched = programs * LAUNCHED if choice.schedule == "gemv" else 0.0
    if choice.schedule == "gemv":  # each step's tile is asked for a step ahead
        busy = arithmetic / (programs * steps) * processors * on_processor
        turns = (steps - 1) // 2 if words else steps - 1  # two tiles are under way at a time
        one = latency + turns * max(latency, 2 * busy if words else busy) + (WORDS_EXPOSED if words else EXPOSED) * busy
        one += EXCHANGE if words and choice.num_warps > 1 else 0.0
        if not work.across:
            spread = 1 + (WORD_SPREAD if words else SPREAD) * math.log2(choice.block_n)
    else:
        # What is waited for (products of integers, and of weights that are converted and stored) is over before the next copies are begun.
        waited = int8 or (work.converted(choice) and choice.schedule == "tiled")
        busy = arithmetic / (programs * steps) * processors if waited else 0.0
        each = (latency + busy) / max(choice.num_stages - 1, 1)
        one = latency + steps * (each + fit.step if in_blocks else max(each, fit.step))
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


def _fit(choice: Choice, int8: bool) -> Fit:
    return WORDS if int8 and choice.schedule == "gemv" else FITS[choice.schedule]


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
    if work.converted(choice):  # one after the other in each warp
        products += elements * CONVERTED[choice.schedule] / lanes
    return products + rows


def _matrix_rate(work: LinearWork, choice: Choice, int8: bool, device: Device) -> float:
    if work.wide and not int8:
        return device.vector * 0.5
    rate = device.matrix[2] * (2 if int8 else 1)
    if work.in_blocks(choice) and device.capability >= 90:
        return rate
    if choice.schedule == "skinny":
        if choice.block_n < 64 or choice.num_warps % 4 or device.capability < 90:
            return rate * SHORT
        short = choice.block_m * (2 if work.beside(choice) else 1)
        return rate * max(TALL, MANY * short / (short + HALF_ROWS))
    area = choice.block_m * choice.block_n * work.accumulators
    rate *= TILED * area / (area + HALF_AREA) * (1.0 if work.bare else COMPUTED)
    return rate if choice.block_m >= 64 else rate * SHORT
