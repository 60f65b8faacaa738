"""Bytes on the device: what a workload holds, and how much more a side needs to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Memory:
    """Bytes of one side. `peak`: allocated at once while a block of calls runs; `compiling`: while it was compiled, checked and warmed up.
    Both hold the workload's own tensors, and nothing of other sides."""

    peak: int
    compiling: int

    def as_json(self, needed: int) -> dict[str, Any]:
        """With the share of what is needed at least: the workload's own tensors, and what an eager call holds besides."""
        return {"peak bytes": self.peak, "compiling bytes": self.compiling, "peak share": self.peak / needed if needed else None}


class Meter:
    """Measures one side from now on, on top of the `held` bytes of its workload, which are allocated already."""

    def __init__(self, held: int):
        self.held = held
        self._before = allocated()
        forget_peak()

    def compiled(self) -> None:
        """What comes is the running."""
        self._compiling = self._since()
        forget_peak()

    def done(self) -> Memory:
        """The side has run."""
        return Memory(self._since(), self._compiling)

    def _since(self) -> int:
        return peak() - self._before + self.held


def held(*things: Any) -> int:
    """Bytes of the tensors of modules, caches and tensors on the CUDA device; memory that several share counts once."""
    storages = {}
    for tensor in _tensors(things):
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(things: Iterable[Any]) -> Iterable[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, torch.nn.Module):
            yield from thing.parameters()
            yield from thing.buffers()
        else:  # a cache of transformers
            for layer in thing.layers:
                yield from (layer.keys, layer.values)


def transient(run: Callable[[], Any]) -> int:
    """Bytes that are allocated at once while `run` runs, more than before it."""
    before = allocated()
    forget_peak()
    run()
    return peak() - before


def allocated() -> int:
    """Bytes of live tensors; 0 without a device."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak() -> int:
    """The most bytes since `forget_peak`."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def forget_peak() -> None:
    """`peak` begins anew."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
