"""What a program of a linear's kernel takes of a processor: shared memory, registers, and how many programs run there at a time."""

from __future__ import annotations

import math

from .devices import Device
from .kernel import Choice
from .linear_fit import FITS
from .linear_work import LinearWork
from .word_cost import QUARTERS, word_registers

REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of one processor
CROWDED = 0.7  # further registers for each sum where an epilogue works on several parts
AS_DIGITS = 96  # registers beside sums of integers, whatever the schedule: compiled kernels have 70 to 115
BESIDE, LONG = 40, 12  # and where both digits are one operand of programs that share no sum; more of steps of 128 elements: as compiled
MEETING = 2  # and for each program of those that share a sum, whose loads are unrolled
CONVERTED_REGISTERS = 0.65  # of each int8 weight that a thread converts in a step: its byte, and what it becomes


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
    bytes_of_tiles = together * choice.block_k * (max(choice.num_stages, 1) + (work.peel(choice) == "first"))
    if work.converted(choice) and choice.schedule == "tiled":
        # Weights that are converted have a tile less under way; on their way to the matrix units they are stored once more.
        tile = choice.block_n * choice.block_k
        bytes_of_tiles += max(2 * tile - tile * max(cut.weight_bytes for cut in work.cuts), 0)
    return bytes_of_tiles


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
    stepwise = 1 if work.group else 0  # sums beside the products of one step, which a scale multiplies
    if work.as_int8(choice):  # an epilogue finds digits joined
        meeting = MEETING * choice.split if choice.split > 1 else 0
        least = AS_DIGITS if choice.split > 1 or not work.beside(choice) else BESIDE + LONG if choice.block_k >= 128 else BESIDE
        return int(least + sums * max(max(choice.digits, 1) + stepwise, 1 + (CROWDED if work.crowded else 0.0))) + meeting + held
    if work.converted(choice):
        held += int(CONVERTED_REGISTERS * work.accumulators * choice.block_n * choice.block_k / threads + stepwise * sums)
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
