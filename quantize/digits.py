"""Activations as two int8 digits: the reference of kernels that multiply int8 weights without converting them.

A row x becomes step * (256 * high + low), high and low int8, by one step a row:

    step = absmax / 32639,   v = round(x / step) half to even,   high = (v + 128) >> 8,   low = v - 256 * high

32639 = 127 * 256 + 127 is the largest v whose digits fit int8 (high in [-127, 127], low in [-128, 127]). A row is off by half a step an
entry, absmax * 2**-15.99: less than 2**-15 of the row's absmax, whatever its outliers. A product with int8 weights is two integer products,

    x @ w.T  ~  step * scale * (256 * (high @ q.T) + low @ q.T)

each exact in int32 up to K = 131,072 (a group at a time where scales are a group's), so the result differs from that of the unrounded row
by at most step / 2 * sum over k of |w[n, k]|, besides the fp32 arithmetic that puts the parts together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from dsi.ir.quantised_ops import dequantise
from torch import Tensor

BASE = 256
TOP = 127 * BASE + 127  # the largest value of two digits
BOUND = 2.0**-15  # of a row's absmax: more than half a step


class Digits(NamedTuple):
    """`high` and `low`, int8 [..., K], and `step`, fp32 [..., 1]."""

    high: Tensor
    low: Tensor
    step: Tensor

    def value(self) -> Tensor:
        """The rows that these stand for, fp64."""
        return (self.high.double() * BASE + self.low.double()) * self.step.double()


def split(x: Tensor) -> Digits:
    """Rows of x [..., K] as two digits. A row of zeros has the step 0; one with a nan or an infinity has a step that is not finite."""
    wide = x.float()
    step = wide.abs().amax(-1, keepdim=True) / TOP
    value = torch.round(wide / torch.where(step > 0, step, 1.0))
    value = torch.nan_to_num(value).clamp(-TOP, TOP).to(torch.int32)
    high = (value + BASE // 2) >> 8
    return Digits(high.to(torch.int8), (value - BASE * high).to(torch.int8), step)


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, kn: bool = False, group: int = 0) -> Tensor:
    """`dsi.linear_int8` of x's digits: integer products exact, put together in fp64, rounded once to x's dtype."""
    digits = split(x)
    exact = dequantise(weight, scales, kn=kn, group=group, dtype=torch.float64)
    exact = exact.t() if kn else exact
    sums = F.linear(digits.high.double(), exact) * BASE + F.linear(digits.low.double(), exact)
    result = sums * digits.step
    return (result if bias is None else result + bias).to(x.dtype)
