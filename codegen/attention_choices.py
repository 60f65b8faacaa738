"""The blocks, warps and stages that are worth trying for an attention region, best first by the model.

What is listed are tiles that a program can hold in its registers and its processor's shared memory. The order is `attention_cost`'s. A
mask is scanned wherever keys that no row sees could cost more than the scan: what is live of a cache is not known, and a choice that was
measured on a full one must not be slow on one that is nearly empty.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .attention_cost import (
    AttentionWork,
    attention_seconds,
    blocks_of,
    matrix,
    programs_of,
    registers,
    shared_bytes,
    widths,
)
from .attention_scan import queries_of_block
from .attention_tiles import LEAST_OF_A_PRODUCT
from .devices import Device
from .kernel import Choice
from .roofline import power_of_two

MOST = 36  # candidates that are handed out
MOST_OF_ONE, ALIKE = 12, 3  # of them with the same programs: schedule, rows and split; with the same tile besides
# The most rows of a key head for which its keys are spread over programs, of one block of them, and the queries from which on they need
# not be.
DECODE_ROWS, DECODE_BLOCK, MANY = 128, 64, 16
VECTOR_ROWS, VECTOR_ROWS_WIDE = 4, 8  # and for which matrix units may be left out; the second: fp32, where there are none
REGISTERS_OF_A_THREAD = {False: 160, True: 224}  # as estimated, by whether matrix units take operands from shared memory
PROGRAMS = 8  # a processor, that share keys, at most
BESIDE = 8  # scores that a thread holds, where other tensors are read beside them
SCRATCH = 8 << 10  # bytes of shared memory left for reductions and changes of layout
CHEAP = 3 << 20  # bytes of keys and values that are read in the time of a scan
SHORT = 256  # keys whose hidden ones are not worth a scan beside many queries
LOOKED_AT = 32  # elements of a mask that a thread looks at in one step of a scan
# fp32 products come out of registers: few of many tiles fit. (block_m, keys a step, warps).
TILES_WIDE = ((16, 32, 4), (16, 32, 8), (32, 32, 8), (32, 32, 4), (16, 16, 4), (16, 16, 8))
# Times its channels that a head may be padded to in one part; channels of a last part that are too few for several warps.
WASTE, NARROW = 1.2, 24


@functools.lru_cache(maxsize=512)
def attention_candidates(work: AttentionWork, queries: int | None, device: Device) -> tuple[Choice, ...]:
    """Choices for at most `queries` queries (None: any number), best first; never empty. `work` is that of a typical number."""
    found: list[Choice] = []
    if queries is not None and queries * work.group <= DECODE_ROWS:
        found += _few(work, queries, device)
    if queries is None or queries >= MANY or not found:
        found += _many(work, queries, device)
    found = found or [Choice("attention", queries, 16, 16, 1, 1, 8, 1)]
    timed = sorted((attention_seconds(work, choice, device), -choice.block_n, number) for number, choice in enumerate(found))
    kept: list[Choice] = []
    alike: Counter[tuple[object, ...]] = Counter()
    for _, _, number in timed:
        choice = found[number]
        tile = (choice.schedule, choice.block_m, choice.split, choice.block_n)
        alike[tile] += 1
        alike[tile[:3]] += 1
        if alike[tile] <= ALIKE and alike[tile[:3]] <= MOST_OF_ONE and len(kept) < MOST:
            kept.append(choice)
    return tuple(kept)


def _parts(work: AttentionWork, block_m: int, few: bool, device: Device) -> int:
    """Channels that are multiplied at once: 1 (all) where a power of two wastes little, else the next lower one, if products of both sizes
    lie alike in registers: without matrix units, with those that take 64 rows, and for one tile of rows if no part is too narrow for the
    warps that share it."""
    least = LEAST_OF_A_PRODUCT if block_m >= LEAST_OF_A_PRODUCT else 1
    widest = max(work.head_size, work.value_size)
    part = power_of_two(widest) // 2
    if power_of_two(widest) <= WASTE * widest or part < least:
        return 1
    if least == 1 or (block_m >= 64 and device.capability >= 90):
        return part
    narrow = any(0 < size % part < NARROW for size in (work.head_size, work.value_size))
    return part if few and block_m == LEAST_OF_A_PRODUCT and not narrow else 1


def _scans(work: AttentionWork, keys: int, height: int, warps: int, may_skip: bool) -> Iterator[int]:
    """Keys a step of the scan, for a program that looks at `keys` of them in `height` rows of the mask; 1: none."""
    if work.mask == "":
        yield 1
        return
    yield max(min(power_of_two(keys), power_of_two(LOOKED_AT * 32 * warps // height)), 16)
    if may_skip:
        yield 1


def _few(work: AttentionWork, queries: int, device: Device) -> Iterator[Choice]:
    rows = queries * work.group
    heights = {min(max(power_of_two(rows), LEAST_OF_A_PRODUCT), DECODE_BLOCK)}
    if rows <= (VECTOR_ROWS_WIDE if work.itemsize == 4 else VECTOR_ROWS):
        heights.add(power_of_two(rows))
    cheap = work.batch * work.kv_heads * work.keys * work.kv_bytes <= CHEAP
    for block_m, block_n, warps, stages, split in itertools.product(
        sorted(heights), (16, 32, 64, 128, 256), (4, 8), (1, 2, 3, 4), (1, 2, 4, 8, 16, 32, 64)
    ):
        choice = Choice("attention_decode", queries, block_m, block_n, _parts(work, block_m, True, device), 1, warps, stages, split)
        blocks = blocks_of(work, choice)
        if matrix(choice) and (block_n < 32 or (choice.block_k > 1 and block_n > 128)):
            continue
        if split > 1 and ((split - 1) * block_n >= work.keys or programs_of(work, choice) > PROGRAMS * device.processors):
            continue
        # A single block has no next one to load ahead; and without matrix units two stages only move what is loaded.
        if (blocks < stages and stages > 1) or (not matrix(choice) and stages == 2) or (matrix(choice) and stages == 1 and blocks > 1):
            continue
        height = 1 if not work.mask_rows else power_of_two(queries) if work.mask_rows == "q" else block_m
        for block_s in _scans(work, blocks * block_n, height, warps, cheap):
            if not _held(work, replace(choice, block_s=block_s), device):
                continue
            yield replace(choice, block_s=block_s)
            if block_s == 1 and device.dependent < device.launch:
                yield replace(choice, block_s=block_s, prefetch=power_of_two(work.kv_bytes // 2))


def _many(work: AttentionWork, queries: int | None, device: Device) -> Iterator[Choice]:
    tiles = itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8))
    for (block_m, block_n, warps), stages in itertools.product(TILES_WIDE if work.itemsize == 4 else tiles, (2, 3)):
        if block_m > max(power_of_two(work.rows if queries is None else queries * work.group), LEAST_OF_A_PRODUCT):
            continue
        if queries is None and block_m < (32 if work.beside else 64) and work.itemsize < 4:
            continue
        choice = Choice("attention", queries, block_m, block_n, _parts(work, block_m, False, device), 1, warps, stages)
        if not _held(work, choice, device):
            continue
        height = 1 if not work.mask_rows else block_m if work.mask_rows == "m" else queries_of_block(work.group, block_m, queries)
        may_skip = work.mask == "added" or work.keys <= SHORT
        for block_s in _scans(work, work.keys, height, warps, may_skip):
            yield replace(choice, block_s=block_s)


def _held(work: AttentionWork, choice: Choice, device: Device) -> bool:
    """Whether a program's tiles fit."""
    threads, (d, e) = 32 * choice.num_warps, widths(work, choice)
    if shared_bytes(work, choice, device) + SCRATCH > device.shared:
        return False
    if work.beside and choice.block_m * choice.block_n > BESIDE * threads:
        return False
    if not matrix(choice):
        # Every thread loads 16 bytes at least.
        loaded = choice.block_n * (d + e) / threads
        return registers(work, choice) <= REGISTERS_OF_A_THREAD[True] and loaded <= 128 and loaded * work.itemsize >= 32
    if work.itemsize == 4:
        widest = max(d, e)
        return (
            choice.block_m <= 32
            and choice.block_n <= 32
            and choice.block_m * widest <= 16 * 128
            and (choice.block_m + choice.block_n) * widest <= choice.num_warps * 1024
        )
    return registers(work, choice) <= REGISTERS_OF_A_THREAD[choice.block_m >= 64 and device.capability >= 90]
