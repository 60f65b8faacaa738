"""Rounding a weight to symmetric int8, and back, in plain torch.

The scale of a group is absmax / 127, so that nothing is clipped: an entry is off by half a scale at most. Values that already lie on such
a grid (what was dequantised, or trained with rounding) come back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from dsi.ir.errors import DsiError
from dsi.ir.quantised_ops import LARGEST, dequantise
from torch import Tensor

from .formats import INT8, Format

_AT_A_TIME = 1 << 20  # entries that are widened at a time
_TINY = torch.finfo(torch.float32).tiny


class Quantised(NamedTuple):
    """A weight in int8: `weight` int8 [N, K]; `scales` [N], or [N, ceil(K / group)] where `group` entries along K share one."""

    weight: Tensor
    scales: Tensor
    group: int = 0

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that this stands for."""
        return dequantise(self.weight, self.scales, group=self.group, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of entries and scales."""
        return self.weight.nbytes + self.scales.nbytes


def quantise(weight: Tensor, form: Format = INT8, *, kn: bool = False, name: str = "the weight") -> Quantised:
    """`weight` [N, K] (or [K, N] if `kn`) of a floating dtype in the number format `form`; the result is [N, K] either way.

    Each entry becomes the int8 nearest to entry / scale, so that |entry - int8 * scale| <= scale / 2; a group of zeros has the scale 0.
    Raises `DsiError` naming `name` if an entry is nan or infinite, and where the groups of `form` do not fit its shape.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise DsiError(f"{name} is {short(weight.dtype)} {list(weight.shape)}; a floating-point matrix is quantised")
    stored = weight.detach()
    k, n = stored.shape if kn else stored.shape[::-1]
    try:
        group = form.grouping.inner_group(n, k, kn=kn)
    except DsiError as error:
        raise DsiError(f"{name}: {error}") from None
    groups = _groups(stored, form, group, kn)
    low, high = torch.aminmax(groups, dim=1)
    tops = torch.maximum(-low, high).float()
    if not bool(tops.isfinite().all()):
        raise DsiError(f"{name} holds nan or infinite entries, which int8 cannot stand for: skip it by its name, or repair it")
    scales = _scales(tops, form.scales)
    digits = _rounded(groups, scales)
    return _arranged(digits, scales, form, group, n, k, kn)


def short(dtype: torch.dtype) -> str:
    """A dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _groups(stored: Tensor, form: Format, group: int, kn: bool) -> Tensor:
    """The weight as a matrix with a row for each group; a short last group is filled up with zeros, which are on every grid."""
    if form.grouping.kind == "flat":
        return stored.reshape(form.grouping.size, -1)
    rows = stored.t() if kn else stored
    if not group:
        return rows
    return F.pad(rows, (0, -rows.shape[1] % group)).reshape(-1, group)


def _arranged(digits: Tensor, scales: Tensor, form: Format, group: int, n: int, k: int, kn: bool) -> Quantised:
    """From groups to the weight [N, K] and the scales of each of its rows."""
    if form.grouping.kind != "flat":
        return Quantised(digits.reshape(n, -1)[:, :k].contiguous(), scales.reshape(n, -1) if group else scales, group)
    if not kn:
        weight = digits.reshape(n, k)
        return Quantised(weight, scales.reshape(n, -1) if group else scales.repeat_interleave(n // len(scales)), group)
    weight = digits.reshape(k, n).t().contiguous()
    return Quantised(weight, scales.expand(n, -1).contiguous() if group else scales.expand(n).contiguous(), group)


def _scales(tops: Tensor, dtype: torch.dtype) -> Tensor:
    # Below fp32's normal range a scale would lose bits, or be flushed to zero by a kernel.
    scales = torch.where(tops > 0, (tops / LARGEST).clamp(min=_TINY), 0.0)
    if dtype == torch.float16:
        present, limits = scales[scales > 0], torch.finfo(torch.float16)
        if bool(((present >= limits.tiny) & (present <= limits.max)).all()):
            return scales.to(torch.float16)
    return scales


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, list[slice]]]:
    """A matrix in pieces that are small enough to be widened: rows, and for each the columns."""
    width = min(columns, _AT_A_TIME)
    height = max(1, _AT_A_TIME // width)
    across = [slice(first, first + width) for first in range(0, columns, width)]
    for first in range(0, rows, height):
        yield slice(first, first + height), across


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    """int8 of each entry of `groups`, a row a group. fp32 `scales` move by one place where the neighbour reproduces all of a group:
    absmax / 127 may miss, by the last place, the scale that absmax was 127 times of."""
    result = torch.empty(groups.shape, dtype=torch.int8, device=groups.device)
    wide = torch.promote_types(groups.dtype, torch.float32)
    for rows, across in _tiles(*groups.shape):
        steps = torch.where(scales[rows] > 0, scales[rows].to(wide), 1.0)[:, None]
        near = torch.ones(len(steps), dtype=torch.bool, device=groups.device)
        for columns in across:
            entries = groups[rows, columns].to(wide)
            digits = (entries / steps).round_()
            rest = (entries - digits * steps).abs_()
            close = rest > steps * (0.5 - 2.0**-14)  # to the middle between two: the quotient itself was rounded
            if bool(close.any()):
                place = close.nonzero(as_tuple=True)
                digits[place] = torch.round(entries[place].double() / steps.expand_as(entries)[place].double()).to(wide)
            result[rows, columns] = digits.clamp_(-LARGEST, LARGEST).to(torch.int8)
            near &= (rest <= entries.abs() * 2.0**-22).all(1)
        if scales.dtype == torch.float32 and bool(near.any()):
            scales[rows] = _settled(scales[rows], [(result[rows, c], groups[rows, c].float()) for c in across])
    return result


def _settled(scales: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`scales`, or their neighbours where only those give back `parts`: int8 and entries of the groups, some columns at a time."""

    def reproduces(candidate: Tensor) -> Tensor:
        found = torch.ones(len(scales), dtype=torch.bool, device=scales.device)
        for digits, entries in parts:
            found &= (digits * candidate[:, None] == entries).all(1)
        return found

    done = reproduces(scales)
    for towards in (float("inf"), 0.0):
        other = torch.nextafter(scales, torch.full_like(scales, towards))
        moves = ~done & reproduces(other)
        scales, done = torch.where(moves, other, scales), done | moves
    return scales
