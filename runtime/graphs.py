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

import logging
import threading
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.region import Region
from torch import fx

from .addresses import Addresses, Memory, Others
from .recorded import Boxed, Fits, Recorded, Recorder, Shelf
from .workspaces import recording, watches

log = logging.getLogger("dsi.runtime")

# Microseconds of the host, on an H200's on 2026-11-30: a replay with what finds its graph, a launch that copies tensors of one dtype, the
# allocation of a result; a kernel's launch, and the rest of a step (its outputs, and Python).
REPLAY, COPY, ALLOCATION = 9.0, 9.0, 3.0
LAUNCH, STEP = 7.0, 7.0


class CudaRecorder:
    """Records with `torch.cuda.graph`; graphs of one stream share a memory pool. `device`: where all its work goes (None: to the device
    that is the current one at each call)."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cuda")
        self._stream, self._capturing = watches(self._device)
        self._pools: dict[Hashable, Any] = {}

    def place(self) -> Hashable:
        return self._stream()

    def may_record(self) -> bool:
        return not self._capturing()

    def record(self, run: Callable[[], Sequence[Any]], place: Hashable) -> tuple[Callable[[], None], Sequence[Any]]:
        pool = self._pools.setdefault(place, torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps scratch memory a stream: what it allocated outside must not be used inside, nor the other way round.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Recording happens on a stream of its own; kernels are to use the scratch memory of the one where the graph will be launched.
            with recording(self._stream()) as used, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        graph.workspaces = used  # type: ignore[attr-defined]  # its scratch memory lives as long as the graph, which goes on using it
        return graph.replay, results


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
        self._shelf = Shelf()
        self._latest: Callable[[], Recorded | None] = lambda: None
        self._next: Callable[[], Recorded | None] = (
            self._latest
        )  # the graph that is looked at first: what came after the latest one the last time
        self._lock = threading.RLock()
        self._refused = False
        self.launched = 0  # graphs launched so far

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._refused or not self.recorder.may_record():
            return self.program(inputs)
        place, sizes = self.recorder.place(), self._others.sizes(inputs)
        # Held until the work is queued: inputs that are copied in must not be replaced before the replay that reads them is.
        with self._lock:
            self._shelf.calls += 1
            graph = self._next()
            if graph is None or not graph.fits(inputs, place, sizes):
                graph = self._find(inputs, place, sizes)
                if graph is None:
                    return self.program(inputs)
                latest = self._latest()
                if latest is not None:
                    latest.next = graph.itself
            self._latest, self._next = graph.itself, graph.next
            graph.used = self._shelf.calls
            self.launched += 1
            return graph.run(inputs)

    def _find(self, inputs: list[Any], place: Hashable, sizes: Hashable) -> Recorded | None:
        """The graph of this call, recorded now if its key has been seen before; None where the program is to run as it is."""
        written = Memory([inputs[number] for number in self._written])
        more = self._others.among(inputs, written)
        key = (place, sizes, more, self._pinned.of(inputs), Addresses(more).of(inputs))
        graph = self._shelf.graphs.get(key)
        if graph is None and self._shelf.wants(key):
            graph = self._record(inputs, more, place)
            if graph is not None:
                graph.fits = self._fits(inputs, place, sizes, more, written)
                self._shelf.graphs[key] = graph
        return graph

    def _fits(self, inputs: list[Any], place: Hashable, sizes: Hashable, more: tuple[int, ...], written: Memory) -> Fits:
        """Whether a later call has the key of this one, found out without making its key."""
        others, in_place, further = self._others, self._pinned.stay(inputs), Addresses(more).stay(inputs)
        if others.settled and not self._written:  # no call has others among them

            def fits(later: list[Any], here: Hashable, now: Hashable) -> bool:
                return here == place and now == sizes and in_place(later) and (not more or further(later))
        else:

            def fits(later: list[Any], here: Hashable, now: Hashable) -> bool:
                # Where the pinned inputs lie as they did, so does what is written.
                if not (here == place and now == sizes and in_place(later) and others.among(later, written) == more):
                    return False
                return not more or further(later)

        return fits

    def _record(self, inputs: Sequence[Any], more: Sequence[int], place: Hashable) -> Recorded | None:
        try:
            return Recorded(self.program, inputs, {*self._pinned.numbers, *more}, self.recorder, place)
        except (RuntimeError, ValueError) as error:
            self._refused = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            note = f"no CUDA graph could be recorded, so every kernel is launched by itself: {reason}"
            self._context.report.notes.append(note)
            log.warning("dsi: %s", note)
            return None


def replay_costs(example_inputs: Sequence[Any], static: Sequence[int], written: Sequence[int], results: Sequence[Any]) -> float:
    """Microseconds that a call through a recorded graph costs the host: the graph, and copies of inputs and of results where there are
    any.

    `results`: a program's, by their slots, of which those of its inputs come first; literals are none.
    """
    copied = [value for number, value in enumerate(example_inputs) if isinstance(value, torch.Tensor) and number not in {*static, *written}]
    made = {slot for slot in results if isinstance(slot, int) and slot >= len(example_inputs)}
    # Tensors of several dtypes are not copied by one launch; those of results are hardly ever several.
    return REPLAY + COPY * (len({value.dtype for value in copied}) + bool(made)) + ALLOCATION * len(made)


def launching_costs(launches: Sequence[int | None]) -> float | None:
    """Microseconds that a program of steps with so many launches costs the host; None where nobody says of one how many it has."""
    known = [count for count in launches if count is not None]
    return sum(STEP + LAUNCH * count for count in known if count) if len(known) == len(launches) else None


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
