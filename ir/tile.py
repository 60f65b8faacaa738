"""Tile expressions and plans: what a region computes at one point of a tile, as data.

A plan is made from a region's graph by `ir.analysis.plan_region` and is all that code generation reads: a kernel knows no model and no FX
graph. Values are given *at a point*: the point is named by sympy symbols (row r, column c, inner k, …), and a view of a tensor is nothing
but another way to compute coordinates from those symbols. A region is legal exactly when its plan can be made; the reasons why not are the
ten region rules.

Arithmetic on floats is fp32 whatever the dtype of the values; `Op(dtype=…)` of a cast rounds. Integers and bools are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import sympy
import torch

# Symbols of the tile. All are integers >= 0; their ranges are in the plan.
R = sympy.Symbol("r", integer=True, nonnegative=True)  # row: the anchor's leading dimensions, flattened
C = sympy.Symbol("c", integer=True, nonnegative=True)  # column within a segment
K = sympy.Symbol("k", integer=True, nonnegative=True)  # contracted dimension of a linear
B = sympy.Symbol("b", integer=True, nonnegative=True)  # attention: batch
H = sympy.Symbol("h", integer=True, nonnegative=True)  # attention: query head
G = sympy.Symbol("g", integer=True, nonnegative=True)  # attention: key/value head
S = sympy.Symbol("s", integer=True, nonnegative=True)  # attention: query position
J = sympy.Symbol("j", integer=True, nonnegative=True)  # attention: key position
D = sympy.Symbol("d", integer=True, nonnegative=True)  # attention: head channel of q and k
E = sympy.Symbol("e", integer=True, nonnegative=True)  # attention: head channel of v and of the output


class Expr:
    """A scalar at one point of the tile. Subclasses are frozen dataclasses, so equal expressions compare and hash equal."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Load(Expr):
    """Region input number `input` at `coords`, one per dimension of the input: sympy integers, or integer-valued `Expr` for a gather."""

    input: int
    coords: tuple[sympy.Expr | Expr, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Window(Expr):
    """The anchor's result at this point: accumulator number `index` of the segment (linear), or the attention output (index 0). fp32."""

    index: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Const(Expr):
    """A literal."""

    value: float | int | bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Index(Expr):
    """An integer computed from the tile's symbols and the sizes (an `arange`)."""

    expr: sympy.Expr
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Test(Expr):
    """A sympy relation over the tile's symbols, as a bool (which part of a `cat` a point lies in)."""

    condition: sympy.Basic
    dtype: torch.dtype = torch.bool


@dataclass(frozen=True)
class Op(Expr):
    """A pointwise operation `name` (see `ir.pointwise.POINTWISE`) on values at this point; `dtype` is that of the graph's value.

    "cast" converts to `dtype` (rounding); "where" selects.
    """

    name: str
    args: tuple[Expr, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Statistic(Expr):
    """A per-row scalar: `which` ("mean" or "rstd") of reduction `reduction` of the plan (of the segment, for a held reduction)."""

    reduction: int
    which: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Permuted(Expr):
    """`body` with `symbol` replaced by `source`, a permutation inside a held group of columns (the partner channel of rope).

    Only made where the body reads a `Window`: a permuted load is simply a load at other coordinates.
    """

    body: Expr
    symbol: sympy.Symbol
    source: sympy.Expr
    dtype: torch.dtype


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly within one."""
    if isinstance(expr, Op):
        return expr.args
    if isinstance(expr, Load):
        return tuple(c for c in expr.coords if isinstance(c, Expr))
    if isinstance(expr, Permuted):
        return (expr.body,)
    return ()


def parts_of(*roots: Expr) -> Iterator[Expr]:
    """The roots and everything within them, shared parts once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        part = stack.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            stack.extend(children(part))


@dataclass(frozen=True)
class Reduction:
    """Row statistics: `kind` "layer" (mean and rstd) or "rms" (rstd only) of `body` over `over` in [0, size). Computed in fp32."""

    kind: str
    body: Expr
    over: sympy.Symbol
    size: sympy.Expr
    eps: float


@dataclass(frozen=True)
class Store:
    """Region output `output` at `coords` (one per dimension) becomes `value`, rounded to `dtype`, wherever the tile's point is in range.

    `base`: None for a fresh tensor of which every element is written by exactly one point; else the region input whose contents the output
    starts from (a KV cache): the output is then that input itself where lowering allows it, a clone where not.
    """

    output: int
    coords: tuple[sympy.Expr | Expr, ...]
    value: Expr
    dtype: torch.dtype
    base: int | None = None


@dataclass(frozen=True)
class Scale:
    """The scales of a quantised weight: element (n, k) of the weight is its int8 times `input[coords]`, an fp32 or fp16 tensor.

    `coords` are expressions in c and k; `group` consecutive elements of k, from a multiple of it on, share one scale (0: all of a row do,
    so that it can be applied to the finished sum).
    """

    input: int
    coords: tuple[sympy.Expr, ...]
    group: int = 0


@dataclass(frozen=True)
class WeightWindow:
    """One accumulator of a segment: column c contracts with row `n(c)` of weight input `weight` (stored [N, K], or [K, N] if `kn`), which
    holds int8 where there is a `scale`."""

    weight: int
    n: sympy.Expr
    kn: bool = False
    scale: Scale | None = None

    def across(self, weight: Tensor) -> bool:
        """Whether `weight`, this window's tensor (it may be a transposed view), lies across: what is side by side in memory are columns."""
        down, along = weight.strides[0 if self.kn else 1], weight.strides[1 if self.kn else 0]
        return bool(down != 1 and along == 1)


@dataclass(frozen=True)
class Segment:
    """Columns 0 <= c < `size` with one epilogue.

    `hold`: the columns come in aligned groups of this many that one program must own whole (1 where no column looks at another): the head
    size where rope or a per-head norm is in the epilogue. `reductions` are statistics over a held group (c % hold), bodies read windows.
    """

    size: sympy.Expr
    windows: tuple[WeightWindow, ...]
    stores: tuple[Store, ...]
    hold: int = 1
    reductions: tuple[Reduction, ...] = ()


@dataclass(frozen=True)
class LinearPlan:
    """out[r, c] = sum over k of x(r, k) * weight(n(c), k), per window, then the epilogue.

    `x` is the prologue: an expression in r and k, rounded to `x_dtype` before the product. `reductions` are statistics over k that `x`
    uses. `row_stores` are values of the prologue that escape (in r and k): stored once a row, by the first column program.
    `activations`: "int8" where rows of x are rounded to int8 before the product (`ir.quantised_ops.quantise_rows`); weights are int8 then.
    """

    rows: sympy.Expr
    inner: sympy.Expr
    x: Expr
    x_dtype: torch.dtype
    segments: tuple[Segment, ...]
    reductions: tuple[Reduction, ...] = ()
    row_stores: tuple[Store, ...] = ()
    activations: str = ""


@dataclass(frozen=True)
class AttentionPlan:
    """Scaled dot-product attention as `ir.ops.attention` defines it.

    q in (b, h, s, d); k in (b, g, j, d); v in (b, g, j, e); mask and bias in (b, h, s, j); sinks in (h); stores in (b, h, s, e) over
    `Window(0)`.
    g = h // (heads / kv_heads).
    """

    batch: sympy.Expr
    heads: int
    kv_heads: int
    queries: sympy.Expr
    keys: sympy.Expr
    head_size: int
    value_size: int
    q: Expr
    k: Expr
    v: Expr
    mask: Expr | None
    bias: Expr | None
    scale: float
    causal: bool
    window: int
    softcap: float
    stores: tuple[Store, ...]
    dtype: torch.dtype  # of q, and so of both products' operands
    sinks: Expr | None = None


@dataclass(frozen=True)
class RowPlan:
    """Elementwise and row-reduction work without a contraction: stores over rows r and columns c (embedding, norms, pointwise).

    Every store and every reduction has the same `rows` and `columns`; a program owns whole rows where `reductions` is not empty.
    """

    rows: sympy.Expr
    columns: sympy.Expr
    stores: tuple[Store, ...]
    reductions: tuple[Reduction, ...] = ()


Plan = LinearPlan | AttentionPlan | RowPlan


@dataclass
class Tensor:
    """What a kernel knows of a region input or output: symbolic sizes and strides (in elements), dtype."""

    name: str
    sizes: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    dtype: torch.dtype


@dataclass
class KernelSpec:
    """All that code generation is given: the plan, its tensors in order, and what the header prints."""

    name: str
    plan: Plan
    inputs: list[Tensor]
    outputs: list[Tensor]
    scalars: list[tuple[str, int]] = field(default_factory=list)  # symbolic sizes passed as SymInt inputs: (symbol name, input number)
    nodes: list[str] = field(default_factory=list)  # "name = target(args)", one a member, in order
    source_lines: list[str] = field(default_factory=list)  # model source lines, "file.py:12  code"
    constants: frozenset[int] = frozenset()  # inputs that no kernel of the graph writes: they may be read before its kernels have ended
    library: bool = False  # whether kernels of libraries (cuBLAS, SDPA) may be used
