"""A Triton kernel for what follows the logits of a step: the largest one's token, and everything that a state does with it, in one launch.

Small operators one by one would take as long as a tenth of a small model's step. `State.advance` says in torch what the kernel computes.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**63))


@triton.jit
def advance(
    scores, chosen, best, arrived, ids, token, position, finished, ends, pad, board, count, made, length, fed,
    vocabulary, row_stride, rows, slots,
    PICKS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """With PICKS: rows * PARTS programs, each looking at BLOCK of a row's `scores` [rows, vocabulary]; else one, and `chosen` [rows] holds
    the tokens. The program that arrives last does the rest. `best` [rows] and `arrived` [1] are left as they were found: LEAST and 0."""
    if PICKS:
        row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
        column = part * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(scores + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), tl.where(x == 0, 0.0, x))
        bits = x.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
        # The first of equal ones wins.
        key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
        tl.atomic_max(best + row, tl.max(tl.where(inside, key, LEAST), 0), sem="acq_rel")
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        r = tl.arange(0, ROWS)
        live = r < rows
        if PICKS:
            picked = 0x7FFFFFFF - (tl.load(best + r, mask=live, other=0, cache_modifier=".cg") & 0xFFFFFFFF)
        else:
            picked = tl.load(chosen + r, mask=live, other=0)
        at, step, held, more = tl.load(count), tl.load(made), tl.load(length), tl.load(fed)
        place = tl.load(position + r, mask=live, other=0)
        over = tl.load(finished + r, mask=live, other=1) != 0
        if ENDS > 0:
            picked = tl.where(over, tl.load(pad), picked)
            for number in tl.static_range(ENDS):
                over = over | (picked == tl.load(ends + number))
        over = over | (r >= rows)
        done = tl.min(over.to(tl.int32), 0)
        tl.debug_barrier()  # every warp has read what is now written
        tl.store(finished + r, over.to(tl.int8), mask=live)
        tl.store(ids + r.to(tl.int64) * slots + at, picked, mask=live)
        tl.store(token + r, picked, mask=live)
        tl.store(position + r, place + 1, mask=live)
        tl.store(board + step * (rows + 1) + r, picked, mask=live)
        tl.store(board + step * (rows + 1) + rows, done.to(tl.int64))
        tl.store(count, at + 1)
        tl.store(made, step + 1)
        tl.store(length, held + more)
        if PICKS:
            tl.store(best + r, tl.full([ROWS], LEAST, tl.int64), mask=live)
        tl.store(arrived, 0)
