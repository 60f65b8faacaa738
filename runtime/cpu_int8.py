"""`dsi.linear_int8` on a CPU, in forms that never write the weight out in floating point where that can be avoided.

One or two rows are bound by reading the weight: a reduction converts it in registers. More rows go through integer products, if the CPU has
instructions for them: each row is split into int8 digits (two hold what half precision has, three what fp32 has; dsi.quantize.digits), all
digits are one `_int_mm`. bf16 has a kernel of ATen's for few rows that is faster still. What is left dequantises the weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dsi.ir.quantised_ops import dequantise, linear_int8_reference, quantise_rows
from torch import Tensor

# Rows up to which a form was the fastest on an AVX-512 CPU with VNNI, weights of 576 x 576 to 4096 x 4096.
REDUCED, REDUCED_IN_GROUPS, PACKED_BF16 = 2, 8, 8
LARGEST_K = 1 << 17  # products of two int8 that an int32 can sum: 128 * 127 * K < 2**31
# What ATen's kernels take: `_int_mm` of one product a sum gives whatever was in memory, `_weight_int8pack_mm` reads whole vectors.
SMALLEST_K, WHOLE_VECTORS = 2, 32

_BASE = 256


@functools.cache
def has_integer_products() -> bool:
    """Whether this CPU multiplies int8 faster than it converts them."""
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


def linear_int8(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, kn: bool = False, group: int = 0, activations: str = ""
) -> Tensor:
    """As `ir.quantised_ops.linear_int8_reference`, to be traced: the form is chosen by what is known of the shapes. Digits of fp32 rows are
    within 2**-22 of the row's absmax, of half-precision ones within 2**-15."""
    if x.dtype == torch.float64:
        return linear_int8_reference(x, weight, scales, bias, kn=kn, group=group, activations=activations)
    entries = weight.t() if kn else weight
    k = entries.shape[1]
    flat = x.reshape(-1, k)
    rows: Any = flat.shape[0]
    few = rows if isinstance(rows, int) else LARGEST_K
    steps: Tensor | None = None
    integers = not group and has_integer_products() and SMALLEST_K <= k < LARGEST_K
    if activations:
        flat, steps = quantise_rows(flat)
    if activations and integers:
        result = torch._int_mm(flat, entries.t()).float() * scales.float()
    elif few <= (REDUCED_IN_GROUPS if group or not integers else REDUCED) and not kn:
        result = _reduced(flat, entries, scales, group)
    elif integers and flat.dtype == torch.bfloat16 and few <= PACKED_BF16 and not kn and k % WHOLE_VECTORS == 0:
        # Its own scales are bf16, too coarse: they are ones here, computed, as Inductor takes none that are a constant.
        ones = _in_memory((scales >= 0).to(flat.dtype))
        result = torch.ops.aten._weight_int8pack_mm(flat, entries, ones).float() * scales.float()
    elif integers:
        result = _by_digits(flat, entries, scales)
    else:
        result = linear_int8_reference(flat.float(), weight, scales, kn=kn, group=group)
    if steps is not None:
        result = result * steps
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).reshape(*x.shape[:-1], entries.shape[0])


def _reduced(x: Tensor, entries: Tensor, scales: Tensor, group: int) -> Tensor:
    """fp32 [rows, N], as one reduction that reads the int8 of each channel once for all rows."""
    n, k = entries.shape
    wide = _in_memory(x.float())  # converted once, not once a channel
    if not group:
        return (wide[:, None, :] * entries.float()).sum(-1) * scales.float()
    if k % group == 0:
        weight = (entries.reshape(n, -1, group).float() * scales.float()[:, :, None]).reshape(n, k)
    else:
        weight = dequantise(entries, scales, group=group)
    return (wide[:, None, :] * weight).sum(-1)


def _in_memory(value: Tensor) -> Tensor:
    """`value`, which Inductor does not compute again in each reader: a view by strides is of something that is there."""
    return torch.as_strided(value, value.shape, value.stride())


def _by_digits(x: Tensor, entries: Tensor, scales: Tensor) -> Tensor:
    """fp32 [rows, N]: rows as digits to the base 256, the lowest first, and the products of all of them at once."""
    count = 3 if x.dtype == torch.float32 else 2
    top = 127
    for _ in range(count - 1):
        top = top * _BASE + 127
    wide = x.float()
    steps = wide.abs().amax(-1, keepdim=True) / top
    value = torch.nan_to_num(torch.round(wide / torch.where(steps > 0, steps, 1.0))).clamp(-top, top).to(torch.int32)
    digits = []
    for _ in range(count - 1):
        high = (value + _BASE // 2) >> 8
        digits.append((value - _BASE * high).to(torch.int8))
        value = high
    digits.append(value.to(torch.int8))
    rows = x.shape[0]
    products = torch._int_mm(torch.cat(digits), entries.t()).float()
    total = products[:rows]
    for place in range(1, count):
        total = total + float(_BASE**place) * products[place * rows : (place + 1) * rows]
    return total * (steps * scales.float())
