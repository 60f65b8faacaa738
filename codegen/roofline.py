"""What a plan must at least move and compute: bytes and operations as formulas over its sizes, and what sizes are taken to be where they
are symbolic."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
from dsi.ir import tile as t

from .integers import normalise
from .kernel import Choice

# Where a size is symbolic, what the model (not the kernel) takes it to be.
TYPICAL, TYPICAL_BATCH = 512, 4


def power_of_two(size: int) -> int:
    """The smallest power of two >= size."""
    return 1 << max(int(size) - 1, 0).bit_length()


def typical(size: sympy.Expr | int) -> int:
    """A number for a size: itself, or with `TYPICAL` for every symbol."""
    expr = sympy.sympify(size)
    if expr.is_Integer:
        return int(expr)
    return max(int(normalise(expr.xreplace({s: sympy.Integer(TYPICAL) for s in expr.free_symbols}))), 1)


# ------------------------------------------------------------------------------------------------------------------ bytes, flops


def loads(plan: t.Plan) -> Iterator[t.Load]:
    """Every load in the plan's expressions, the weights apart."""
    roots: list[t.Expr] = [s.value for s in all_stores(plan)]
    gathered = [c for s in all_stores(plan) for c in s.coords if isinstance(c, t.Expr)]
    if isinstance(plan, t.LinearPlan):
        roots += [plan.x, *(r.body for r in plan.reductions), *(r.body for s in plan.segments for r in s.reductions)]
    elif isinstance(plan, t.AttentionPlan):
        roots += [e for e in (plan.q, plan.k, plan.v, plan.mask, plan.bias, plan.sinks) if e is not None]
    else:
        roots += [r.body for r in plan.reductions]
    yield from (expr for expr in t.parts_of(*roots, *gathered) if isinstance(expr, t.Load))


def all_stores(plan: t.Plan) -> tuple[t.Store, ...]:
    """Every store of a plan."""
    if isinstance(plan, t.LinearPlan):
        return (*plan.row_stores, *(s for segment in plan.segments for s in segment.stores))
    return plan.stores


def traffic(spec: t.KernelSpec) -> sympy.Expr:
    """Bytes that must be read and written at least, as a formula over the sizes: each element once, of a gathered tensor only what is
    asked for."""
    plan, total = spec.plan, sympy.Integer(0)
    points = _points(plan)
    inputs: dict[int, sympy.Expr] = {}
    for load in loads(plan):
        tensor = spec.inputs[load.input]
        numel = sympy.prod([sympy.sympify(s) for s in tensor.sizes])
        if any(isinstance(c, t.Expr) for c in load.coords):
            numel = points if not points.is_Integer or not numel.is_Integer else sympy.Integer(min(int(points), int(numel)))
        inputs[load.input] = numel * tensor.dtype.itemsize
    if isinstance(plan, t.LinearPlan):
        for segment in plan.segments:
            for window in segment.windows:
                size = sympy.sympify(segment.size) * plan.inner * spec.inputs[window.weight].dtype.itemsize
                inputs[window.weight] = inputs.get(window.weight, sympy.Integer(0)) + size
                if window.scale is not None:
                    scales = spec.inputs[window.scale.input]
                    inputs[window.scale.input] = sympy.prod([sympy.sympify(n) for n in scales.sizes]) * scales.dtype.itemsize
        for segment in plan.segments:
            total += sum((plan.rows * segment.size * s.dtype.itemsize for s in segment.stores), sympy.Integer(0))
        total += sum((plan.rows * plan.inner * s.dtype.itemsize for s in plan.row_stores), sympy.Integer(0))
    else:
        total += sum((points * s.dtype.itemsize for s in plan.stores), sympy.Integer(0))
    return sympy.sympify(sum(inputs.values(), total))


def _points(plan: t.Plan) -> sympy.Expr:
    if isinstance(plan, t.LinearPlan):
        return sympy.sympify(plan.rows) * plan.inner
    if isinstance(plan, t.AttentionPlan):
        return sympy.sympify(plan.batch) * plan.heads * plan.queries * plan.value_size
    return sympy.sympify(plan.rows) * plan.columns


def work(plan: t.Plan) -> sympy.Expr:
    """Floating point operations of the contractions, a multiply-add counted twice, as a formula over the sizes."""
    if isinstance(plan, t.LinearPlan):
        return sympy.sympify(
            2 * plan.rows * plan.inner * sum((sympy.sympify(s.size) * len(s.windows) for s in plan.segments), sympy.Integer(0))
        )
    if isinstance(plan, t.AttentionPlan):
        return sympy.sympify(2 * plan.batch * plan.heads * plan.queries * plan.keys * (plan.head_size + plan.value_size))
    return sympy.Integer(0)


# ------------------------------------------------------------------------------------------------------------------- assumed sizes


def rows_of(plan: t.Plan) -> sympy.Expr:
    """What `max_rows` counts: flattened rows, or queries."""
    return sympy.sympify(plan.queries if isinstance(plan, t.AttentionPlan) else plan.rows)


def assumed_rows(plan: t.Plan, choice: Choice) -> int:
    """The row count at which a variant is judged: the plan's, the largest the variant takes, or `TYPICAL`."""
    rows = rows_of(plan)
    return int(rows) if rows.is_Integer else choice.max_rows or TYPICAL


def assumptions(plan: t.Plan, choice: Choice) -> dict[sympy.Symbol, int]:
    """What the model takes size symbols to be: the last factor of the row count makes it `assumed_rows`, the others are 1, or as large as
    a division by them needs (windows of an image: by H // 2)."""
    rows = rows_of(plan)
    found: dict[sympy.Symbol, int] = {}
    if not rows.is_Integer:
        symbols = sorted(rows.free_symbols, key=str)
        each, least = _at_least(rows, dict.fromkeys(symbols, 1))
        found = dict.fromkeys(symbols, least)
        found[symbols[-1]] = max(assumed_rows(plan, choice) * least // max(int(each), 1), least)
    if isinstance(plan, t.AttentionPlan):
        for symbol in sympy.sympify(plan.batch).free_symbols:
            found.setdefault(symbol, TYPICAL_BATCH)
        for symbol in sympy.sympify(plan.keys).free_symbols:
            found.setdefault(symbol, TYPICAL)
    return found


def evaluate(formula: sympy.Expr | int, assumed: dict[sympy.Symbol, int]) -> float:
    """A formula over sizes as a number; symbols that nothing is assumed of are `TYPICAL`."""
    formula = sympy.sympify(formula)
    return float(_at_least(formula, {s: assumed.get(s, TYPICAL) for s in formula.free_symbols})[0])


def _at_least(formula: sympy.Expr, sizes: dict[sympy.Symbol, int]) -> tuple[sympy.Expr, int]:
    """The formula at these sizes, each raised to the least power of two at which nothing is divided by 0; and that power."""
    least = 1
    while True:
        try:
            return normalise(formula.xreplace({s: sympy.Integer(max(size, least)) for s, size in sizes.items()})), least
        except ZeroDivisionError:
            if least > TYPICAL:
                raise
            least *= 2
