"""A state on a GPU: what follows a step's logits is one kernel (advance_kernel.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sampling import Recipe
from .state import State

PART = 4096  # of a row's scores, looked at by one program


class GpuState(State):
    """`State`, with the scratch memory of the kernel."""

    def __init__(self, rows: int, slots: int, length: Tensor) -> None:
        super().__init__(rows, slots, length)
        self.best = torch.full((rows,), -(2**63), dtype=torch.int64, device=length.device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=length.device)

    def follow(self, recipe: Recipe, logits: Tensor, fed: Tensor) -> None:
        from .advance_kernel import advance

        if recipe.plain:
            grid, arguments, constants = self.launch(logits, None, fed)
        else:
            grid, arguments, constants = self.launch(None, recipe.pick(self, logits), fed)
        advance[grid](*arguments, **constants, num_warps=8)

    def launch(self, logits: Tensor | None, chosen: Tensor | None, fed: Tensor) -> tuple[tuple[int], list[Any], dict[str, Any]]:
        """(grid, arguments, constants) of the kernel, for the largest of `logits` [rows, vocabulary] or the tokens in `chosen` [rows]."""
        parts, sizes = 1, (0, 0)
        if logits is not None:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            parts, sizes = -(-logits.shape[1] // PART), (logits.shape[1], logits.stride(0))
        buffers = [self.best, self.arrived, self.ids, self.token, self.position, self.finished.view(torch.int8)]
        buffers += [self.count if self.ends is None else self.ends, self.pad, self.board, self.count, self.made, self.length, fed]
        source = logits if logits is not None else chosen
        arguments = [source, chosen if chosen is not None else self.count, *buffers, *sizes, self.rows, self.slots]
        block = 1 << (self.rows - 1).bit_length()
        constants = {"PICKS": logits is not None, "PARTS": parts, "BLOCK": PART, "ROWS": block, "ENDS": self.ending}
        return (self.rows * parts if logits is not None else 1,), arguments, constants
