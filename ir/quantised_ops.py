"""The semantic operator of quantised weights: a linear whose weight is int8 with scales.

Element (n, k) of such a weight is its int8 times a scale. Scales are fp32 or fp16, in one of two shapes: [N], a scale for a whole row, or
[N, ceil(K / group)], a scale for each `group` consecutive entries along K (the last group may be short). Whatever a number format calls
its groups is brought to one of the two where it is quantised (`dsi.quantize`), so that nothing below has to know formats.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import define

ACTIVATIONS = ("", "int8")
"""What a linear of int8 weights does with its input: "" takes it as it is, "int8" rounds each row to int8 (W8A8)."""

LARGEST = 127  # of an int8 here: symmetric, so that -128 is not used


def dequantise(weight: Tensor, scales: Tensor, *, kn: bool = False, group: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that int8 `weight` ([N, K], or [K, N] if `kn`) and `scales` ([N], or [N, groups]) stand for, in its layout, in `dtype`."""
    wide = scales.to(dtype)
    if group:
        size = weight.shape[0 if kn else 1]
        # Not cut off after it was repeated: of that Inductor (2.13) makes C++ that reads something else for the last, short group.
        one = torch.arange(size, device=wide.device) // group if size % group else None
        wide = wide.repeat_interleave(group, 1) if one is None else wide.index_select(1, one)
        wide = wide.t() if kn else wide
    elif not kn:
        wide = wide[:, None]
    return weight.to(dtype) * wide


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [..., K] as int8 [..., K] and steps [..., 1] fp32: step = absmax / 127, entries x / step rounded half to even.

    A row of zeros has the step 0. A row that holds a nan or an infinity has a step that is none, so that its products are not finite.
    """
    wide = x.float()
    steps = wide.abs().amax(-1, keepdim=True) / LARGEST
    digits = torch.round(wide / torch.where(steps > 0, steps, 1.0))
    return torch.nan_to_num(digits).clamp(-LARGEST, LARGEST).to(torch.int8), steps


def linear_int8_reference(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, kn: bool = False, group: int = 0, activations: str = ""
) -> Tensor:
    """x [..., K] times an int8 weight stored [N, K] (or [K, N] if `kn`) with its `scales` (see `dequantise`), plus bias [N] -> [..., N].

    The value is sum over k of x[k] * (weight[n, k] * scale) + bias[n], rounded once to x's dtype. Sums are taken in fp32 (fp64 for fp64
    x), in whatever order, and a scale may be applied to each product or to the finished sum of its group: with S the same sum of absolute
    values, results differ from the exact value by at most (K + 2) * 2**-24 * S before the rounding.

    `activations="int8"`: x is first replaced by the rows of `quantise_rows` of it, to the last code: half of a row's largest value lies
    half way between two. Sums of products of two int8 are exact integers; scales and steps are applied to the sum of each group, in fp32 or
    wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if activations:
        if activations not in ACTIVATIONS:
            raise ValueError(f"linear_int8: activations={activations!r}; known are {', '.join(map(repr, ACTIVATIONS))}")
        digits, steps = quantise_rows(x)
        exact = dequantise(weight, scales, kn=kn, group=group, dtype=torch.float64)
        result = F.linear(digits.double(), exact.t() if kn else exact) * steps
        return (result if bias is None else result + bias).to(x.dtype)
    whole = dequantise(weight, scales, kn=kn, group=group, dtype=wide)
    return F.linear(x.to(wide), whole.t() if kn else whole, None if bias is None else bias.to(wide)).to(x.dtype)


def _linear_int8_fake(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, kn: bool = False, group: int = 0, activations: str = ""
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if kn else 0]))


linear_int8 = define(
    'linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, *, bool kn=False, int group=0, str activations="") -> Tensor',
    linear_int8_reference,
    _linear_int8_fake,
)
