"""A prompt in buffers that stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor


class Feed:
    """Prompts of up to `bucket` tokens: `ids` and `positions` [rows, bucket], the place of the last token in `last` [1], and `length` [].

    What is behind a prompt's end is no matter: no token sees what comes after it, and what is generated overwrites it in the cache.
    """

    def __init__(self, rows: int, bucket: int, device: torch.device) -> None:
        self.bucket = bucket
        self.ids, self.positions = (torch.zeros(rows, bucket, dtype=torch.int64, device=device) for _ in range(2))
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        if bucket > 1:  # one graph for all lengths
            torch._dynamo.maybe_mark_dynamic(self.ids, 1)
            torch._dynamo.maybe_mark_dynamic(self.positions, 1)

    def fill(self, ids: Tensor, positions: Tensor | None) -> None:
        """Take the tokens `ids` [rows, n] and their positions [rows or 1, n]."""
        n = ids.shape[1]
        self.ids.zero_()
        self.ids[:, :n].copy_(ids)
        self.positions.zero_()
        if positions is not None:
            self.positions[:, :n].copy_(positions)
        self.last.fill_(n - 1)
        self.length.fill_(n)
