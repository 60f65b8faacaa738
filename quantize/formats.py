"""Number formats: what a weight is rounded to, and which of its entries share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from dsi.ir.errors import DsiError

GROUP_SIZES = (32, 64, 128, 256)
"""Entries along K that may share a scale: whole tiles of a kernel."""

SCALES = (torch.float32, torch.float16)
"""What scales may be."""

SMALLEST_GROUP = 8  # fewer entries along K with one scale: the scales would weigh half as much as the weight


@dataclass(frozen=True)
class Grouping:
    """Which entries of a weight [N, K] share a scale.

    "row": all K of one output channel. "inner": `size` consecutive ones along K, the last group of a row as short as K leaves it.
    "flat": `size` groups of equal size of the entries as they lie in memory, row-major, as DeepSpeed counts `quantize_groups`; a weight
    stored [K, N] (Conv1D) is counted as it is stored.
    """

    kind: Literal["row", "inner", "flat"] = "row"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("row", "inner", "flat"):
            raise DsiError(f"a grouping is of kind 'row', 'inner' or 'flat', not {self.kind!r}")
        if self.kind == "row" and self.size:
            raise DsiError(f"a grouping by rows has no size; {self.size} was given")
        if self.kind == "inner" and self.size not in GROUP_SIZES:
            raise DsiError(f"groups along K have {', '.join(map(str, GROUP_SIZES))} entries, not {self.size}")
        if self.kind == "flat" and (isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1):
            raise DsiError(f"a weight has at least one group; quantize_groups = {self.size!r} was given")

    def doubled(self) -> Grouping:
        """The same with twice as many flat groups: DeepSpeed's `mlp_extra_grouping`. Other groupings stay as they are."""
        return Grouping("flat", 2 * self.size) if self.kind == "flat" else self

    def inner_group(self, n: int, k: int, *, kn: bool = False) -> int:
        """The entries along K that share a scale in a weight of `n` channels of `k` entries, stored [K, N] if `kn`; 0 for all of them.

        Raises `DsiError` where flat groups do not divide the weight, or cut rows into pieces that are no regular groups.
        """
        if self.kind == "row" or (self.kind == "inner" and self.size >= k):
            return 0
        if self.kind == "inner":
            return self.size
        stored = f"[{k}, {n}]" if kn else f"[{n}, {k}]"
        if n * k % self.size:
            raise DsiError(f"quantize_groups = {self.size} does not divide the {n * k} entries of a weight {stored}")
        length = n * k // self.size
        if not kn:
            # Row by row: a group is whole rows, or a part of one.
            if length % k == 0:
                return 0
            if k % length == 0 and length >= SMALLEST_GROUP:
                return length
        elif length % n == 0:
            # Stored [K, N]: a group is whole steps of k, each for all channels.
            steps = length // n
            if steps >= k:
                return 0
            if steps >= SMALLEST_GROUP:
                return steps
        raise DsiError(
            f"quantize_groups = {self.size} cuts a weight {stored} into groups of {length} entries, which are neither whole rows nor equal "
            f"parts of one of at least {SMALLEST_GROUP} entries along K; give a number that divides {k if kn else n}"
        )

    def __str__(self) -> str:
        return {"row": "a scale a row", "inner": f"a scale for {self.size} along K", "flat": f"{self.size} flat groups"}[self.kind]


ROW = Grouping()


@dataclass(frozen=True)
class Format:
    """Symmetric int8 with scales by `grouping`.

    `scales`: their dtype, torch.float32, or torch.float16 for weights all of whose scales fp16 can hold in its normal range (where it
    cannot, they stay fp32).
    """

    grouping: Grouping = ROW
    scales: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            raise DsiError(f"scales are torch.float32 or torch.float16, not {self.scales}")

    def __str__(self) -> str:
        return f"int8, {self.grouping}"


INT8 = Format()
"""int8 with an fp32 scale a row."""
