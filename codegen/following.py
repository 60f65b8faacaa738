"""What a kernel asks the L2 cache for when it has read its own weights: those that the next linear reads first.

Kernels of few rows are bound by memory, and memory pauses between two of them: the last programs add up and store, and the next kernel's,
which do not fit on the processors beside them, have yet to start and to wait for their first tiles. What the cache is asked for meanwhile
those programs find there. Nothing is read, and which weights follow is known where a program is put together (runtime/following.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from .builder import Block

if TYPE_CHECKING:
    from .linear import Linear

MOST = 3  # weights that a kernel can be told of: q, k and v
# Rows of each, 0 where there is none, and bytes from one row to the next, the same for all. Arguments of a launch, not of a kernel's text:
# equal regions share a kernel, and what follows the last layer's is another linear.
ROWS = tuple(sympy.Symbol(f"following_rows_{number}") for number in range(MOST))
PITCH = sympy.Symbol("following_pitch")
KIB = 1024


def ask(linear: Linear, block: Block) -> None:
    """Writes the requests, `Choice.following` KiB in all."""
    builder, choice = linear.builder, linear.choice
    if not choice.following or choice.schedule != "skinny":
        return
    builder.use("ask")
    pointers, (*rows, pitch) = builder.following(MOST), (builder.given(symbol) for symbol in (*ROWS, PITCH))
    part = Block(block)
    part.comment("the weights that the next linear reads first: the memory has nothing else to do while this kernel ends")
    total = " + ".join(rows)
    for pointer, count in zip(pointers, rows, strict=True):
        part.line(f"ask({pointer}, {count}, {pitch}, {total}, {choice.following * KIB})")
    block.attach("if PDL:", part)
