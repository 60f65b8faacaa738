"""The blocks, warps and stages that are worth trying for a linear region, best first by the model.

What is listed are tiles that a program can hold in its registers and its processor's shared memory, and that keep whole groups of columns
where an epilogue needs them. The order is `linear_cost`'s, but that none whose first step is peeled, or whose layer norm comes behind the
product, comes first, and so is taken untried: on an H200 most gained 2 to 25 %, but some lost as much (a layer norm over 1,600 elements,
tiles of int8 weights of which two programs would fit on a processor), and the model does not tell which.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .devices import Device
from .kernel import Choice
from .linear_cost import LinearWork, linear_seconds, programs_of, registers, shared_bytes
from .quantised import LEAST_INT8
from .roofline import power_of_two

MOST = 36  # candidates that are handed out
MOST_OF_ONE, ALIKE = 24, 3  # of them of one schedule; with the same tile
PEELED = 4  # copies of them whose first step is peeled, the best
BEHIND = 4  # and whose layer norm comes behind the product
ALIKE_WORDS = 1  # and so over words, where memory decides, and the model tells tiles apart by a percent or two
GEMV_ROWS, SKINNY_ROWS = 4, 64  # the most rows of these schedules
DIGIT_ROWS = 128  # and of a block of skinny over integers, whose programs can share sums: of few columns there are few tiles
APART_ROWS = 16  # from which skinny's prologue is tried as a kernel of its own
LEAST_BOTH, MOST_BOTH = 128, 256  # rows of int8 in such a block: with two digits, twice its rows
SHORTEST = 8  # rows of a skinny tile at least: the matrix units pad fewer
LEAST_STEP = 16  # contracted elements of a step on the matrix units at least
LONG_STEP = 128  # and of tiled's at most, but of integers', since each of their products is waited for
# fp32 sums that a thread holds, by what else its registers are for: an epilogue with several parts or norms. The last two: on units that
# keep sums apart from operands, where rows are multiplied as they are loaded.
SUMS, SUMS_CROWDED, SUMS_BARE, SUMS_BARE_CROWDED = 64, 32, 128, 64
GEMV_SUMS, GEMV_SUMS_ROWS, GEMV_SUMS_WIDE = 64, 32, 16  # of one row, of several, in fp32
WORD_MOST = 200  # registers of a thread over words
HELD_MOST, HELD_DIGITS = 232, 208  # and where a step's tiles are held in them; beside the sums of two digits
COMPUTED = 16  # elements of the rows that a thread computes for one step of `tiled`, where they are not multiplied as they are loaded
LOADED = 16  # bytes that a thread should load at once
LINE_BYTES = 64  # bytes of a row that are cheap to read contiguously
SHARES = (1, 2, 3, 4, 5, 6, 8, 11, 16)  # of the contracted dimension
FEWEST, MOST_PROGRAMS = 0.5, 8  # programs a processor, of skinny; where they share sums, `MOST_PROGRAMS` at most
SCRATCH = 8 << 10  # bytes of shared memory left for reductions and layouts
# fp32 operands are multiplied out of registers, so few of many tiles fit: (block_m, block_n, block_k, warps, stages).
TILES_WIDE = (
    *((16, 16, 32, 4, 2), (16, 16, 64, 4, 2), (16, 32, 32, 4, 2), (16, 32, 64, 4, 2), (16, 64, 32, 4, 2)),
    *((32, 32, 32, 4, 2), (32, 64, 32, 4, 2), (64, 64, 16, 8, 2)),
)


@functools.lru_cache(maxsize=512)
def linear_candidates(work: LinearWork, rows: int | None, device: Device) -> tuple[Choice, ...]:
    """Choices for at most `rows` rows (None: any number), best first; never empty. `work` is that of a typical number of rows."""
    found: list[Choice] = []
    if rows is not None and rows <= GEMV_ROWS:
        found += _gemv(work, rows, device)
        found += _words(work, rows, device) if work.words else ()
    if work.group and _whole_step(work) < LEAST_STEP:
        # No step lies within a group, so that weights are multiplied by their scales first, in fp32, and so is everything then.
        work = replace(work, wide=True)
    if rows is not None and rows <= _skinny_rows(work) and not work.wide:
        found += _skinny(work, rows, device)
    if rows is None or rows > SKINNY_ROWS or not found:
        found += _blocks(work, rows, device)
        found += _tiled(work, rows, device)
    found = found or [_least(work, rows)]
    timed = sorted((linear_seconds(work, choice, device), -choice.block_n, number) for number, choice in enumerate(found))
    kept: list[Choice] = []
    alike: Counter[tuple[object, ...]] = Counter()
    for _, _, number in timed:
        choice = found[number]
        tile = (choice.schedule, choice.block_m, choice.block_n, choice.block_k, choice.digits, choice.apart)
        alike[tile] += 1
        alike[tile[:1]] += 1
        most = ALIKE_WORDS if choice.schedule == "gemv" and choice.digits else ALIKE
        if alike[tile] <= most and alike[tile[:1]] <= MOST_OF_ONE and len(kept) < MOST:
            kept.append(choice)
    first, *others = kept

    def seconds(choice: Choice) -> float:
        return linear_seconds(work, choice, device)

    untried = sorted((way for choice in kept for way in _peeled(work, choice, device)), key=seconds)[:PEELED]
    untried += sorted(dict.fromkeys(way for choice in kept for way in _deferred(work, choice)), key=seconds)[:BEHIND]
    return first, *(sorted([*others, *untried], key=seconds) if untried else others)


def admissible(work: LinearWork, choice: Choice, rows: int | None, device: Device, same: bool = False) -> bool:
    """Whether a choice that was made for another linear can be this one's, for at most `rows` rows (None: any number). `same`: that one had
    this one's shape on this device, so that the registers and the shared memory that it takes are known to do."""
    few = {"gemv": GEMV_ROWS, "skinny": _skinny_rows(work)}.get(choice.schedule)
    if few is not None and (rows is None or rows > min(few, choice.block_m)) and not work.in_blocks(choice):
        return False
    if choice.block_n < work.held or (choice.schedule == "skinny" and work.wide) or not (same or _fits(work, choice, device)):
        return False
    # It may have been made for a scale a row: there are no digits where scales change within a step, and no matrix units either.
    if choice.schedule in ("skinny", "tiled") and work.group and work.group % choice.block_k:
        return False
    if not same and work.peel(choice) and registers(work, choice) > HELD_MOST:
        return False
    # Sums behind the product that several steps carry were none where one step took the measured rows whole.
    if not same and work.is_deferred(choice) and registers(work, choice) > max(HELD_MOST, registers(work, replace(choice, deferred=False))):
        return False
    if choice.schedule == "gemv" and choice.digits:
        return work.words and (same or registers(work, choice) <= WORD_MOST)
    if choice.block_k * choice.split >= 2 * max(power_of_two(work.inner), 16):
        return False
    each = choice.block_m * choice.block_n * work.accumulators / (32 * choice.num_warps)
    return same or each * (choice.block_k if choice.schedule == "gemv" else 1) <= (SUMS_BARE_CROWDED if work.crowded else SUMS_BARE)


def _skinny_rows(work: LinearWork) -> int:
    """The most rows of skinny in one block."""
    return DIGIT_ROWS if work.group is not None else SKINNY_ROWS


def _whole_step(work: LinearWork) -> int:
    """The longest step of a power of two that lies within a group of scales, whichever of a row's it is."""
    return work.group & -work.group if work.group else power_of_two(work.inner)


def _steps(work: LinearWork, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `sizes` of a step within which no scale changes; a shorter one, where groups are shorter than all."""
    whole = _whole_step(work)
    if not work.group or whole < LEAST_STEP:
        return sizes
    return tuple(size for size in sizes if size <= whole) or (whole,)


def statistics_block(work: LinearWork, block_m: int, warps: int) -> int:
    """Columns a step of the passes over rows: what keeps 32 values a thread, at most the whole row."""
    return max(min(warps * 1024 // block_m, power_of_two(work.inner), 4096), 16)


def _gemv(work: LinearWork, rows: int, device: Device) -> Iterator[Choice]:
    height, inner = power_of_two(max(rows, 1)), power_of_two(work.inner)
    line = LINE_BYTES // work.x_bytes
    most = GEMV_SUMS_WIDE if work.wide else GEMV_SUMS if height == 1 else GEMV_SUMS_ROWS
    for block_n, block_k, warps, split in itertools.product(_powers(1, 256), _powers(8, 4096), (1, 2, 4, 8), (1, 2, 4, 8)):
        if block_n < work.held or (block_n > work.held and block_n > 64) or block_k > inner or split * block_k > max(work.inner, block_k):
            continue
        # A warp reads whole runs of what lies side by side, 16 bytes a lane.
        runs = block_n >= line // 2 if work.across else block_k >= min(inner, line if work.held > 1 else 8 * line)
        elements = block_n * block_k / (32 * warps)
        loaded = elements * work.x_bytes >= LOADED or block_k == inner
        if not runs or not loaded or elements * height * work.accumulators > most:
            continue
        for digits, apart in _ways(work, rows):
            choice = Choice("gemv", rows, height, block_n, block_k, statistics_block(work, height, warps), warps, 1, split, apart=apart)
            if not digits and (split == 1 or programs_of(work, choice) <= MOST_PROGRAMS * device.processors):
                yield choice


def _words(work: LinearWork, rows: int, device: Device) -> Iterator[Choice]:
    """`gemv` over words: each thread reads 16 bytes of a row at a time, and all threads of a program the same rows, so that tiles of the
    digits lie as those of the weights."""
    height, digits = power_of_two(max(rows, 1)), 1 if work.rounded else 2
    for block_n, steps, warps, split in itertools.product(_powers(work.held, 16), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        block_k = steps * LOADED * 32 * warps
        share = -(-work.inner // split)
        if block_k >= 2 * max(power_of_two(share), 512) or -(-share // block_k) * block_k * split > 1.35 * work.inner + 512:
            continue
        choice = Choice(
            "gemv", rows, height, block_n, block_k, statistics_block(work, height, warps), warps, 1, split, digits=digits, apart=True
        )
        if registers(work, choice) > WORD_MOST or (split > 1 and programs_of(work, choice) > MOST_PROGRAMS * device.processors):
            continue
        yield choice


def _ways(work: LinearWork, rows: int | None) -> list[tuple[int, bool]]:
    """(digits, whether the prologue is a kernel of its own) that are worth trying."""
    found = [(0, False)]
    if not work.bare and (rows is None or rows == 1 or rows >= APART_ROWS):
        found.append((0, True))
    if work.group is not None and not work.rounded and not work.wide:  # two digits are 16 bits, which is too coarse for fp32
        found.append((2, False))
    return found


def _skinny(work: LinearWork, rows: int, device: Device) -> Iterator[Choice]:
    height = max(power_of_two(rows), SHORTEST)
    for block_n, block_k, warps, stages, split in itertools.product(
        (32, 64, 128, 256), _steps(work, (64, 128, 256, 512)), (4, 8), (3, 4), SHARES
    ):
        if block_n < work.held or (block_n > 128 and work.held <= 128) or (warps == 8 and block_n < 64):
            continue
        share = -(-work.inner // split)
        steps = -(-share // block_k)
        if (block_k > 64 and block_k > share) or (split > 1 and steps < 2) or steps * block_k * split > 1.15 * work.inner + 64:
            continue
        if work.accumulators * block_n * height > 32 * warps * (SUMS_CROWDED if work.crowded else SUMS):
            continue
        block_s = statistics_block(work, height, warps)
        for digits, apart in _ways(work, rows):
            choice = Choice("skinny", rows, height, block_n, block_k, block_s, warps, stages, split, 0, digits, apart)
            each = programs_of(work, choice) / device.processors
            if rows > SKINNY_ROWS and not work.as_int8(choice):
                continue
            if _fits(work, choice, device) and (split == 1 or FEWEST < each <= MOST_PROGRAMS) and (not digits or _as_digits(work, choice)):
                yield choice


def _blocks(work: LinearWork, rows: int | None, device: Device) -> Iterator[Choice]:
    """Skinny over integers in blocks of rows. What products of integers wait for on sm_90, another program of the processor fills."""
    if work.group is None or work.wide or device.capability < 90:
        return
    for block_m, block_n, block_k, warps, stages in itertools.product((64, 128), (32, 64, 128), _steps(work, (64, 128)), (4, 8), (3, 4)):
        both = block_m * (1 if work.rounded else 2)
        sums = work.accumulators * block_n * both / (32 * warps)
        if block_n < work.held or not LEAST_BOTH <= both <= MOST_BOTH or not SUMS_CROWDED <= sums <= SUMS_BARE:
            continue
        choice = Choice(
            "skinny",
            rows,
            block_m,
            block_n,
            block_k,
            statistics_block(work, block_m, warps),
            warps,
            stages,
            digits=0 if work.rounded else 2,
        )
        if work.in_blocks(choice) and _as_digits(work, choice) and _fits(work, choice, device):
            yield choice


def _peeled(work: LinearWork, choice: Choice, device: Device) -> list[Choice]:
    """A skinny choice with its first step peeled, where a kernel can start before the end of another, and a thread can hold the tiles."""
    if device.capability < 90:
        return []
    ways = (replace(choice, peel="last"), replace(choice, peel="first"))
    most = HELD_DIGITS if work.as_int8(choice) else HELD_MOST
    return [way for way in ways if work.peel(way) == way.peel and registers(work, way) <= most and _fits(work, way, device)]


def _deferred(work: LinearWork, choice: Choice) -> list[Choice]:
    """A gemv choice with the layer norm behind the product, where a thread can hold what that needs."""
    way = replace(choice, deferred=True, apart=False)
    return [way] if work.behind and work.is_deferred(way) and registers(work, way) <= HELD_MOST else []


def _tiled(work: LinearWork, rows: int | None, device: Device) -> Iterator[Choice]:
    inner = max(power_of_two(work.inner), 16)
    tiles: Iterator[tuple[int, ...]] = itertools.product(
        (16, 32, 64, 128), (32, 64, 128, 256), _steps(work, (32, 64, 128, 256)), (4, 8), (2, 3, 4)
    )
    for block_m, block_n, block_k, warps, stages in TILES_WIDE if work.wide else tiles:
        if rows is not None and block_m > max(power_of_two(rows), 16):
            continue
        if rows is None and block_m < (32 if work.wide else 64) and work.held == 1:
            continue
        if work.wide:
            while block_n > 16 and work.accumulators * block_m * block_n > 32 * warps * _sums(work, False, device):
                block_n //= 2
            block_n = max(block_n, work.held)
        sums = work.accumulators * block_m * block_n
        if block_n < work.held or (not work.wide and sums < 32 * warps * 4):
            continue
        block_k, block_s = min(block_k, inner), statistics_block(work, block_m, warps)
        for digits, apart in _ways(work, rows):
            choice = Choice("tiled", rows, block_m, block_n, block_k, block_s, warps, stages, digits=digits, apart=apart)
            bare = work.bare or apart or work.as_int8(choice)
            computed = not bare and not work.wide and block_m * block_k > 32 * warps * COMPUTED
            if computed or sums > 32 * warps * _sums(work, bare, device) or (block_k > LONG_STEP and not work.as_int8(choice)):
                continue
            if _fits(work, choice, device) and (not digits or _as_digits(work, choice)):
                yield choice


def _as_digits(work: LinearWork, choice: Choice) -> bool:
    """Whether digits meet the weights on the matrix units."""
    return work.as_int8(choice) and choice.block_k >= LEAST_INT8


def _sums(work: LinearWork, bare: bool, device: Device) -> int:
    """The most sums that a thread of `tiled` should hold."""
    if work.wide:
        return (SUMS_CROWDED if work.crowded else SUMS) // 4
    if bare and device.capability >= 90:
        return SUMS_BARE_CROWDED if work.crowded else SUMS if work.joined else SUMS_BARE
    return SUMS_CROWDED if work.crowded else SUMS


def _least(work: LinearWork, rows: int | None) -> Choice:
    """Where a group is wider than any block, or more sums stand side by side than a program should hold."""
    if rows is not None and rows <= GEMV_ROWS:
        height = power_of_two(max(rows, 1))
        return Choice("gemv", rows, height, max(work.held, 4), 8, statistics_block(work, height, 8), 8, 1)
    inner = max(power_of_two(work.inner), 16)
    return Choice("tiled", rows, 16, max(work.held, 16), min(*_steps(work, (32,)), inner), statistics_block(work, 16, 8), 8, 2)


def _fits(work: LinearWork, choice: Choice, device: Device) -> bool:
    """Whether a program's tiles fit; with int8 weights, whose sums and conversions take many registers, whether these do, too."""
    room = work.group is None or choice.schedule == "gemv" or registers(work, choice) <= HELD_MOST
    return room and shared_bytes(work, choice) + SCRATCH <= device.shared


def _powers(least: int, most: int) -> list[int]:
    return [1 << exponent for exponent in range((least - 1).bit_length(), most.bit_length())]
