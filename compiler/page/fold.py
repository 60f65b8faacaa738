"""Finding repeated layers in the order in which a graph runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` items, one after another from `start`."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The first item after the last stretch."""
        return self.start + self.period * self.count


def repeats(signatures: Sequence[Hashable], least_period: int = 2) -> list[Repeat]:
    """Stretches that occur at least twice in a row, none overlapping another, the one that saves most items first; in order of `start`.

    Shorter periods than `least_period` are left: two equal neighbours are no layer.
    """
    return _within(signatures, 0, len(signatures), least_period)


def _within(signatures: Sequence[Hashable], low: int, high: int, least: int) -> list[Repeat]:
    best: Repeat | None = None
    for period in range(least, (high - low) // 2 + 1):
        run = 0
        for i in range(low, high - period + 1):
            if i + period < high and signatures[i] == signatures[i + period]:
                run += 1
                continue
            if run >= period:
                found = Repeat(i - run, period, run // period + 1)
                if best is None or _saved(found) > _saved(best):
                    best = found
            run = 0
    if best is None:
        return []
    return [*_within(signatures, low, best.start, least), best, *_within(signatures, best.end, high, least)]


def _saved(repeat: Repeat) -> int:
    return repeat.period * (repeat.count - 1)
