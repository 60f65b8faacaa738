"""Where the inputs of a call lie, looked at in every call: a replaced parameter, another cache, memory shared with one."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import torch

# (tensors, addresses, numbers) -> whether tensors[n] lies at addresses[n] for each number: one call for hundreds of parameters, where this
# build of torch has it.
_equal_at: Callable[[list[Any], list[Any], list[int]], bool] | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Addresses:
    """The addresses of the inputs `numbers`, which are tensors."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers = list(numbers)
        self._pick: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*self.numbers) if len(self.numbers) > 1 else lambda inputs: [inputs[n] for n in self.numbers]
        )

    def of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(torch.Tensor.data_ptr, self._pick(inputs)))

    def stay(self, inputs: list[Any]) -> Callable[[list[Any]], bool]:
        """What says of later inputs whether they lie where these do."""
        known = self.of(inputs)
        if _equal_at is None:
            return lambda later: self.of(later) == known
        places: list[int | None] = [None] * len(inputs)
        for number, address in zip(self.numbers, known, strict=True):
            places[number] = address
        return functools.partial(_at_places, places, self.numbers)


def _at_places(places: list[int | None], numbers: list[int], inputs: list[Any]) -> bool:
    assert _equal_at is not None
    return _equal_at(inputs, places, numbers)


class Memory:
    """Some bytes: those from the first to the last element of each of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted((tensor.data_ptr(), tensor.data_ptr() + extent(tensor)) for tensor in tensors):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def meets(self, start: int, size: int) -> bool:
        """Whether one of them is among the `size` bytes from `start` on."""
        last = bisect.bisect_left(self._starts, start + size) - 1
        return last >= 0 and size > 0 and self._ends[last] > start


class Others:
    """The inputs that are copied, if nothing speaks against it: the tensors `numbers` of `example_inputs`, which are fakes and SymInts.

    Of the numbers among the inputs, those in `needed` tell calls apart (None: all of them).
    """

    def __init__(self, example_inputs: Sequence[Any], numbers: Sequence[int], needed: Container[int] | None = None):
        self.numbers = list(numbers)
        symbolic = [number for number, value in enumerate(example_inputs) if _is_symbolic(value)]
        self._symbolic = [n for n in symbolic if needed is None or n in needed or isinstance(example_inputs[n], torch.Tensor)]
        fixed = [number for number in numbers if number not in symbolic]
        self._extents = {number: extent(example_inputs[number]) for number in fixed}
        self._overlapping = {number: overlaps_itself(example_inputs[number]) for number in fixed}
        self.settled = len(fixed) == len(self.numbers)  # where nothing is written, `among` says the same in every call

    def sizes(self, inputs: Sequence[Any]) -> Hashable:
        """What may differ between two calls that the same program serves: numbers, and the sizes and strides of symbolic tensors."""
        return tuple([(v.shape, v.stride()) if isinstance(v := inputs[n], torch.Tensor) else v for n in self._symbolic])

    def among(self, inputs: Sequence[Any], written: Memory) -> tuple[int, ...]:
        """The numbers of those that lie in memory that is written to, or overlap with themselves: they are not to be copied."""
        found = []
        for number in self.numbers:
            tensor, size = inputs[number], self._extents.get(number)
            overlaps = self._overlapping[number] if size is not None else overlaps_itself(tensor)
            if overlaps or written.meets(tensor.data_ptr(), extent(tensor) if size is None else size):
                found.append(number)
        return tuple(found)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_symbolic(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride(), value.storage_offset()))
