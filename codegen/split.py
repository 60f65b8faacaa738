"""Several programs a block of columns: each sums a part of the contracted dimension, and the last to arrive finishes.

Partial sums go to a workspace. A program that has stored its own counts itself as arrived; the one that finds all others there adds them up
in the order of the parts, whoever was last, so that a sum has the same bits in every run, and writes the epilogue. The counters are zero
again afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from .builder import Block
from .deferred import span_of

if TYPE_CHECKING:
    from .linear import Linear
    from .products import Sums


def shares(linear: Linear) -> None:
    """Writes which part of the contracted dimension a program sums: whole steps, as even as they come."""
    assert linear.one_block, "programs share a sum of one block of rows"
    body, choice, inner = linear.builder.body, linear.choice, int(linear.span)
    span = int(span_of(inner, choice))
    linear.builder.constant("SPLIT", choice.split)
    linear.span, linear.even = sympy.Integer(span), inner == span * choice.split
    linear.k_start, linear.k_end = linear.builder.names.new("k_start"), linear.builder.names.new("k_end")
    body.line(f"{linear.k_start} = tl.program_id(2) * {span}")
    end = f"{linear.k_start} + {span}"
    body.line(f"{linear.k_end} = {end if linear.even else f'tl.minimum({end}, {inner})'}")


def combined(linear: Linear, body: Block, sums: Sums, squares: str) -> tuple[str, Block]:
    """Stores a program's partial sums; returns the condition that all have arrived, and the block under it, which starts with the sums
    added up. `squares` names the sum of squares of a deferred norm, "" where there is none."""
    builder, choice, names = linear.builder, linear.choice, linear.builder.names
    size = choice.block_n * (1 if linear.single else choice.block_m)
    if not linear.partials:
        each = choice.split * linear.most_sums * size
        linear.partials = builder.workspace("partial_sums", linear.programs * each, "float32")
        if squares:
            linear.partial_squares = builder.workspace("partial_squares", linear.programs * choice.split * choice.block_m, "float32")
        linear.arrivals = builder.workspace("arrived", linear.programs, "int32", zeroed=True)
    at = names.new("at")
    place = "tl.arange(0, BLOCK_N)" if linear.single else "tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]"
    stride = linear.most_sums * size
    body.comment(f"the last of {choice.split} programs to arrive adds up their sums, in order")
    body.line(f"{at} = {linear.partials} + {linear.program} * (SPLIT * {stride}) + {place}")
    for number, name in enumerate(sums.values()):
        body.line(f"tl.store({at} + tl.program_id(2) * {stride} + {number * size}, {name})")
    if squares:
        row = {"skinny": "tl.arange(0, BLOCK_M)", "gemv": "tl.arange(0, 1)" if linear.single else "tl.arange(0, BLOCK_M)[:, None]"}
        at_row = names.new("at_row")
        rows = row[choice.schedule]
        body.line(f"{at_row} = {linear.partial_squares} + {linear.program} * (SPLIT * {choice.block_m}) + {rows}")
        body.line(f"tl.store({at_row} + tl.program_id(2) * {choice.block_m}, {squares})")
    body.line("tl.debug_barrier()")
    arrived = names.new("arrived_before")
    body.line(f'{arrived} = tl.atomic_add({linear.arrivals} + {linear.program}, 1, sem="acq_rel")')
    done = Block(body)
    done.line(f"tl.store({linear.arrivals} + {linear.program}, 0)")
    shape = "[BLOCK_N]" if linear.single else "[BLOCK_M, BLOCK_N]"
    for name in sums.values():
        done.line(f"{name} = tl.zeros({shape}, tl.float32)")
    if squares:
        done.line(f"{squares} = tl.zeros({squares}.shape, tl.float32)")
    share = names.new("share")
    loop = Block(done)
    for number, name in enumerate(sums.values()):
        loop.line(f'{name} += tl.load({at} + {share} * {stride} + {number * size}, cache_modifier=".cg")')
    if squares:
        loop.line(f'{squares} += tl.load({at_row} + {share} * {choice.block_m}, cache_modifier=".cg")')
    done.attach(f"for {share} in tl.static_range(SPLIT):", loop)  # unrolled: all loads are under way at once
    return f"if {arrived} == SPLIT - 1:", done
