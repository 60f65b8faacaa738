"""A prompt in buffers that stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .state import Copies, copy_all


class Feed:
    """Prompts of up to `bucket` tokens: `ids` and `positions` [rows, bucket], the place of the last token in `last` [1], and `length` [].

    What is behind a prompt's end is no matter: no token sees what comes after it, and what is generated overwrites it in the cache. With
    `at_end` a prompt is at the end instead, and what is before it is for a mask to hide.
    """

    def __init__(self, rows: int, bucket: int, device: torch.device, at_end: bool = False) -> None:
        self.bucket, self.at_end = bucket, at_end
        self.ids, self.positions = (torch.zeros(rows, bucket, dtype=torch.int64, device=device) for _ in range(2))
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self._filled = 0  # tokens of a row of the last prompt
        self._positions: Tensor | None = None  # those of the last prompt
        if bucket > 1:  # one graph for all lengths
            torch._dynamo.maybe_mark_dynamic(self.ids, 1)
            torch._dynamo.maybe_mark_dynamic(self.positions, 1)

    def fill(self, ids: Tensor, positions: Tensor | None) -> None:
        """Take the tokens `ids` [rows, n] and their positions [rows or 1, n], a tensor that is not written to while it is in use."""
        copy_all(self.filling(ids, positions))

    def filling(self, ids: Tensor, positions: Tensor | None) -> Copies:
        """The same, but for the copy of the tokens, which is left to the caller."""
        n = ids.shape[1]
        first = self.bucket - n if self.at_end else 0
        same, positioned = n == self._filled, positions is not None and positions is self._positions
        self._filled, self._positions = 0, None  # should this be broken off
        # Every line is a launch or two. What a call of the same shape finds is what the last one has left; nothing else writes here.
        if not same:
            self.ids.zero_()
            self.last.fill_(first + n - 1)
            self.length.fill_(n)
        if not (same and positioned):
            self.positions.zero_()
            if positions is not None:
                self.positions[:, first : first + n].copy_(positions)
        self._filled, self._positions = n, positions
        return [(self.ids[:, first : first + n], ids)]
