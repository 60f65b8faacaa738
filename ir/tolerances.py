"""How far two computations of the same thing may lie apart, a dtype. One table for the whole project.

`relative` bounds ‖a - b‖ / ‖b‖ over a tensor (float64 arithmetic); `elementwise` bounds |a - b| / (|b| + ‖b‖∞), so that one wrong element
of many is seen, and a cancelled one is not held against the magnitude of what cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the error of a tensor against its reference; see the module."""

    relative: float
    elementwise: float


# Half a unit in the last place is 2^-53, 2^-24, 2^-11, 2^-8. A layer's sums of a few thousand terms in fp32 lose about three digits of
# seven at worst; low-precision values are rounded at every operator, in another order where operators are fused.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-12, 1e-11),
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.float16: Tolerance(5e-3, 2e-2),
    torch.bfloat16: Tolerance(3e-2, 1e-1),
}


def error_against(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(relative, elementwise) error of `value` against `reference`, both of one shape; infinite where only one has a NaN or infinity."""
    a, b = value.detach().double(), reference.detach().double()
    if not a.numel():
        return 0.0, 0.0
    finite = torch.isfinite(b)
    # Equal infinities and NaNs in the same places agree (a masked score, a row of padding).
    special = ((a == b) | (a.isnan() & b.isnan()))[~finite]
    if not bool(special.all()) or not bool(torch.isfinite(a[finite]).all()):
        return float("inf"), float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0, 0.0
    difference, norm, top = (a - b).abs(), b.norm(), b.abs().max()
    if not bool(difference.any()):
        return 0.0, 0.0
    return float(difference.norm() / norm), float((difference / (b.abs() + top)).max())


def disagreement(value: torch.Tensor, reference: torch.Tensor, computed_in: torch.dtype | None = None) -> str:
    """A sentence that says how `value` differs from `reference` beyond the tolerance of the dtype, "" where it does not.

    `computed_in`: the dtype that what led to them was rounded to, where that is coarser than their own (logits widened at the end).
    """
    if value.dtype != reference.dtype or value.shape != reference.shape:
        return f"{value.dtype}{list(value.shape)} against {reference.dtype}{list(reference.shape)}"
    tolerance = TOLERANCES.get(reference.dtype)
    if tolerance is None:
        return "" if torch.equal(value, reference) else f"{reference.dtype} values differ"
    if computed_in in TOLERANCES:
        tolerance = max(tolerance, TOLERANCES[computed_in], key=lambda t: t.relative)
    relative, elementwise = error_against(value, reference)
    if relative <= tolerance.relative and elementwise <= tolerance.elementwise:
        return ""
    return (
        f"relative error {relative:.1e} (allowed {tolerance.relative:.0e}), "
        f"elementwise {elementwise:.1e} (allowed {tolerance.elementwise:.0e}) in {reference.dtype}"
        f"{f' computed in {computed_in}' if computed_in not in (None, reference.dtype) else ''}"
    )
