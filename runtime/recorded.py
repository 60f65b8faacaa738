"""Recorded graphs of one program: what a replay does, and which of many graphs stay."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from .workspaces import allocator

GRAPHS = 128  # graphs that one program keeps: layers of a model may share a program, and each has weights of its own
FEW, BYTES = 16, 2**28  # that many are kept whatever their size; more only while their own memory is less than this
PATIENCE = 4  # a graph gives way to another once it was not used in so many calls for each graph that is kept
REMEMBERED = 4 * GRAPHS  # keys that were seen once and may come again

Boxed = Callable[[list[Any]], Sequence[Any]]
Fits = Callable[[list[Any], Hashable, Hashable], bool]  # (inputs, place, sizes) -> whether a graph is the one for that call


class Recorder(Protocol):
    """How work is recorded: CUDA's way, or a test's."""

    def place(self) -> Hashable:
        """Where work goes now (the current stream): part of the key, since replays on two streams may overlap."""

    def may_record(self) -> bool:
        """False while somebody else is recording: then the program must run as it is, and so become part of theirs."""

    def record(self, run: Callable[[], Sequence[Any]], place: Hashable) -> tuple[Callable[[], None], Sequence[Any]]:
        """A function that repeats what `run` does, and what `run` returned. Nothing is executed."""


class Recorded:
    """One recorded graph, its buffers and its results. `size`: bytes of these. `used`: the number of the last call that it served.

    Raises `ValueError` where a result is a view of an input, and what recording raises.
    """

    fits: Fits

    def __init__(self, program: Boxed, inputs: Sequence[Any], pinned: set[int], recorder: Recorder, place: Hashable):
        # Ordinary tensors even under inference_mode, so that a later call outside of it may write to them.
        with torch.inference_mode(False), torch.no_grad():
            buffers: dict[int, torch.Tensor] = {
                number: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
                for number, value in enumerate(inputs)
                if isinstance(value, torch.Tensor) and number not in pinned
            }
        given = [buffers.get(number, value) for number, value in enumerate(inputs)]
        self.replay, results = recorder.record(lambda: program(list(given)), place)
        # A result that is a pinned input is not copied: the caller gets the input of his call.
        place_of = {id(value): number for number, value in enumerate(given) if isinstance(value, torch.Tensor)}
        self._results: list[tuple[Any, int | None]] = [(result, place_of.get(id(result))) for result in results]
        lying = {_memory(inputs[number]) for number in pinned if isinstance(inputs[number], torch.Tensor)}
        for result, number in self._results:
            if isinstance(result, torch.Tensor) and number is None and result.numel() and _memory(result) in lying:
                raise ValueError("a result is a view of an input")
        self._into, self._from = list(buffers.values()), list(buffers)
        self._made = [result for result, number in self._results if number is None and isinstance(result, torch.Tensor)]
        self._makers = [_maker(result) for result in self._made]
        self._all_made = len(self._made) == len(self._results)
        own = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in (*self._into, *self._made)}
        self.size, self.used = sum(own.values()), 0
        self.itself = weakref.ref(self)
        self.next = self.itself  # what was launched after it the last time: weakly, for nothing is kept by this

    def run(self, inputs: list[Any]) -> list[Any]:
        """One call: `inputs` copied in, what was recorded, its results copied out."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: list[Any]) -> list[Any]:
        given = inputs.copy()
        inputs.clear()
        _copy(self._into, [given[number] for number in self._from])
        self.replay()
        fresh = [make() for make in self._makers]
        _copy(fresh, self._made)
        if self._all_made:
            return fresh
        made = iter(fresh)
        return [
            given[number] if number is not None else next(made) if isinstance(result, torch.Tensor) else result
            for result, number in self._results
        ]


class Shelf:
    """The recorded graphs of one program by their keys. One that is full takes another graph only once the one that was not used for
    longest is no longer in use: a call that finds no room costs what it costs without graphs, while recording costs as much as many calls.
    """

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Recorded] = {}
        self.calls = 0  # of the program, so far
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._full_until = 0  # the call up to which no graph can have been unused for long enough

    def wants(self, key: Hashable) -> bool:
        """Whether a call is to be recorded: its key, of which there is no graph, has been seen before, and there is room."""
        if key in self._seen and self._room():
            del self._seen[key]
            return True
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _room(self) -> bool:
        while self._full():
            if self.calls <= self._full_until:
                return False
            key = min(self.graphs, key=lambda key: self.graphs[key].used)
            self._full_until = self.graphs[key].used + PATIENCE * len(self.graphs)
            if self.calls > self._full_until:
                del self.graphs[key]
        return True

    def _full(self) -> bool:
        if len(self.graphs) < min(FEW, GRAPHS):
            return False
        return len(self.graphs) >= GRAPHS or sum(graph.size for graph in self.graphs.values()) >= BYTES


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """One launch where it can be one."""
    if len(into) == 1:
        into[0].copy_(source[0])
    elif into:
        torch._foreach_copy_(into, source)


def _maker(result: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a tensor like `result`, which lies as it does."""
    if torch.empty_like(result, device="meta").stride() != result.stride():
        return functools.partial(torch.empty_like, result)
    return functools.partial(allocator(result.device), tuple(result.shape), tuple(result.stride()), result.dtype)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
