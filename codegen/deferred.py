"""What of a linear's plan may be computed at another time than where it stands: a norm after the product, loads before the loop, the
first step of a loop behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import sympy
import torch
from dsi.ir import tile as t

from .kernel import Choice
from .pointwise import is_float


def deferred_norm(plan: t.LinearPlan, schedule: str) -> t.Expr | None:
    """The prologue without its factor 1 / rms, where the sums can be multiplied by it instead; None where they cannot.

    Rows are then read once: their squares are summed in the same loop as the products. x is rounded to the operand's dtype before the
    factor instead of after it, which is no less exact, but fp16 could overflow there: its products on the matrix units keep the norm
    where it is. Differences from a mean (LayerNorm) do not commute with the product without cancellation, and stay.
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
