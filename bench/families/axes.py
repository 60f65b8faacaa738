"""The ways in which a family is run, and the inputs of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .family import VOCAB

LENGTH, STEPS = 11, 2  # tokens of the prompt, and decode steps after it
CACHES = ("static", "dynamic", "none")
PADDINGS = ("none", "left", "right")


@dataclass(frozen=True)
class Case:
    """One way of running a family: a value of each axis."""

    family: str
    attention: str
    cache: str = "static"
    dtype: torch.dtype = torch.float32
    hot_init: bool = True
    padding: str = "none"
    layers: int = 2


@dataclass
class Batch:
    """Inputs of all phases. `keep` [B, S + STEPS] marks what counts; rows are compared with themselves alone."""

    ids: Tensor
    keep: Tensor

    @property
    def positions(self) -> Tensor:
        """Positions [B, S + STEPS] that count kept tokens only."""
        return (self.keep.long().cumsum(-1) - 1).clamp(min=0)


def batch_of(padding: str, length: int = LENGTH, steps: int = STEPS) -> Batch:
    """Two rows of ids [2, S + steps], the second padded by three tokens."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, length + steps), generator=g)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if padding == "left":
        keep[1, :3] = False
    elif padding == "right":
        keep[1, length - 3 : length] = False
    return Batch(ids.masked_fill(~keep, 0), keep)
