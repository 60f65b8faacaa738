"""Finding repeated layers in the order in which a graph runs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_LEAST_ALONE = 3  # as many equal neighbours are a repeat of one item; two are no layer


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` items, one after another from `start`; `inner` repeats lie within the first stretch, and so at
    the same places of every other."""

    start: int
    period: int
    count: int
    inner: tuple[Repeat, ...] = ()

    @property
    def end(self) -> int:
        """The first item after the last stretch."""
        return self.start + self.period * self.count

    def shown(self) -> list[int]:
        """The items that stand for all: those of the first stretch, of which inner repeats are folded again."""
        hidden = {i for each in self.inner for i in range(each.start, each.end)} - {i for each in self.inner for i in each.shown()}
        return [i for i in range(self.start, self.start + self.period) if i not in hidden]


@dataclass(frozen=True)
class Place:
    """Where an item stands: `first`, the item that is drawn for it, and the stretch it is in of each repeat around it, outermost first."""

    first: int
    stretches: tuple[tuple[Repeat, int], ...]


def repeats(signatures: Sequence[Hashable]) -> list[Repeat]:
    """Stretches that occur at least twice in a row, none overlapping another, the one that saves most items first; in order of `start`.

    Within a stretch that occurs several times (five layers of one kind, one of another) repeats are found again.
    """
    return _within(signatures, 0, len(signatures))


def _within(signatures: Sequence[Hashable], low: int, high: int) -> list[Repeat]:
    best: Repeat | None = None
    for found in _runs(signatures, low, high):
        if best is None or _saved(found) > _saved(best):
            best = found
    if best is None:
        return []
    inner = tuple(_within(signatures, best.start, best.start + best.period))
    best = Repeat(best.start, best.period, best.count, inner)
    return [*_within(signatures, low, best.start), best, *_within(signatures, best.end, high)]


def _runs(signatures: Sequence[Hashable], low: int, high: int) -> Iterator[Repeat]:
    """Every longest run of each period."""
    for period in range(1, (high - low) // 2 + 1):
        equal = 0
        for i in range(low, high - period + 1):
            if i + period < high and signatures[i] == signatures[i + period]:
                equal += 1
                continue
            count = equal // period + 1
            if count >= (_LEAST_ALONE if period == 1 else 2):
                yield Repeat(i - equal, period, count)
            equal = 0


def _saved(repeat: Repeat) -> int:
    return repeat.period * (repeat.count - 1)


def places(found: Sequence[Repeat]) -> dict[int, Place]:
    """The place of every item that is in a repeat."""
    result: dict[int, Place] = {}
    for repeat in found:
        within = places(repeat.inner)
        for i in range(repeat.start, repeat.end):
            stretch, offset = divmod(i - repeat.start, repeat.period)
            first = within.get(repeat.start + offset, Place(repeat.start + offset, ()))
            result[i] = Place(first.first, ((repeat, stretch), *first.stretches))
    return result


def follows(a: Place, b: Place) -> bool:
    """Whether two items are in different stretches of one repeat."""
    for (ours, here), (theirs, there) in zip(a.stretches, b.stretches, strict=False):
        if ours is not theirs:
            return False
        if here != there:
            return True
    return False


def settled(reads: Mapping[str, Sequence[str]], signatures: Mapping[str, Hashable], places: Mapping[str, int]) -> list[str]:
    """The items of `reads` (item -> what it reads) in an order in which they could run: by their `places` in the program, except that what
    occurs only once comes as early as what it reads allows.

    So what a first layer makes for all (masks, position biases) does not stand between its parts, nor one stack between another's layers
    because the two share such a thing; and the first layer is one like the others.
    """
    often = Counter(signatures.values())
    waits = {name: {source for source in sources if source in reads} for name, sources in reads.items()}
    readers: dict[str, list[str]] = {name: [] for name in reads}
    for name, sources in waits.items():
        for source in sources:
            readers[source].append(name)
    rank = {name: (often[signatures[name]] > 1, places[name], name) for name in reads}
    ready = [rank[name] for name, sources in waits.items() if not sources]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        *_, name = heapq.heappop(ready)
        order.append(name)
        for reader in readers[name]:
            waits[reader].discard(name)
            if not waits[reader]:
                heapq.heappush(ready, rank[reader])
    return order
