"""What the time of a linear over words depends on beside what `linear_cost` knows of every schedule: counted in kernels, not fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kernel import Choice
from .words import WORD

if TYPE_CHECKING:
    from .linear_work import LinearWork

# Slots of the vector units for a product of words, which go at half the rate; for each word beside its products (its share of loads,
# addresses and moves), and where its scale is a group's (a load, a conversion and a product for four of them). All passes a processor's
# first cache at 128 bytes a cycle, as many as it has lanes.
PRODUCT, BESIDE, SCALE = 2, 5, 4
# Registers of a thread beside its tiles, sums and digits, in a loop and where one step covers a row, and the share of the sums that there
# is beside the tiles.
LOOP_REGISTERS, STRAIGHT_REGISTERS, STRAIGHT_SUMS = 24, 16, 0.25
QUARTERS = 4  # of a processor, each with registers of its own for the warps that it is given
# Seconds from one program to the next, of a whole device: 128,256 of a row of 4 KB each took 160.6 us on an H200, where memory takes 120. A
# program has that little to read, its digits are twice as much, and each starts, sums over its threads and ends.
LAUNCHED = 1.15e-9
EXCHANGE = 0.2e-6  # seconds of a program that sums over several warps: 6 to 12 stores, barriers and loads of shared memory, 30 cycles each
# By which memory is slower for each doubling of the rows that a program reads side by side: of a head in bf16, two and four rows lost
# nothing to one, of smaller weights 2 %.
WORD_SPREAD = 0.02


def word_registers(work: LinearWork, choice: Choice) -> int:
    """About how many registers a thread needs: the digits and two tiles of each weight, a sum a digit for four words, addresses and results
    a column. Where one step covers what a program sums, it holds one tile, whose words are gone as most of their sums come."""
    along = choice.block_k / (32 * choice.num_warps * WORD)  # words of a row that a thread has
    digits, columns = choice.digits * choice.block_m, choice.block_n * work.accumulators
    sums = along * columns * choice.block_m * (1 if work.group else choice.digits) / 4
    if choice.block_k >= work.inner / choice.split:
        return int(STRAIGHT_REGISTERS + along * (columns + digits) + sums * (1.0 if work.crowded else STRAIGHT_SUMS))
    return int(LOOP_REGISTERS + columns * (3 + choice.block_m) + along * (2 * columns + digits) + sums)


def word_slots(work: LinearWork, choice: Choice) -> int:
    """Slots of the vector units for each word of a weight."""
    scaled = SCALE if work.group and work.group % choice.block_k else 0
    return PRODUCT * choice.digits * choice.block_m + BESIDE + scaled
