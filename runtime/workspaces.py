"""Memory that kernels are given besides the region's inputs: outputs, and scratch memory of their own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from dsi.codegen.kernel import Workspace

from .sizes import Environment

SMALL = 1 << 18  # bytes of scratch memory that each kernel may keep between calls
# (sizes, strides, dtype) -> a tensor of undefined contents on one device, which for CUDA has to be the current one.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocate:
    """What makes tensors on a device: where torch has it, the way that Inductor's generated code goes, which costs half as much."""
    fast = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    if fast is not None and device.type in ("cpu", "cuda"):
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def stream_of(device: torch.device) -> Hashable:
    """The device's current stream, as a key."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now is recorded into a CUDA graph, and not executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def watches(device: torch.device) -> tuple[Callable[[], Hashable], Callable[[], bool]]:
    """`stream_of` and `is_capturing` of a device, for kernels that ask in each launch."""
    index = device.index
    raw, capturing = (getattr(torch._C, name, None) for name in ("_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"))
    if device.type != "cuda" or index is None or raw is None or capturing is None:
        return lambda: stream_of(device), lambda: is_capturing(device)
    return lambda: (index, raw(index)), capturing


def may_be_captured(device: torch.device) -> bool:
    """Whether launches on a device can be recorded into a CUDA graph."""
    return device.type == "cuda"


def done(filled: torch.Tensor) -> torch.Tensor:
    """A tensor on a CUDA device, once what the current stream was given is done."""
    torch.cuda.current_stream(filled.device).synchronize()
    return filled


@functools.cache
def _capture_info() -> Callable[..., int] | None:
    """The driver's cuStreamGetCaptureInfo; None where there is no such driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def capture_of(device: torch.device) -> Hashable | None:
    """The capture under way on the device's current stream, as a key that no other capture has; None where the driver does not tell."""
    info, place = _capture_info(), stream_of(device)
    if info is None or not isinstance(place, tuple):
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = info(ctypes.c_void_p(place[1]), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed or status.value != 1 else (number.value, *place)  # 1: it captures, and nothing went wrong with it


class _Recording(threading.local):
    stream: Hashable = None
    used: list[torch.Tensor] | None = None  # None: this thread records nothing


_recording = _Recording()
_owned: list[torch.Tensor] = []  # by captures, which outlive what was captured


@contextlib.contextmanager
def recording(stream: Hashable) -> Iterator[list[torch.Tensor]]:
    """Within, in this thread: kernels use the workspaces that they have on `stream`, where what is recorded will be replayed.

    Gives the list of those that were used, which is to be kept as long as the recording.
    """
    before = _recording.stream, _recording.used
    used: list[torch.Tensor] = []
    _recording.stream, _recording.used = stream, used
    try:
        yield used
    finally:
        _recording.stream, _recording.used = before


class ScratchMemory:
    """One workspace of one kernel. One that starts as zeros is kept (kernels leave it zeroed) for each size, stream and thread: two calls
    under way at once never share one. So is a small one of one size, as it was left: finding it costs less than an allocation.

    Somebody else's capture gets one that was made in a call before, its own for good: the launches of one stream of a capture follow each
    other, and nobody says when the graph ends. Without one, the filling becomes part of the capture, one more kernel in each replay.
    """

    def __init__(self, workspace: Workspace, size: tuple[int, ...] | Callable[..., tuple[int, ...]], device: torch.device):
        self.dtype: torch.dtype = getattr(torch, workspace.dtype)
        self.zeroed = workspace.zeroed
        self.size = size
        self.device = device
        self.kept = self.zeroed or (isinstance(size, tuple) and math.prod(size) * self.dtype.itemsize <= SMALL)
        self._allocate = allocator(device)
        self._stream, self._capturing = watches(device)
        self._kept = threading.local()
        self._spare: dict[tuple[int, ...], torch.Tensor] = {}
        self._captured: dict[Hashable, torch.Tensor] = {}

    def __call__(self, sizes: Environment) -> torch.Tensor:
        size = self.size if isinstance(self.size, tuple) else self.size(*sizes)
        if not self.kept:
            return self._allocate(size, (1,), self.dtype)
        kept: dict[Any, torch.Tensor] = self._kept.__dict__
        used = _recording.used
        key = (size, _recording.stream if used is not None else self._stream())
        found = kept.get(key)
        if (used is None or found is None) and self._capturing():
            # Nothing is executed now, so that nothing may be kept that ought to be zero; whoever records replays the filling too.
            given = self._given(size) if used is None and self.zeroed else None
            return self._made(size) if given is None else given
        if found is None:
            found = kept[key] = self._made(size)
        if used is not None:
            used.append(found)
        elif self.zeroed and size not in self._spare and may_be_captured(self.device):
            self._spare[size] = done(self._made(size))  # it is used wherever the capture will be replayed
        return found

    @property
    def lasting(self) -> bool:
        """Whether each stream of a thread has one tensor for good."""
        return self.kept and isinstance(self.size, tuple)

    def _made(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device) if self.zeroed else self._allocate(size, (1,), self.dtype)

    def _given(self, size: tuple[int, ...]) -> torch.Tensor | None:
        """What the capture under way on this stream has, or the spare one from now on; None where there is none, or no telling."""
        capture = capture_of(self.device)
        if capture is None:
            return None
        key = (capture, size)
        if key not in self._captured:
            spare = self._spare.pop(size, None)
            if spare is None:
                return None
            self._captured[key] = spare
            _owned.append(spare)
        return self._captured[key]


def together(memories: Sequence[ScratchMemory]) -> Callable[[Environment], list[torch.Tensor]]:
    """What gives the scratch memory of one kernel at certain sizes: where each of it lasts, found by one look."""
    each = list(memories)
    if not each or not all(memory.lasting for memory in each):
        return lambda sizes: [memory(sizes) for memory in each]
    local = threading.local()
    stream, capturing = watches(each[0].device)

    def find(sizes: Environment) -> list[torch.Tensor]:
        kept: dict[Any, list[torch.Tensor]] = local.__dict__
        if _recording.used is not None or capturing():
            kept.clear()  # a capture takes what was made for it: the next call is to make another
            return [memory(sizes) for memory in each]
        key = stream()
        found = kept.get(key)
        if found is None:
            found = kept[key] = [memory(sizes) for memory in each]
        return found

    return find
