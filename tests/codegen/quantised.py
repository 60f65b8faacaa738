"""The cases of `plans` with int8 weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest import mock

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.quantised_ops import quantise_rows

from . import plans
from .support import Case


@dataclass
class QuantisedCase(Case):
    """A case whose matrices of weights are int8, with scales for rows (`group` 0) or for `group` elements along K."""

    group: int = 0
    scales: dict[int, int] = field(default_factory=dict)  # weight input -> scales input

    def input(self, name, sizes, dtype=None, strides=None, scale=1.0, shift=0.0, values=None):
        if "weight" not in name or len(sizes) != 2:
            return super().input(name, sizes, dtype, strides, scale, shift, values)
        q = torch.randint(-127, 128, tuple(map(self.number, sizes)), generator=self.generator).to(torch.int8)
        number = super().input(name, sizes, torch.int8, strides, values=q)
        kn = self.kn
        rows, inner = (sizes[1], sizes[0]) if kn else sizes
        shape = (rows, -(-self.number(inner) // self.group)) if self.group else (rows,)
        wanted = (torch.rand(tuple(map(self.number, shape)), generator=self.generator) + 0.5) * scale / 74
        self.scales[number] = super().input(f"{name}_scale", shape, torch.float32, values=wanted)
        return number

    kn = False

    def real(self, number):
        if number not in self.scales:
            return super().real(number)
        q, s = self.inputs[number].double(), self.inputs[self.scales[number]].double()
        inner = q.shape[0 if self.kn else 1]
        whole = s.repeat_interleave(self.group, 1)[:, :inner] if self.group else s[:, None]
        return q * (whole.t() if self.kn else whole)


def quantised(make: Callable[[], Case], group: int = 0, kn: bool = False) -> Case:
    """`make()` with int8 weights, its expected values those of the weights that they stand for."""
    made = type("Made", (QuantisedCase,), {"kn": kn})
    with mock.patch.object(plans, "Case", lambda *args, **kwargs: made(*args, **kwargs, group=group)):
        case = make()

    def window(w: t.WeightWindow) -> t.WeightWindow:
        coords = (w.n, sympy.floor(t.K / group)) if group else (w.n,)
        return replace(w, scale=t.Scale(case.scales[w.weight], coords, group))

    plan = case.spec.plan
    segments = tuple(replace(s, windows=tuple(map(window, s.windows))) for s in plan.segments)
    case.spec.plan = replace(plan, segments=segments)
    case.spec.constants = frozenset({*case.scales, *case.scales.values()})
    return case


def constant(case: Case) -> Case:
    """The case with its weights declared to be constants, so that they are read ahead."""
    weights = {window.weight for segment in case.spec.plan.segments for window in segment.windows}
    case.spec.constants = frozenset({*case.spec.constants, *weights})
    return case


def rounded_rows(case: Case) -> Case:
    """A projection whose rows are rounded to int8 (W8A8), with its expected value."""
    case.spec.plan = replace(case.spec.plan, activations="int8")
    x, w, bias, residual = (n for n, tensor in enumerate(case.spec.inputs) if "scale" not in tensor.name)
    digits, steps = quantise_rows(case.inputs[x])
    case.expected[0] = ((digits.double() * steps.double()) @ case.real(w).T + case.real(bias) + case.real(residual)).to(case.dtype)
    return case
