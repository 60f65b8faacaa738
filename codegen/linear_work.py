"""What the time of a linear region depends on, worked out once for all choices: its weights' bytes and columns, and what surrounds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
from dsi.ir import tile as t

from .columns import Columns, columns_of, cuts_of
from .deferred import behind_product, deferred_norm, is_deferred, peel_of
from .kernel import Choice
from .layout import Interner
from .linear_fit import FITS
from .quantised import MANY_ROWS
from .roofline import evaluate, traffic, typical
from .words import words_possible

ALIGNED = 16  # columns of which loads take several at once


@dataclass(frozen=True)
class Cut:
    """One set of a segment's columns: `positions` in each part, and for one position, its accumulators (windows times parts) and the bytes
    of their weights along one k."""

    columns: Columns
    positions: int
    accumulators: int
    weight_bytes: int


@dataclass(frozen=True)
class LinearWork:
    """What the time of a linear region depends on at a number of rows, worked out once for all choices."""

    rows: int
    inner: int
    moved: float  # bytes that memory must read and write at least
    x_bytes: int  # of one element of the rows
    cuts: tuple[Cut, ...]
    fused: bool  # several cuts read one weight
    across: bool  # weights are stored [K, N]: what lies side by side in memory are columns
    reductions: tuple[str, ...]  # kinds of the row statistics
    deferred: frozenset[str]  # schedules that need no pass for them, since the norm's factor comes after the product
    bare: bool  # the rows are multiplied as they are loaded
    group: int | None  # elements along K with one scale, where all weights are int8 (0: a row's); None where one is not
    rounded: bool  # rows are rounded to int8 too
    crowded: bool  # an epilogue needs registers for more than its sums
    joined: bool  # an epilogue reads another tensor by row and column
    wide: bool  # products in fp32, outside the matrix units
    words: bool = False  # int8 weights can be read as words
    constant: bool = False  # no kernel of the graph writes the weights
    behind: bool = False  # a layer norm may correct gemv's sums instead of the rows

    @property
    def held(self) -> int:
        """Positions that a block must have so that it holds whole groups of every segment that needs them; 1 where none does."""
        return max(cut.columns.padded for cut in self.cuts)

    @property
    def accumulators(self) -> int:
        """The most sums that a program holds side by side."""
        return max(cut.accumulators for cut in self.cuts)

    @property
    def columns(self) -> int:
        """Columns of all accumulators together."""
        return sum(cut.positions * cut.accumulators for cut in self.cuts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.inner * sum(cut.positions * cut.weight_bytes for cut in self.cuts)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return max(self.weight_bytes // (self.inner * self.columns), 1)

    def as_int8(self, choice: Choice) -> bool:
        """Whether rows meet the weights as int8: on the matrix units, or as words."""
        if choice.schedule == "gemv":
            return self.words and choice.digits > 0
        whole = self.group is not None and (not self.group or self.group % choice.block_k == 0)
        return choice.schedule in ("skinny", "tiled") and (choice.digits > 0 or self.rounded) and whole

    def beside(self, choice: Choice) -> bool:
        """Whether both digits of the rows are one operand (quantised.digits_beside)."""
        many = choice.schedule == "skinny" and choice.block_m >= MANY_ROWS and not choice.peel
        return many and self.as_int8(choice) and not self.rounded and not self.group

    def in_blocks(self, choice: Choice) -> bool:
        """Whether skinny, which multiplies few rows, takes all rows in several blocks: over integers, where programs share no sums."""
        whole = self.beside(choice) or (self.rounded and self.as_int8(choice))
        return choice.schedule == "skinny" and choice.split == 1 and whole and self.rows > choice.block_m

    def converted(self, choice: Choice) -> bool:
        """Whether int8 weights are converted on their way to the matrix units."""
        return choice.schedule in ("skinny", "tiled") and self.element_bytes == 1 and not self.wide and not self.as_int8(choice)

    def peel(self, choice: Choice) -> str:
        """When a choice's first step is multiplied, where it is peeled (deferred.peeled)."""
        return peel_of(sympy.Integer(self.inner), choice) if self.constant and choice.peel else ""

    def is_deferred(self, choice: Choice) -> bool:
        """Whether the norm before the product comes behind it."""
        return choice.schedule in self.deferred or (self.behind and is_deferred(choice, self.accumulators))

    def passes(self, choice: Choice) -> int:
        """Times that a program reads its rows before the products."""
        if self.is_deferred(choice):
            return 0
        kept = self.inner <= choice.block_s
        return sum(2 if kind == "layer" and not kept else 1 for kind in self.reductions)

    def tile_bytes(self, choice: Choice) -> int:
        """Bytes of the weights' and the rows' tiles of one step, as a program reads them."""
        rows = choice.block_m * (1 if self.rounded else 2 if self.as_int8(choice) else self.x_bytes)
        return choice.block_k * (choice.block_n * max(cut.weight_bytes for cut in self.cuts) + rows)


def linear_work(spec: t.KernelSpec, rows: int, assumed: dict[sympy.Symbol, int]) -> LinearWork:
    """The work of a linear region at `rows` rows; `assumed` are the values of its size symbols."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    cuts, read = [], []
    for _, segment, columns in cuts_of(plan):
        weights = sum(spec.inputs[window.weight].dtype.itemsize for window in segment.windows)
        cuts.append(Cut(columns, typical(columns.positions), len(segment.windows) * columns.parts, weights * columns.parts))
        read += [window.weight for window in segment.windows]
    return LinearWork(
        rows,
        typical(plan.inner),
        evaluate(traffic(spec), assumed),
        plan.x_dtype.itemsize,
        tuple(cuts),
        len(read) > len(set(read)),
        any(window.across(spec.inputs[window.weight]) for segment in plan.segments for window in segment.windows),
        tuple(reduction.kind for reduction in plan.reductions),
        frozenset(schedule for schedule in FITS if deferred_norm(plan, schedule) is not None),
        isinstance(plan.x, t.Load),
        _group(plan),
        bool(plan.activations),
        _crowded(plan) or (_joined(plan) and any(cut.positions % ALIGNED for cut in cuts)),
        _joined(plan),
        plan.x_dtype.itemsize >= 4,
        words_possible(spec),
        all(window.weight in spec.constants for segment in plan.segments for window in segment.windows),
        behind_product(plan) is not None,
    )


def held_lanes(plan: t.LinearPlan) -> int:
    """`LinearWork.held` of a plan."""
    return max(columns.padded for segment in plan.segments for columns in columns_of(segment))


def accumulators(plan: t.LinearPlan) -> int:
    """`LinearWork.accumulators` of a plan."""
    return max(len(segment.windows) * columns.parts for segment in plan.segments for columns in columns_of(segment))


def _group(plan: t.LinearPlan) -> int | None:
    scales = [window.scale for segment in plan.segments for window in segment.windows]
    groups = [scale.group for scale in scales if scale is not None]
    return math.gcd(*groups) if len(groups) == len(scales) else None  # a step within that lies within each; 0 counts for none


def _crowded(plan: t.LinearPlan) -> bool:
    """Whether an epilogue works on several parts, or takes norms over groups."""
    return any(segment.reductions or any(columns.parts > 1 for columns in columns_of(segment)) for segment in plan.segments)


def _joined(plan: t.LinearPlan) -> bool:
    """Whether an epilogue reads another tensor by row and column."""
    interner = Interner()
    stores = [store for segment in plan.segments for store in segment.stores]
    roots = [*(store.value for store in stores), *(c for store in stores for c in store.coords if isinstance(c, t.Expr))]
    return any(isinstance(expr, t.Load) and {t.R, t.C} <= interner.symbols(expr) for expr in t.parts_of(*roots))
