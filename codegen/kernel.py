"""What code generation hands to the runtime: source text and how to launch it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import sympy

ArgumentKind = Literal["input", "output", "size", "workspace"]


@dataclass(frozen=True)
class Argument:
    """One positional argument of a kernel, in the order of its signature.

    "input" and "output": the region's tensor `number`. "size": the integer `expr`, over the symbols of the region's sizes. "workspace":
    the kernel's workspace `number`.
    """

    kind: ArgumentKind
    number: int = 0
    expr: sympy.Expr | None = None


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that the runtime owns: `size` elements of the torch dtype named `dtype`; zeroed once, when it is made, if `zeroed`."""

    size: sympy.Expr
    dtype: str
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """`module.entry[grid](*arguments, **constants, num_warps=…, num_stages=…, **options)`; nothing is launched where a grid dimension is
    0."""

    entry: str
    arguments: tuple[Argument, ...]
    constants: dict[str, int | bool | float]
    grid: tuple[sympy.Expr, ...]
    num_warps: int
    num_stages: int
    # Triton's default for fused multiply-add has changed between versions, so it is always stated.
    options: dict[str, int | bool] = field(default_factory=lambda: {"enable_fp_fusion": True})
    words: tuple[int, ...] = ()  # positions of tensors of bytes that are read 16 at a time, and so must lie at multiples of 16


@dataclass(frozen=True)
class View:
    """A tensor as a library call sees it: `sizes` elements, `strides` apart, from element `offset` on of the region's input or output, or
    the workspace, with this `number`."""

    kind: ArgumentKind
    number: int
    sizes: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    offset: sympy.Expr | int = 0

    @property
    def transposed(self) -> View:
        """The view with its last two dimensions changed."""
        *sizes, rows, columns = self.sizes
        *strides, down, across = self.strides
        return View(self.kind, self.number, (*sizes, columns, rows), (*strides, across, down), self.offset)


@dataclass(frozen=True)
class LibraryCall:
    """A kernel of a library, by way of torch: "product" [M, K] x [K, N] -> [M, N], or "attention" of queries, keys and values, each [batch,
    heads, tokens, channels]. The last of the operands is written."""

    function: Literal["product", "attention"]
    operands: tuple[View, ...]
    options: dict[str, bool | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """One variant of a region's kernel, for at most `max_rows` rows (None: any number).

    Rows are the flattened leading dimensions of a linear or row region, and the queries of an attention region.
    """

    name: str
    source: str
    digest: str
    launches: tuple[Launch | LibraryCall, ...]
    max_rows: int | None
    schedule: str
    workspaces: tuple[Workspace, ...] = ()


def digest_of(source: str) -> str:
    """The hash that names a source text in dumps and caches."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Choice:
    """Everything about a variant that is not dictated by its plan, so that a tuner can vary it.

    `block_m` rows and `block_n` columns (attention: keys) a program, `block_k` inner elements a step, `block_s` columns a step of a pass
    for row statistics. All are powers of two. Where columns are held in groups, `block_n` counts them after padding to a power of two.

    `split` programs share the contracted dimension (attention: the keys) of one block, and the last to arrive finishes it. `apart`: a
    linear's prologue is a kernel of its own. `digits` int8 digits stand for an activation where the weights are int8 (0: the weights are
    converted instead); they are made apart. `peel`: a `skinny` program loads the weights of its first step before the kernel waits for the
    one before it, and multiplies them behind the loop over the other steps ("last"), or at the start of its first turn, beside which more
    shared memory is needed ("first"; as "last" where some program has but one step). Without effect where no program has more than one, or
    where kernels of the graph write the weights (deferred.peeled). `deferred` (`gemv`): a layer norm before the product corrects the sums
    instead of the rows, where that is possible (deferred.deferred_layer); an RMS norm's factor always comes after the sums.

    Attention: `block_m` rows are query heads of a key head for consecutive queries, of fewer than 16 no matrix units are used;
    `block_k` channels of a head are multiplied at once (1: all); `block_s` keys of the mask are looked at in one step before any key is
    read (1: it is not looked at); `prefetch` bytes of each of a program's first keys and values are asked for before the kernel waits for
    the one before it (0: none). `live` (decode, under a mask that is looked at) is what programs that share keys know of each other: "",
    nothing; "parts", who has keys that some row sees, and no other stays; "seen", that, and hidden keys are not read; "dealt", the first
    and the last key that some row sees, and only the blocks between them are dealt out. The next two are for decode without matrix units
    and one block of keys a program. `early`: values are asked for before anything waits for keys, by a barrier behind both; without it
    compilers put their loads off. `by_warp` (one row): each warp makes a softmax of its own keys, and one exchange joins those of all;
    `chunks` (any number) blocks of keys that lie behind one another are then taken at once as one.
    `overlaps` (decode): the kernel is launched while the one before it runs, and lets the next one start when its own wait is over; without
    it, it starts behind the one before it, and the next may start at once. `hint`: of what `prefetch` would ask for, only keys that the
    mask shows as it lies in memory before the wait, whoever wrote it: nothing is computed from that.
    """

    schedule: str
    max_rows: int | None
    block_m: int
    block_n: int
    block_k: int = 1
    block_s: int = 1
    num_warps: int = 4
    num_stages: int = 1
    split: int = 1
    prefetch: int = 0
    digits: int = 0
    apart: bool = False
    live: Literal["", "parts", "seen", "dealt"] = ""
    early: bool = False
    by_warp: bool = False
    chunks: int = 1
    overlaps: bool = False
    hint: bool = False
    peel: Literal["", "last", "first"] = ""
    deferred: bool = False
