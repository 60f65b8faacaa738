"""The host's looks at the tokens of a request that the loop runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .request import Request
from .state import State

if TYPE_CHECKING:
    from .loop import Loop


class Looks:
    """The host's looks at the tokens of one request, as late as the reader says. Without anybody who wants to know, there are none."""

    def __init__(self, loop: Loop, state: State, request: Request) -> None:
        assert loop.reader is not None
        self._loop, self._state, self._request, self._reader = loop, state, request, loop.reader
        self._lag = loop.reader.lag if request.criteria is None else 0
        self._any = request.ends is not None or request.criteria is not None or request.streamer is not None
        self._reader.begin(state.board)
        loop.taken = 0

    def queued(self, step: int) -> bool:
        """Step number `step` has been queued. Returns whether a step was seen after which every row is at its end."""
        if not self._any:
            return False
        self._reader.queue(step)
        return step >= self._lag and self._look()

    def finish(self) -> None:
        """The last step has been queued."""
        if not self._any:
            self._loop.taken = self._request.limit
        while self._loop.taken < self._request.limit and not self._look():
            pass

    def _look(self) -> bool:
        """Look at the next step; whether every row is at its end after it."""
        loop, request = self._loop, self._request
        row = self._reader.read(loop.taken)
        loop.taken += 1
        ended = bool(row[-1])
        if request.criteria is not None:
            done = request.criteria(self._state.ids[:, : request.ids.shape[1] + loop.taken], None)
            self._state.finished.logical_or_(done.to(self._state.finished.device))
            ended = bool(self._state.finished.all())
        if request.streamer is not None:
            request.streamer.put(torch.from_numpy(row[:-1].copy()))
        return ended
