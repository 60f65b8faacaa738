"""The operator that makes an int8 pack of a weight inside a graph. The runtime computes it once a weight, not once a call."""

from __future__ import annotations

from typing import Any

import torch
from dsi.ir.ops import define
from torch import Tensor

from .formats import Format, Grouping
from .int8 import quantise


def quantize_weight_reference(weight: Tensor, *, kn: bool = False, grouping: str = "row", size: int = 0) -> tuple[Tensor, Tensor]:
    """A floating-point weight [N, K] (or [K, N] if `kn`) as int8 [N, K] and fp32 scales, [N] or [N, groups] (`formats.Grouping`)."""
    kind: Any = grouping
    return tuple(quantise(weight, Format(Grouping(kind, size)), kn=kn))[:2]  # type: ignore[return-value]


def _quantize_weight_fake(weight: Tensor, *, kn: bool = False, grouping: str = "row", size: int = 0) -> tuple[Tensor, Tensor]:
    k, n = weight.shape if kn else weight.shape[::-1]
    kind: Any = grouping
    group = Grouping(kind, size).inner_group(n, k, kn=kn)
    scales = (n, -(-k // group)) if group else (n,)
    return weight.new_empty((n, k), dtype=torch.int8), weight.new_empty(scales, dtype=torch.float32)


quantize_weight = define(
    'quantize_weight(Tensor weight, *, bool kn=False, str grouping="row", int size=0) -> (Tensor, Tensor)',
    quantize_weight_reference,
    _quantize_weight_fake,
)
