"""The time of an attention region's kernel, in closed form.

With few queries a kernel is bound by reading keys and values: by memory at its full rate, by the programs' own pace, which is the bytes
that they have asked for and not yet got, over the latency of memory, or by the processor with the most programs. With many, by the matrix
units and the program with the most keys. Around that come costs a kernel has once: the gap to the kernel before, the first tile, the scan
of a mask, and the meeting of programs that share keys. How much of a cache is live is not known: all of it is taken to be, unless whoever
asks says otherwise. Then what programs know of each other (`Choice.live`) shows: fewer of them meet, or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
import torch
from dsi.ir import tile as t

from .attention_scan import queries_of_block, rows_of_mask, scannable
from .attention_tiles import LEAST_OF_A_PRODUCT, cut
from .devices import Device
from .kernel import Choice
from .layout import Interner
from .roofline import evaluate, traffic

# Seconds of a kernel's first and last instructions, and what the way through the matrix units adds to them.
START, END, MATRIX = 0.4e-6, 0.4e-6, 0.3e-6
SCAN, SCAN_STEP = 0.6e-6, 0.15e-6  # the scan of a mask: its first step, from the last-level cache to a bound; each further one
# What programs learn of each other beside their loads; what values cost that are asked for behind keys, from the last-level cache; and
# three exchanges between warps instead of one. Not measured: a reduction in a program, an access to that cache, and what the barriers take.
SIGHT, LATE, EXCHANGES = 0.1e-6, 0.2e-6, 0.2e-6
ISSUE = 0.25e-6  # what each further four warps issue besides products, under `by_warp`: 450 instructions (counted, not measured)
MEETING, PART = 1.6e-6, 0.04e-6  # programs that share keys: storing a part, counting arrivals, reading the first; each further one
# The least that one block of keys takes, from scores to sums; and on top of it for each element of keys and values that a thread holds.
STEP, STEP_ELEMENT = 0.2e-6, 1.6e-9
STEP_VECTOR, STEP_OPERATION = 0.1e-6, 1.1e-9  # the same without matrix units, the second for each operation of a thread
# Vector operations for an element of keys or values: its conversion; and for each row that it is multiplied with. The share of the vector
# units' rate that they reach.
CONVERT, MULTIPLY, VECTOR_SHARE = 1.0, 2.0, 0.5
# The share of the matrix units' rate between softmax and exchanges of operands, the tile at which half of it is reached, and what is left
# of it below 64 rows on units that want as many.
MATRIX_SHARE, HALF_TILE, SHORT = 0.6, 64 * 32, 0.6
SPREAD = 0.5  # and where units that want 64 rows of four warps are given fewer: 34 us instead of 24 for a prompt of 512 tokens
HALF_TILE_WIDE = 16 * 16  # the same for fp32 products
HIDDEN = 1.25  # times as long does a block of keys take in which some may be hidden
RESIDENT = 0.6  # of memory's latency, from the last-level cache
OVERDRAW = 1.6  # times its even share of the bandwidth that one processor can draw
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of one processor
ALIGNED = 16  # bytes that are loaded at once
SHARPNESS = 5  # how hard the slowest of several limits decides; the larger, the nearer to a plain maximum


@dataclass(frozen=True)
class AttentionWork:
    """What the time of an attention region depends on at a number of queries, worked out once for all choices. `mask` is "", "bool" or
    "added", `mask_rows` as in `attention_scan.rows_of_mask`; `reach` bounds the keys that a query sees."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    known: bool  # the number of keys, when a kernel is made
    head_size: int
    value_size: int
    itemsize: int
    moved: float  # bytes that memory must read and write at least
    causal: bool
    window: int
    mask: str
    mask_rows: str
    beside: bool  # tensors are read row by key beside the scores, in more than whole aligned runs of bytes
    one_query: bool
    live: int = 0  # keys, from some first one on, that the mask shows; 0: all, as far as is known

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of one key head."""
        return self.queries * self.group

    @property
    def kv_bytes(self) -> int:
        """Bytes of one key and its value."""
        return (self.head_size + self.value_size) * self.itemsize


def attention_work(spec: t.KernelSpec, queries: int, assumed: dict[sympy.Symbol, int]) -> AttentionWork:
    """The work of an attention region at a number of queries; `assumed` are the values of its size symbols."""
    plan = spec.plan
    assert isinstance(plan, t.AttentionPlan)
    seen = scannable(plan)
    return AttentionWork(
        int(evaluate(plan.batch, assumed)),
        plan.heads,
        plan.kv_heads,
        max(queries, 1),
        max(int(evaluate(plan.keys, assumed)), 1),
        bool(sympy.sympify(plan.keys).is_Integer),
        plan.head_size,
        plan.value_size,
        plan.dtype.itemsize,
        evaluate(traffic(spec), assumed),
        plan.causal,
        plan.window,
        "" if not seen or plan.mask is None else "bool" if plan.mask.dtype == torch.bool else "added",
        rows_of_mask(plan, queries == 1) if seen else "",
        _beside(spec, queries == 1),
        queries == 1,
    )


def _beside(spec: t.KernelSpec, one_query: bool) -> bool:
    plan = spec.plan
    assert isinstance(plan, t.AttentionPlan)
    interner = Interner()
    for expr in t.parts_of(*(e for e in (plan.mask, plan.bias) if e is not None)):
        interner.number(expr)
        symbols = interner.symbols(expr)
        if not isinstance(expr, t.Load) or t.J not in symbols or not (t.H in symbols or (t.S in symbols and not one_query)):
            continue
        *outer, last = (sympy.sympify(stride) for stride in spec.inputs[expr.input].strides)
        aligned = last == 1 and all(stride.is_Integer and int(stride) % ALIGNED == 0 for stride in outer)
        if expr.dtype.itemsize > 1 or not aligned:
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------- resources


def matrix(choice: Choice) -> bool:
    """Whether products are made by matrix units."""
    return choice.schedule == "attention" or choice.block_m >= LEAST_OF_A_PRODUCT


def widths(work: AttentionWork, choice: Choice) -> tuple[int, int]:
    """Channels of a key and of a value as they are held, with padding."""
    least = LEAST_OF_A_PRODUCT if matrix(choice) else 1
    together = choice.block_k if choice.block_k >= max(least, 2) else 1 << 30
    d, e = (sum(part.width for part in cut("d", size, together, least)) for size in (work.head_size, work.value_size))
    return d, e


def shared_bytes(work: AttentionWork, choice: Choice, device: Device) -> int:
    """About how many bytes of shared memory a program needs: queries, and the blocks of keys and values under way."""
    d, e = widths(work, choice)
    tile = choice.block_n * (d + e) * work.itemsize
    if not matrix(choice):
        return tile * (choice.num_stages - 1)
    tall = choice.block_m >= 64 and choice.num_warps % 4 == 0 and device.capability >= 90
    # Operands that the matrix units read themselves stay until they are done.
    under_way = choice.num_stages if tall else max(choice.num_stages - 1, 1)
    return tile * under_way + choice.block_m * d * work.itemsize + choice.block_m * choice.block_n * 2


def registers(work: AttentionWork, choice: Choice) -> int:
    """About how many registers a thread needs."""
    d, e = widths(work, choice)
    threads = 32 * choice.num_warps
    if matrix(choice):
        # Without a stage that is loaded ahead, keys and values come through registers.
        loaded = choice.block_n * (d + e) * work.itemsize / 4 / threads if choice.num_stages == 1 else 0.0
        masked = 0.25 if work.mask else 0.0
        return int(64 + choice.block_m * (e + (1.5 + masked) * choice.block_n) / threads + loaded)
    loaded = choice.block_n * (d + e) / threads  # held in fp32 while it is multiplied
    # A single block is summed at once. Products of several rows are kept until they are.
    alone = work.known and blocks_of(work, choice) == 1 and (choice.block_s == 1 or work.mask == "")
    sums = 0.0 if alone else choice.block_m * choice.block_n * e / threads
    products = 0.0 if choice.block_m == 1 else choice.block_m * loaded / 2
    return int(40 + 1.5 * (sums + products) + 0.75 * loaded)


def programs_of(work: AttentionWork, choice: Choice) -> int:
    """Programs of a launch."""
    return work.batch * work.kv_heads * math.ceil(work.rows / choice.block_m) * choice.split


def blocks_of(work: AttentionWork, choice: Choice) -> int:
    """Blocks of keys that one of the programs that share them has at most."""
    return math.ceil(math.ceil(work.keys / at_once(choice)) / choice.split)


def at_once(choice: Choice) -> int:
    """Keys that a program takes at once."""
    return choice.block_n * choice.chunks


# ------------------------------------------------------------------------------------------------------------------------- time


def attention_seconds(work: AttentionWork, choice: Choice, device: Device) -> float:
    """Seconds of one launch behind another kernel, the gap between them included."""
    return (_decode if choice.schedule == "attention_decode" else _prefill)(work, choice, device)


def _limits(*limits: float) -> float:
    return sum(limit**SHARPNESS for limit in limits) ** (1 / SHARPNESS)


def _resident(work: AttentionWork, choice: Choice, device: Device) -> int:
    threads, shared = 32 * choice.num_warps, shared_bytes(work, choice, device)
    by_shared = device.shared // shared if shared else PROGRAMS
    return max(1, min(REGISTERS // (registers(work, choice) * threads), THREADS // threads, by_shared, PROGRAMS))


def _parts(work: AttentionWork, choice: Choice) -> tuple[int, int]:
    """Programs that meet for a block of rows, and blocks of keys that each of them visits at most."""
    blocks = blocks_of(work, choice)
    live = math.ceil(min(work.live or work.keys, work.keys) / at_once(choice))
    if work.mask == "" or (choice.block_s == 1 and choice.live != "seen"):
        return choice.split, blocks
    parts = max(min(choice.split, live), 1) if choice.live and choice.block_s > 1 else choice.split
    return parts, min(max(math.ceil(live / choice.split), 1), blocks)


def _decode(work: AttentionWork, choice: Choice, device: Device) -> float:
    units, block = matrix(choice), at_once(choice)
    parts, blocks = _parts(work, choice)
    programs = programs_of(work, choice) // choice.split * parts
    d, e = widths(work, choice)
    alone = blocks_of(work, choice) == 1 and (choice.live in ("parts", "seen") or choice.block_s == 1)  # one block, whatever the mask
    scanned = work.mask != "" and choice.block_s > 1 and not (choice.live and alone)
    waves = math.ceil(programs / (device.processors * _resident(work, choice, device)))
    each = math.ceil(programs / device.processors)
    held = block * (d + e) / (32 * choice.num_warps)
    operations = CONVERT + MULTIPLY * choice.block_m
    least = STEP + STEP_ELEMENT * held if units else STEP_VECTOR + STEP_OPERATION * held * operations
    # What is loaded a step ahead arrives meanwhile.
    step = max(device.latency / (choice.num_stages - 1), least) if choice.num_stages > 1 else device.latency + least
    # The first block is in the last-level cache if it was asked for before the wait.
    first = device.latency * (RESIDENT if choice.prefetch else 1.0)
    pace = first + (least if blocks == 1 else blocks * step)
    keys = min(block, work.live or block) if choice.live in ("seen", "dealt") else block
    read = blocks * keys * work.kv_bytes
    if units:
        rate = device.matrix.get(work.itemsize, device.vector) if work.itemsize < 4 else device.vector / 2
        arithmetic = each * blocks * 2.0 * choice.block_m * block * (d + e) / (rate / device.processors / 4)
    else:
        arithmetic = each * blocks * block * (d + e) * operations / (device.vector / 2 * VECTOR_SHARE / device.processors)
    draw = OVERDRAW * device.bandwidth / device.processors
    busy = _limits(work.moved / device.bandwidth, waves * pace, each * read / draw, arithmetic)
    once = START + END + device.dependent + (MATRIX if units else 0.0)
    if scanned:
        once += SCAN + SCAN_STEP * (math.ceil(blocks * block / choice.block_s) - 1)
    elif choice.live and work.mask:
        once += SIGHT + (LATE if choice.live == "seen" else 0.0)
    if not units and blocks_of(work, choice) == 1:
        once -= (LATE if choice.early else 0.0) + (EXCHANGES - ISSUE * (choice.num_warps / 4 - 1) if choice.by_warp else 0.0)
    if choice.overlaps:
        once -= device.launch - device.dependent  # what was measured starts behind the kernel before it
    if parts > 1:
        once += MEETING + PART * parts
        once += 2 * 4 * programs * min(choice.block_m, work.rows) * (e + 2) / device.cache
    return busy + once


def _prefill(work: AttentionWork, choice: Choice, device: Device) -> float:
    d, e = widths(work, choice)
    blocks = math.ceil(work.rows / choice.block_m)
    programs = work.batch * work.kv_heads * blocks
    scanned = work.mask != "" and choice.block_s > 1
    # A mask whose rows differ is taken to hide the keys behind a query, as causal masks do; the last query sees all.
    diagonal = work.causal or (work.mask_rows != "" and scanned)
    before = 0 if work.causal else max(work.keys - work.queries, 0)
    most = math.ceil(work.keys / choice.block_n)
    visits, longest = 0.0, 0.0
    for block in range(blocks):
        last = (block * choice.block_m + choice.block_m - 1) // work.group
        first = block * choice.block_m // work.group
        end = min(most, math.ceil((before + last + 1) / choice.block_n)) if diagonal else most
        start = max(first - work.window + 1, 0) // choice.block_n if work.window else 0
        edges = end if work.mask and not scanned else math.ceil((last - first + 1) / choice.block_n) if diagonal else 0
        here = max(end - start, 1) + (HIDDEN - 1.0) * min(edges, max(end - start, 1))
        visits, longest = visits + here, max(longest, here)
    together = min(_resident(work, choice, device), math.ceil(programs / device.processors))
    area = choice.block_m * choice.block_n
    if work.itemsize < 4:
        tall = choice.block_m >= 64 or device.capability < 90
        rate = device.matrix[2] * MATRIX_SHARE * (1.0 if tall else SHORT) * area / (area + HALF_TILE)
        if tall and device.capability >= 90 and 16 * choice.num_warps > choice.block_m:
            rate *= SPREAD
    else:
        rate = device.vector / 2 * area / (area + HALF_TILE_WIDE)
    rate /= device.processors
    step = 2.0 * area * (d + e) / rate
    # Programs that share a processor fill each other's gaps; one alone leaves half of them.
    alone = 1.0 if together > 1 else 1.25
    busy = _limits(
        work.batch * work.kv_heads * visits * step / device.processors * alone,
        longest * max(step * min(together, 2), STEP),
        work.moved / device.bandwidth,
    )
    once = START + END + device.dependent + MATRIX + device.latency
    if scanned:
        height = (
            choice.block_m
            if work.mask_rows == "m"
            else 1
            if not work.mask_rows
            else queries_of_block(work.group, choice.block_m, work.queries)
        )
        steps = math.ceil(work.keys / choice.block_s)
        once += SCAN + SCAN_STEP * (steps - 1) + height * work.keys * 4 / (32 * choice.num_warps) * 1e-9
    return busy + once
