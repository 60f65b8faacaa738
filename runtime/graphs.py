"""CUDA graphs: a program recorded once for each set of sizes and addresses, then replayed with one launch.

What a recorded graph reads and writes is fixed when it is recorded, so two kinds of inputs are told apart:

* *pinned* inputs are used where they lie: parameters, buffers and caches (what torch marks static), everything that the program writes
  to, and what shares memory with that. Their addresses are part of the key and are looked at in every call: a replaced parameter or
  another cache passes the same guards, and a graph keyed by sizes alone would go on using the old one.
* all others are copied into buffers of the graph's own before each replay.

Results are copied out, so that what a caller keeps is not overwritten by the next call. The first call with a key runs the program as it
is (kernels are loaded then), the second one records it; recording executes nothing, so a cache is never written twice.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Protocol

import torch
from dsi.ir.context import Context
from dsi.ir.region import Region
from torch import fx

from .addresses import Addresses, Memory, Others
from .workspaces import recording, stream_of

log = logging.getLogger("dsi.runtime")

GRAPHS = 16  # graphs that one program keeps; the least recently used one gives way
REMEMBERED = 64  # keys that were seen once and may come again

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


class CudaRecorder:
    """Records with `torch.cuda.graph`; graphs of one stream share a memory pool."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, Any] = {}

    def place(self) -> Hashable:
        return stream_of(torch.device("cuda"))

    def may_record(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], Sequence[Any]], place: Hashable) -> tuple[Callable[[], None], Sequence[Any]]:
        pool = self._pools.setdefault(place, torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps scratch memory a stream: what it allocated outside must not be used inside, nor the other way round.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Recording happens on a stream of its own; kernels are to use the scratch memory of the one where the graph will be launched.
            with recording(stream_of(torch.device("cuda"))) as used, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return functools.partial(_replay, graph, used), results


def _replay(graph: torch.cuda.CUDAGraph, workspaces: Sequence[torch.Tensor]) -> None:
    """Launches a graph. Its scratch memory lives as long as what this is bound to, since the graph goes on using it."""
    graph.replay()


class GraphedProgram:
    """A boxed callable that runs `program` through recorded graphs.

    `example_inputs` are the program's fakes and SymInts; `static` the numbers of the inputs that torch marks static, `written` of those
    that the program writes to, `needed` of those on which anything depends (None: all). Where a graph cannot be recorded the program runs
    as it is, and the report says why.
    """

    _boxed_call = True

    def __init__(
        self,
        program: Boxed,
        example_inputs: Sequence[Any],
        static: Sequence[int],
        written: Sequence[int],
        context: Context,
        recorder: Recorder | None = None,
        needed: Container[int] | None = None,
    ):
        self.program = program
        self.recorder = recorder or CudaRecorder()
        tensors = {number for number, value in enumerate(example_inputs) if isinstance(value, torch.Tensor)}
        self._written = sorted(tensors & set(written))
        self._pinned = Addresses(sorted(tensors & (set(static) | set(written))))
        self._others = Others(example_inputs, sorted(tensors - set(self._pinned.numbers)), needed)
        self._context = context
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._latest: _Graph | None = None
        self._lock = threading.RLock()
        self._refused = False
        self.launched = 0  # graphs launched so far

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._refused or not self.recorder.may_record():
            return self.program(inputs)
        place, sizes = self.recorder.place(), self._others.sizes(inputs)
        # Held until the work is queued: inputs that are copied in must not be replaced before the replay that reads them is.
        with self._lock:
            graph = self._latest
            if graph is None or not graph.fits(inputs, place, sizes):
                graph = self._find(inputs, place, sizes)
                if graph is None:
                    return self.program(inputs)
                self._latest = graph
            self.launched += 1
            return graph.run(inputs)

    def _find(self, inputs: list[Any], place: Hashable, sizes: Hashable) -> _Graph | None:
        """The graph of this call, recorded now if its key has been seen before; None where the program is to run as it is."""
        written = Memory([inputs[number] for number in self._written])
        more = self._others.among(inputs, written)
        key = (place, sizes, more, self._pinned.of(inputs), Addresses(more).of(inputs))
        graph = self._graphs.get(key)
        if graph is None:
            if not self._comes_again(key):
                return None
            graph = self._record(inputs, more, place)
            if graph is None:
                return None
            graph.fits = self._fits(inputs, place, sizes, more, written)
            self._graphs[key] = graph
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _fits(self, inputs: list[Any], place: Hashable, sizes: Hashable, more: tuple[int, ...], written: Memory) -> Fits:
        """Whether a later call has the key of this one, found out without making its key."""
        others, in_place, further = self._others, self._pinned.stay(inputs), Addresses(more).stay(inputs)

        def fits(later: list[Any], here: Hashable, now: Hashable) -> bool:
            # Where the pinned inputs lie as they did, so does what is written.
            return here == place and now == sizes and in_place(later) and others.among(later, written) == more and further(later)

        return fits

    def _comes_again(self, key: Hashable) -> bool:
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _record(self, inputs: Sequence[Any], more: Sequence[int], place: Hashable) -> _Graph | None:
        try:
            return _Graph(self.program, inputs, {*self._pinned.numbers, *more}, self.recorder, place)
        except (RuntimeError, ValueError) as error:
            self._refused = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            note = f"no CUDA graph could be recorded, so every kernel is launched by itself: {reason}"
            self._context.report.notes.append(note)
            log.warning("dsi: %s", note)
            return None


class _Graph:
    """One recorded graph, its buffers and its results."""

    fits: Fits

    def __init__(self, program: Boxed, inputs: Sequence[Any], pinned: set[int], recorder: Recorder, place: Hashable):
        # Ordinary tensors even under inference_mode, so that a later call outside of it may write to them.
        with torch.inference_mode(False), torch.no_grad():
            self.buffers: dict[int, torch.Tensor] = {
                number: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
                for number, value in enumerate(inputs)
                if isinstance(value, torch.Tensor) and number not in pinned
            }
        given = [self.buffers.get(number, value) for number, value in enumerate(inputs)]
        self.replay, results = recorder.record(lambda: program(list(given)), place)
        # A result that is a pinned input is not copied: the caller gets the input of his call.
        place_of = {id(value): number for number, value in enumerate(given) if isinstance(value, torch.Tensor)}
        self.results: list[tuple[Any, int | None]] = [(result, place_of.get(id(result))) for result in results]
        lying = {_memory(inputs[number]) for number in pinned if isinstance(inputs[number], torch.Tensor)}
        for result, number in self.results:
            if isinstance(result, torch.Tensor) and number is None and result.numel() and _memory(result) in lying:
                raise ValueError("a result is a view of an input")
        self._into, self._from = list(self.buffers.values()), list(self.buffers)
        self._made = [result for result, number in self.results if number is None and isinstance(result, torch.Tensor)]

    def run(self, inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        with torch.no_grad():
            _copy(self._into, [given[number] for number in self._from])
            self.replay()
            fresh = [torch.empty_like(result) for result in self._made]
            _copy(fresh, self._made)
        made = iter(fresh)
        return [
            given[number] if number is not None else next(made) if isinstance(result, torch.Tensor) else result
            for result, number in self.results
        ]


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """One launch where it can be one."""
    if len(into) == 1:
        into[0].copy_(source[0])
    elif into:
        torch._foreach_copy_(into, source)


def written_inputs(gm: fx.GraphModule) -> list[int]:
    """The numbers of the placeholders that a lowered graph writes to: its `copy_` epilogue, and KV caches."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    written: set[Any] = set()
    for node in gm.graph.nodes:
        region = node.meta.get("region")
        if isinstance(region, Region):
            written.update(node.args[number] for number in region.in_place.values())
        elif isinstance(node.target, torch._ops.OpOverload):
            written.update(
                node.args[position]
                for position, argument in enumerate(node.target._schema.arguments)
                if argument.is_write and position < len(node.args)
            )
    return [number for number, node in enumerate(placeholders) if node in written]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
