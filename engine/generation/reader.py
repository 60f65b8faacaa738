"""How the host learns of tokens without making the device wait for it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Reader(Protocol):
    """Brings rows of a state's board to the host. After `lag` more steps have been queued, reading a row makes no step wait."""

    lag: int

    def begin(self, board: Tensor) -> None:
        """A generation starts, whose steps fill `board` [steps, n] row by row."""

    def queue(self, step: int) -> None:
        """Step number `step` has been queued."""

    def read(self, step: int) -> np.ndarray:
        """The row [n] of a queued step; waits for the step. It may be overwritten when more steps have been queued."""


class Direct:
    """For devices that have done a step when the call returns."""

    lag = 0

    def begin(self, board: Tensor) -> None:
        self._board = board

    def queue(self, step: int) -> None:
        pass

    def read(self, step: int) -> np.ndarray:
        return self._board[step].cpu().numpy()


class Copying:
    """For CUDA: a row is copied to pinned memory on a stream of its own, behind the step that made it and beside those that follow.

    A row of the board is written once in a generation, so the copy needs no step to wait for it.
    """

    lag = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: Tensor | None = None
        self._made = torch.cuda.Event()
        self._copied: list[Any] = []

    def begin(self, board: Tensor) -> None:
        self._board = board
        if self._pinned is None or self._pinned.shape != board.shape:
            self._pinned = torch.empty(board.shape, dtype=board.dtype, pin_memory=True)
            self._rows = self._pinned.numpy()
            self._copied = [torch.cuda.Event() for _ in range(self.lag + 2)]

    def queue(self, step: int) -> None:
        assert self._pinned is not None
        self._made.record()
        self._stream.wait_event(self._made)
        with torch.cuda.stream(self._stream):
            self._pinned[step].copy_(self._board[step], non_blocking=True)
            self._copied[step % len(self._copied)].record()

    def read(self, step: int) -> np.ndarray:
        self._copied[step % len(self._copied)].synchronize()
        return self._rows[step]
