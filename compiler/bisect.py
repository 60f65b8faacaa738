"""Finding a wrong rewrite by giving the compiler less and less fuel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .observe import collecting


@dataclass(frozen=True)
class Culprit:
    """The first rewrite whose presence makes the result wrong: its number (1 is the first), and what it did in each graph that came so
    far.
    """

    number: int
    rewrites: tuple[str, ...]

    def __str__(self) -> str:
        return f"rewrite {self.number}: {'; '.join(self.rewrites)}"


def find_rewrite(run: Callable[[int], bool]) -> Culprit | None:
    """The first wrong rewrite, None if the result is right with all of them.

    `run(fuel)` compiles with `options={"fuel": fuel}` (each graph may make that many rewrites), runs, and says whether the result is
    right. It is called about log2(rewrites) + 2 times, with Dynamo reset before each. Raises `ValueError` if the result is wrong with no
    rewrite at all: then it is not a rewrite's fault.
    """

    def attempt(fuel: int) -> tuple[bool, list[list[str]]]:
        torch._dynamo.reset()
        with collecting() as contexts:
            right = run(fuel)
        return right, [context.fuel.log for context in contexts]

    right, logs = attempt(_UNLIMITED)
    if right:
        return None
    if not attempt(0)[0]:
        raise ValueError("the result is wrong without any rewrite; the fault is not in a rule")
    low, high = 0, max(map(len, logs), default=0)  # right with `low` rewrites, wrong with `high`
    while high - low > 1:
        middle = (low + high) // 2
        if attempt(middle)[0]:
            low = middle
        else:
            high = middle
    _, logs = attempt(high)
    return Culprit(high, tuple(log[high - 1] for log in logs if len(log) >= high))


_UNLIMITED = 1 << 30
