"""Memory that kernels are given besides the region's inputs: outputs, and scratch memory of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from dsi.codegen.kernel import Workspace

from .sizes import Environment

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


class _Recording(threading.local):
    stream: Hashable = None
    used: list[torch.Tensor] | None = None  # None: this thread records nothing


_recording = _Recording()


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
    under way at once never share one."""

    def __init__(self, workspace: Workspace, size: tuple[int, ...] | Callable[..., tuple[int, ...]], device: torch.device):
        self.dtype: torch.dtype = getattr(torch, workspace.dtype)
        self.zeroed = workspace.zeroed
        self.size = size
        self.device = device
        self._allocate = allocator(device)
        self._kept = threading.local()

    def __call__(self, sizes: Environment) -> torch.Tensor:
        size = self.size if isinstance(self.size, tuple) else self.size(*sizes)
        if not self.zeroed:
            return self._allocate(size, (1,), self.dtype)
        kept: dict[Any, torch.Tensor] = self._kept.__dict__.setdefault("tensors", {})
        used = _recording.used
        key = (size, _recording.stream if used is not None else stream_of(self.device))
        if (used is None or key not in kept) and is_capturing(self.device):
            # Nothing is executed now, so that nothing may be kept that ought to be zero; whoever records replays the filling too.
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        if key not in kept:
            kept[key] = torch.zeros(size, dtype=self.dtype, device=self.device)
        if used is not None:
            used.append(kept[key])
        return kept[key]
