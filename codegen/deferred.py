"""What of a linear's plan may be computed at another time than where it stands: a norm after the product, loads before the loop, the
first step of a loop behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import sympy
import torch
from dsi.ir import tile as t

from .columns import cuts_of
from .kernel import Choice
from .layout import Interner
from .pointwise import MOST_AT_ONCE, is_float

LONGEST_LAYER = 4096  # elements of a row whose layer norm is deferred: what its variance can lose stays below half precision's rounding
WIDEST_DEFERRED = 8  # columns of a gemv with a deferred norm: Triton 3.6's LLVM aborts (in its SLP vectoriser) on some with 16 and more


def deferred_norm(plan: t.LinearPlan, schedule: str) -> t.Expr | None:
    """The prologue without its factor 1 / rms, where the sums can be multiplied by it instead; None where they cannot.

    Rows are then read once: their squares are summed in the same loop as the products. x is rounded to the operand's dtype before the
    factor instead of after it, which is no less exact, but fp16 could overflow there: its products on the matrix units keep the norm
    where it is. A layer norm, which subtracts a mean, is another matter (`deferred_layer`).
    """
    if len(plan.reductions) != 1 or plan.reductions[0].kind != "rms" or schedule not in ("gemv", "skinny"):
        return None
    if schedule == "skinny" and plan.x_dtype == torch.float16:
        return None
    if plan.activations or any(mentions(store.value) for store in plan.row_stores) or not is_float(plan.x.dtype):
        return None
    return without_factor(plan.x)


def without_factor(expr: t.Expr) -> t.Expr | None:
    """A product without its factor `Statistic`; None if it is not such a product. Roundings between its factors go, too."""
    if not isinstance(expr, t.Op):
        return None
    if expr.name == "cast" and is_float(expr.dtype) and is_float(expr.args[0].dtype):
        return without_factor(expr.args[0])
    if expr.name != "mul":
        return None
    for one, other in (expr.args, expr.args[::-1]):
        if mentions(other):
            continue
        if isinstance(one, t.Statistic):
            return other
        rest = without_factor(one)
        if rest is not None:
            return t.Op("mul", (rest, other), torch.float32)
    return None


@dataclass(frozen=True)
class Affine:
    """Rows behind a layer norm: (body - mean) * rstd * `gain` + `bias`, without row statistics in either (None: 1, 0)."""

    gain: t.Expr | None = None
    bias: t.Expr | None = None
    whole: bool = False  # the factor rstd is in it

    def times(self, factor: t.Expr) -> Affine:
        """All of it times an expression."""
        return replace(self, gain=_product(self.gain, factor) or factor, bias=_product(self.bias, factor))


def deferred_layer(plan: t.LinearPlan, choice: Choice) -> Affine | None:
    """What a layer norm's result is multiplied by and added to, where a choice has the sums corrected by mean and deviation instead of the
    rows (codegen/behind.py), and that is possible and exact enough; None where not.

    Not in fp32, whose rounding is finer than what the variance loses, and not where programs share a sum.
    """
    most = max(len(segment.windows) * columns.parts for _, segment, columns in cuts_of(plan))
    return behind_product(plan) if is_deferred(choice, most) else None


def is_deferred(choice: Choice, sums: int) -> bool:
    """Whether a choice has a layer norm come behind `sums` sums that a program holds side by side, if the norm itself lets it."""
    one_program = choice.schedule == "gemv" and choice.split == 1 and not choice.apart and not choice.digits
    return choice.deferred and one_program and choice.block_n <= WIDEST_DEFERRED and 3 * sums + 2 <= MOST_AT_ONCE


def behind_product(plan: t.LinearPlan) -> Affine | None:
    """`deferred_layer` for whatever choice."""
    if len(plan.reductions) != 1 or plan.reductions[0].kind != "layer" or plan.x_dtype not in (torch.float16, torch.bfloat16):
        return None
    inner = sympy.sympify(plan.inner)
    if not inner.is_Integer or int(inner) > LONGEST_LAYER or sympy.sympify(plan.reductions[0].size) != inner:
        return None
    if plan.activations or any(mentions(store.value) for store in plan.row_stores):
        return None
    interner = Interner()
    found = affine(plan.x, plan.reductions[0].body, interner)
    if found is None or not found.whole:
        return None
    own = any(t.R in interner.symbols(part) for part in (found.gain, found.bias) if part is not None)  # each row has one of its own
    return None if own else found


def affine(expr: t.Expr, body: t.Expr, interner: Interner) -> Affine | None:
    """An expression in the mean and deviation of `body` as a factor and a term of (body - mean) * rstd, or of body - mean; None where it
    is neither. Roundings go."""
    if not isinstance(expr, t.Op) or not is_float(expr.dtype):
        return None
    if expr.name == "cast":
        return affine(expr.args[0], body, interner)
    if expr.name not in ("add", "sub", "mul"):
        return None
    one, other = expr.args
    if expr.name == "sub":
        mean = isinstance(other, t.Statistic) and other.which == "mean"
        return Affine() if mean and interner.number(one) == interner.number(body) else None
    for inner, outer in ((one, other), (other, one)):
        found = affine(inner, body, interner) if mentions(inner) else None
        if found is None:
            continue
        if isinstance(outer, t.Statistic):
            return replace(found, whole=True) if expr.name == "mul" and outer.which == "rstd" and not found.whole else None
        if mentions(outer):
            return None
        if expr.name == "mul":
            return found.times(outer)
        if not found.whole:
            return None
        return replace(found, bias=outer if found.bias is None else t.Op("add", (found.bias, outer), torch.float32))
    return None


def _product(value: t.Expr | None, factor: t.Expr) -> t.Expr | None:
    return None if value is None else t.Op("mul", (value, factor), torch.float32)


def mentions(expr: t.Expr) -> bool:
    """Whether a row statistic occurs in an expression."""
    return any(isinstance(part, t.Statistic) for part in t.parts_of(expr))


def constant(load: t.Load, constants: frozenset[int]) -> bool:
    """Whether all that a load reads are inputs that no kernel writes, those included that say where it reads (a gather's indices)."""
    return all(part.input in constants for part in t.parts_of(load) if isinstance(part, t.Load))


def peeled(spec: t.KernelSpec, choice: Choice) -> str:
    """When the first step of a program is multiplied that a choice takes out of the loop, so that its weights can be loaded before the
    kernel waits: "last", behind the loop, or "first", in the first of its turns. "" where none is: in `skinny` alone, where a program has
    several steps, and no kernel of the graph writes any of the weights."""
    plan = spec.plan
    if not choice.peel or choice.schedule != "skinny" or not isinstance(plan, t.LinearPlan):
        return ""
    if any(window.weight not in spec.constants for segment in plan.segments for window in segment.windows):
        return ""
    return peel_of(sympy.sympify(plan.inner), choice)


def peel_of(inner: sympy.Expr, choice: Choice) -> str:
    """`peeled` for `inner` contracted elements of weights that are constants. Raises ValueError for a way that there is not."""
    if choice.peel not in ("", "last", "first"):
        raise ValueError(f"a choice peels {choice.peel!r}; known ways: last, first")
    share = span_of(inner, choice)
    if choice.schedule != "skinny" or (share.is_Integer and int(share) <= choice.block_k):
        return ""
    every = inner.is_Integer and (choice.split - 1) * int(share) + choice.block_k < int(inner)  # program has a second step
    return "last" if choice.peel and not every else choice.peel


def span_of(inner: sympy.Expr | int, choice: Choice) -> sympy.Expr:
    """Elements of the contracted dimension that a program sums at most: all, or whole steps where programs share it."""
    inner = sympy.sympify(inner)
    if choice.split == 1:
        return inner
    return sympy.Integer(math.ceil(math.ceil(int(inner) / choice.split) / choice.block_k) * choice.block_k)


def unconditional(roots: Iterable[t.Expr]) -> Iterator[t.Load]:
    """The loads that an expression needs whatever a condition in it says, at the point itself."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        expr = stack.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        if isinstance(expr, t.Load):
            yield expr
        if isinstance(expr, t.Op) and expr.name == "where":
            stack.append(expr.args[0])
        elif not isinstance(expr, t.Permuted):
            stack.extend(t.children(expr))
