"""Times of a call apart: on the device, on the wall, and for the host alone; the rates of the chip; and the seconds that a run may take."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.kernels import kernel_events, traced

Call = Callable[[], Any]
QUEUE = 900  # launches that the driver takes before a launch waits for the device (1,024, less some for the harness's own)
SUM_BYTES = 4 << 30
PRODUCT = 8192


@dataclass
class Budget:
    """The seconds that a run may take; None: as many as it needs."""

    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def fits(self, seconds: float) -> bool:
        """Whether so many more seconds are left."""
        return self.seconds is None or self.spent + seconds <= self.seconds

    def left(self, rest: float) -> float | None:
        """Seconds that are left but for `rest`, one at least; None where there is no end."""
        return None if self.seconds is None else max(self.seconds - rest - self.spent, 1.0)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_name() -> str:
    """The device's name with its capability behind it, as caches and codegen/devices.py name it; "" without a device."""
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} sm_{major}{minor}"


def nothing() -> None:
    """For calls that need no preparation."""


# ------------------------------------------------------------------------------------------------------------- rates of the chip


def event_times(call: Call, repeats: int) -> list[float]:
    """Milliseconds of the device for each of `repeats` calls, queued behind a sleep so that no call waits for the host."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    sleep(2e-3)
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def bandwidth() -> float:
    """Bytes a second that a sum over 4 GB of random numbers reads."""
    values = torch.empty(SUM_BYTES // 4, device="cuda").normal_()
    event_times(values.sum, 3)
    return SUM_BYTES / statistics.median(event_times(values.sum, 9)) * 1e3


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a library product of two square matrices of random numbers, multiply-adds counted twice."""
    a, b = (torch.empty(PRODUCT, PRODUCT, device="cuda", dtype=dtype).normal_() for _ in range(2))
    event_times(lambda: a @ b, 3)
    return 2 * PRODUCT**3 / statistics.median(event_times(lambda: a @ b, 9)) * 1e3


def cache_bytes() -> int:
    """Bytes of the device's last-level cache; 0 without a device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if torch.cuda.is_available() else 0


@functools.cache
def _cycles_a_second() -> float:
    cycles = 20_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)  # the clock rises under load
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / start.elapsed_time(end) * 1e3


def sleep(seconds: float) -> None:
    """Keep the device's current stream busy for about so long, so that what is queued behind it runs without gaps of the host's making."""
    torch.cuda._sleep(int(_cycles_a_second() * seconds))


# --------------------------------------------------------------------------------------------------------------------- one side


@dataclass
class Times:
    """Milliseconds a call, one entry a block."""

    device: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # until the last call of a block has returned, the device still at work

    def summary(self) -> dict[str, Any]:
        """Medians, and the least and greatest of each."""
        found: dict[str, Any] = {}
        for name, values in vars(self).items():
            found[name] = statistics.median(values) if values else None
            found[f"{name} range"] = [min(values), max(values)] if values else None
        return found


class Timer:
    """Times blocks of `calls`, each after `prepare`, which is not timed.

    The device's time is read from replays of a CUDA graph of the first `in_graph` calls once `capture` has made one ("graph"); else from
    events around calls queued behind a sleep ("queued"), or just around them where a call has more launches than the driver queues
    ("events").
    """

    def __init__(self, calls: Sequence[Call], prepare: Call = nothing, in_graph: int = 1):
        self.calls, self.prepare, self.in_graph = list(calls), prepare, in_graph
        self.times = Times()
        self.graph: Any = None
        self.launches = 1  # a call's, for the length of the queue
        self._host = 1e-3  # seconds a call

    @property
    def method(self) -> str:
        if not torch.cuda.is_available():
            return ""
        return "graph" if self.graph is not None else "queued" if self.launches <= QUEUE else "events"

    def capture(self) -> Any:
        """Capture the first `in_graph` calls; returns what the last of them returned, which each replay writes anew.

        Warms up on the stream that it captures: memory that a callable keeps for each stream must be there before.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.prepare()
                for call in self.calls[: self.in_graph]:
                    call()
        torch.cuda.synchronize()
        self.prepare()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        result = None
        # cuBLAS keeps scratch memory for each stream, which others clear (Inductor's CUDA graphs do): the graph must hold its own.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, stream=stream):
            for call in self.calls[: self.in_graph]:
                result = call()
        torch._C._cuda_clearCublasWorkspaces()
        self.graph = graph
        return result

    def block(self) -> None:
        """Time one block each way."""
        self._wall_block()
        if torch.cuda.is_available():
            self._device_block()

    def _wall_block(self) -> None:
        self.prepare()
        synchronize()
        start = time.perf_counter()
        for call in self.calls:
            call()
        issued = time.perf_counter()
        synchronize()
        end = time.perf_counter()
        self._host = (issued - start) / len(self.calls)
        self.times.wall.append((end - start) / len(self.calls) * 1e3)
        self.times.host.append(self._host * 1e3)

    def _device_block(self) -> None:
        if self.graph is not None:
            queued, count = [self.graph.replay] * (len(self.calls) // self.in_graph), len(self.calls) // self.in_graph * self.in_graph
        else:
            queued = self.calls[: max(1, min(len(self.calls), QUEUE // max(self.launches, 1)))]
            count = len(queued)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.prepare()
        torch.cuda.synchronize()
        if self.method != "events":
            sleep(1.5 * self._host * count + 2e-4)
        start.record()
        for call in queued:
            call()
        end.record()
        torch.cuda.synchronize()
        self.times.device.append(start.elapsed_time(end) / count)


def interleave(timers: Sequence[Timer], blocks: int) -> None:
    """Blocks of all timers by turns, in one order and then in the other, after a block each that does not count."""
    for timer in timers:
        timer.block()
        timer.times = Times()
    for number in range(blocks):
        for timer in timers if number % 2 == 0 else reversed(timers):
            timer.block()


# -------------------------------------------------------------------------------------------------------------- what a call runs


@dataclass
class Profile:
    """What torch.profiler saw of one call: kernels by name with count and microseconds, and how many CUDA graphs were launched."""

    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)
    graphs: int = 0

    @property
    def launches(self) -> int:
        """Kernels in the call."""
        return sum(count for count, _ in self.kernels.values())

    def as_json(self) -> dict[str, Any]:
        kernels = {name: {"count": count, "us": round(time_us, 2)} for name, (count, time_us) in self.kernels.items()}
        return {"graph launches": self.graphs, "kernels": kernels}


def profile(call: Call) -> Profile:
    """The profile of one call; empty without a CUDA device."""
    found = Profile()
    if not torch.cuda.is_available():
        return found
    events = traced(call)
    for event in kernel_events(events):
        count, time_us = found.kernels.get(event["name"], (0, 0.0))
        found.kernels[event["name"]] = (count + 1, time_us + event["dur"])
    found.graphs = sum(str(e.get("name", "")).startswith("cudaGraphLaunch") for e in events)
    return found


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value - reference‖ / ‖reference‖ in float64; NaN where either is not finite."""
    a, b = value.detach().double(), reference.detach().double()
    return float((a - b).norm() / b.norm())
