"""int8 read as 32-bit words: four elements of a weight's row, and of the rows' digits, at a time.

With few rows `gemv` multiplies without the matrix units. There dp4a adds the products of four signed bytes with four others to a 32-bit
sum, so that nothing is converted on the way. All tiles are of words: those of the weights, of the digits and of the sums lie alike in
the threads' registers, a digit that was loaded once serves every column of a program, and 16 bytes are four words of a thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t

if TYPE_CHECKING:
    from .kernel import Choice

WORD = 4  # elements of int8 in 32 bits
ALIGNED = 16  # bytes of which a row is a multiple, so that four of its words are read at once
LONGEST = 1 << 17  # elements of a row, fewer than these: products of digits, 128 * 128 at most, then have a sum below 2**31


def words_possible(spec: t.KernelSpec) -> bool:
    """Whether a linear's weights can be read as words: all int8, in rows of whole 16 bytes, each of which has one scale."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    inner = sympy.sympify(plan.inner)
    if plan.x_dtype == torch.float32 or not inner.is_Integer or int(inner) % ALIGNED or int(inner) >= LONGEST:
        return False

    def possible(window: t.WeightWindow) -> bool:
        tensor = spec.inputs[window.weight]
        if window.scale is None or window.scale.group % ALIGNED or window.kn or len(tensor.strides) != 2:
            return False
        down, along = map(sympy.sympify, tensor.strides)
        return bool(along == 1 and down.is_Integer and int(down) % ALIGNED == 0)

    return all(possible(window) for segment in plan.segments for window in segment.windows)


def as_words(spec: t.KernelSpec, choice: Choice) -> bool:
    """Whether a choice has weights and digits read as words."""
    return choice.schedule == "gemv" and choice.digits > 0 and choice.block_k >= ALIGNED and words_possible(spec)


def in_words(product: t.KernelSpec, read: frozenset[int]) -> t.KernelSpec:
    """A product in which the inputs `read` count words along the contracted dimension, and so do the dimension and the scales' groups."""
    plan = product.plan
    assert isinstance(plan, t.LinearPlan)

    def tensor(one: t.Tensor) -> t.Tensor:
        (rows, inner), (down, along) = (tuple(map(sympy.sympify, values)) for values in (one.sizes, one.strides))
        return replace(one, sizes=(rows, inner / WORD), strides=(down / WORD, along), dtype=torch.int32)

    def window(one: t.WeightWindow) -> t.WeightWindow:
        assert one.scale is not None
        coords = tuple(sympy.sympify(coord).xreplace({t.K: WORD * t.K}) for coord in one.scale.coords)
        return replace(one, scale=replace(one.scale, coords=coords, group=one.scale.group // WORD))

    assert isinstance(plan.x, t.Load)
    plan = replace(
        plan,
        inner=sympy.sympify(plan.inner) / WORD,
        x=replace(plan.x, dtype=torch.int32),
        segments=tuple(replace(segment, windows=tuple(map(window, segment.windows))) for segment in plan.segments),
    )
    return replace(product, plan=plan, inputs=[tensor(one) if number in read else one for number, one in enumerate(product.inputs)])
