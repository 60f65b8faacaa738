"""A closed-form model of a kernel's time, and the choice of block sizes by it.

The model knows three things: memory is read once at the device's bandwidth if enough programs ask for it, products run at the matrix (or
vector) rate of the padded tile, and programs come in waves over the processors. It ranks block sizes; it does not pretend to predict to
the microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import sympy
from dsi.ir import tile as t

from .columns import columns_of
from .devices import H200, Device
from .integers import normalise
from .kernel import Choice
from .layout import Interner, children

# Where a size is symbolic, what the model (not the kernel) takes it to be.
TYPICAL, TYPICAL_BATCH = 512, 4
# Candidates. Linear: (block_m, block_n, block_k, warps, stages); rows are filtered to what a variant can have, the rest is ranked by the
# model.
TILES_16 = (
    (16, 32, 128, 4, 3),
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 3),
    (32, 64, 64, 4, 3),
    (64, 64, 64, 4, 3),
    (64, 64, 64, 8, 3),
    (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 3),
    (128, 64, 64, 8, 3),
    (128, 128, 64, 8, 3),
)
TILES_32 = ((16, 32, 32, 4, 2), (16, 64, 32, 4, 2), (32, 32, 32, 4, 2), (32, 64, 32, 4, 2), (64, 64, 16, 8, 2))
# fp32 sums a thread holds; fewer where an epilogue works on several parts, or reads other tensors row by column; a quarter where the
# operands are fp32, which are multiplied out of registers.
SUMS_A_THREAD, SUMS_A_THREAD_BESIDE_LOADS = 64, 32
# Attention: (block_m, keys a step, warps, stages).
ATTENTION_TILES = (
    (16, 64, 4, 2),
    (16, 32, 4, 2),
    (16, 32, 8, 2),
    (32, 32, 8, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 8, 2),
    (64, 32, 8, 2),
    (128, 64, 8, 2),
)
# gemv: elements of the weight tile times rows that a program holds as partial sums, by warps.
GEMV_SUMS, GEMV_SUMS_32 = {4: 4096, 8: 8192}, {8: 4096}
GEMV_ROWS = 4
# Row buckets of a region with a symbolic row count; the last variant takes any number.
LINEAR_BUCKETS = (1, GEMV_ROWS, 16, 64, None)
ATTENTION_BUCKETS = (1, None)
LINE_BYTES = 64  # bytes that are cheap to read contiguously


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
        roots += [e for e in (plan.q, plan.k, plan.v, plan.mask, plan.bias) if e is not None]
    else:
        roots += [r.body for r in plan.reductions]
    yield from (expr for expr in within([*roots, *gathered]) if isinstance(expr, t.Load))


def within(roots: Iterable[t.Expr]) -> Iterator[t.Expr]:
    """Every subexpression of the roots, shared ones once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        expr = stack.pop()
        if id(expr) not in seen:
            seen.add(id(expr))
            yield expr
            stack.extend(children(expr))


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


# ------------------------------------------------------------------------------------------------------------------------- time


def rows_of(plan: t.Plan) -> sympy.Expr:
    """What `max_rows` counts: flattened rows, or queries."""
    return sympy.sympify(plan.queries if isinstance(plan, t.AttentionPlan) else plan.rows)


def assumed_rows(plan: t.Plan, choice: Choice) -> int:
    """The row count at which a variant is judged: the plan's, the largest the variant takes, or `TYPICAL`."""
    rows = rows_of(plan)
    return int(rows) if rows.is_Integer else choice.max_rows or TYPICAL


def assumptions(plan: t.Plan, choice: Choice) -> dict[sympy.Symbol, int]:
    """What the model takes size symbols to be: the last factor of the row count makes it `assumed_rows`, the others are 1."""
    rows = rows_of(plan)
    found: dict[sympy.Symbol, int] = {}
    if not rows.is_Integer:
        *others, last = sorted(rows.free_symbols, key=str)
        found = dict.fromkeys(others, 1)
        each = max(int(normalise(rows.xreplace({**dict.fromkeys(others, sympy.Integer(1)), last: sympy.Integer(1)}))), 1)
        found[last] = max(assumed_rows(plan, choice) // each, 1)
    if isinstance(plan, t.AttentionPlan):
        for symbol in sympy.sympify(plan.batch).free_symbols:
            found.setdefault(symbol, TYPICAL_BATCH)
        for symbol in sympy.sympify(plan.keys).free_symbols:
            found.setdefault(symbol, TYPICAL)
    return found


def evaluate(formula: sympy.Expr | int, assumed: dict[sympy.Symbol, int]) -> float:
    """A formula over sizes as a number; symbols that nothing is assumed of are `TYPICAL`."""
    formula = sympy.sympify(formula)
    return float(normalise(formula.xreplace({s: sympy.Integer(assumed.get(s, TYPICAL)) for s in formula.free_symbols})))


def predict(spec: t.KernelSpec, choice: Choice, device: Device = H200) -> float:
    """Seconds that a variant is expected to take on a device, the gap to the next kernel included."""
    plan = spec.plan
    rows = assumed_rows(plan, choice)
    itemsize = min((tensor.dtype.itemsize for tensor in spec.inputs if tensor is not None and tensor.dtype.is_floating_point), default=4)
    programs, padded, again = _shape(spec, choice, rows)
    waves = math.ceil(programs / device.processors)
    fill = programs / (waves * device.processors)
    # A program on every second processor can still draw about all of the bandwidth.
    memory = evaluate(traffic(spec), assumptions(plan, choice)) / (device.bandwidth * min(1.0, 2 * fill if waves == 1 else fill))
    # Blocks read again come from the L2 cache, at about 2.5 times the bandwidth of memory.
    memory = max(memory, again / (2.5 * device.bandwidth * min(1.0, 2 * fill)))
    rate = device.vector if choice.schedule == "gemv" else device.matrix.get(itemsize, device.vector)
    # Small tiles read their operands more often than they multiply: half of the rate at 64 x 64, most of it at 128 x 128.
    reuse = 1.0 if choice.schedule == "gemv" else (choice.block_m * choice.block_n) / (choice.block_m * choice.block_n + 64 * 64)
    return max(memory, padded / (rate * reuse * fill)) + device.launch


def _shape(spec: t.KernelSpec, choice: Choice, rows: int) -> tuple[int, float, float]:
    """Programs, operations with padding, and bytes that programs read in all."""
    plan = spec.plan
    if isinstance(plan, t.LinearPlan):
        blocks = math.ceil(rows / choice.block_m)
        inner = typical(plan.inner)
        programs, tiles = 0, 0
        for segment in plan.segments:
            for columns in columns_of(segment):
                count = math.ceil(typical(columns.positions) / columns.width(choice.block_n))
                programs += count * blocks
                tiles += count * blocks * len(segment.windows) * columns.parts
        height = choice.block_m if choice.schedule == "gemv" else max(choice.block_m, 16)
        itemsize = plan.x_dtype.itemsize
        again = tiles * choice.block_n * inner * itemsize + programs * min(choice.block_m, rows) * inner * itemsize
        return programs, 2.0 * tiles * height * choice.block_n * inner, again
    if isinstance(plan, t.AttentionPlan):
        group = plan.heads // plan.kv_heads
        blocks = math.ceil(rows * group / choice.block_m)
        assumed = assumptions(plan, choice)
        programs = int(evaluate(plan.batch, assumed)) * plan.kv_heads * blocks
        keys = int(evaluate(plan.keys, assumed))
        sizes = power_of_two(plan.head_size) + power_of_two(plan.value_size)
        return programs, 2.0 * programs * choice.block_m * keys * sizes, programs * keys * sizes * plan.dtype.itemsize
    programs = math.ceil(rows / choice.block_m) * (1 if plan.reductions else math.ceil(typical(plan.columns) / choice.block_n))
    return programs, 0.0, 0.0


# ----------------------------------------------------------------------------------------------------------------------- choices


def choices(spec: t.KernelSpec, device: Device = H200) -> tuple[Choice, ...]:
    """The variants of a region's kernel in ascending `max_rows`, each with the blocks that the model ranks first."""
    plan = spec.plan
    rows = rows_of(plan)
    if isinstance(plan, t.RowPlan):
        return (_row_choice(plan),)
    buckets: tuple[int | None, ...] = ATTENTION_BUCKETS if isinstance(plan, t.AttentionPlan) else LINEAR_BUCKETS
    if rows.is_Integer:
        buckets = (next((b for b in buckets if b is None or int(rows) <= b), None),)
    result = []
    for bucket in buckets:
        limit = int(rows) if rows.is_Integer else bucket
        if isinstance(plan, t.AttentionPlan):
            candidates = list(_attention_candidates(plan, limit))
        elif limit is not None and limit <= GEMV_ROWS:
            candidates = list(_gemv_candidates(plan, limit))
        else:
            candidates = list(_tiled_candidates(plan, limit))
        best = min(candidates, key=lambda choice: (predict(spec, choice, device), -choice.block_n))
        result.append(Choice(**{**vars(best), "max_rows": None if rows.is_Integer or bucket is None else bucket}))
    return tuple(result)


def held_lanes(plan: t.LinearPlan) -> int:
    """Positions that a block must have so that it holds whole groups of every segment that needs them; 1 where none does."""
    return max(columns.padded for segment in plan.segments for columns in columns_of(segment))


def accumulators(plan: t.LinearPlan) -> int:
    """The most sums that a program holds side by side."""
    return max(len(segment.windows) * columns.parts for segment in plan.segments for columns in columns_of(segment))


def crowded(plan: t.LinearPlan) -> bool:
    """Whether an epilogue needs registers for more than its sums: several parts, norms over groups, or loads by row and column."""
    for segment in plan.segments:
        if segment.reductions or any(columns.parts > 1 for columns in columns_of(segment)):
            return True
        interner = Interner()
        roots = [
            *(store.value for store in segment.stores),
            *(c for store in segment.stores for c in store.coords if isinstance(c, t.Expr)),
        ]
        if any(isinstance(expr, t.Load) and {t.R, t.C} <= interner.symbols(expr) for expr in within(roots)):
            return True
    return False


def _gemv_candidates(plan: t.LinearPlan, rows: int) -> Iterator[Choice]:
    height, group = power_of_two(max(rows, 1)), held_lanes(plan)
    windows = accumulators(plan)
    inner = power_of_two(typical(plan.inner))
    line = LINE_BYTES // plan.x_dtype.itemsize
    found = False
    for warps, sums in (GEMV_SUMS_32 if plan.x_dtype.itemsize == 4 else GEMV_SUMS).items():
        for block_n in (4, 8, 16, 32, 64, 128, 256):
            if block_n < group or (block_n > group and block_n > 32):
                continue
            block_k = min(power_of_two(sums // (height * block_n * windows)), inner, 1024)
            if block_k >= min(line, inner) or block_n == group:
                found = True
                yield Choice("gemv", rows, height, block_n, max(block_k, 8), _statistics_block(plan, height, warps), warps, 1)
    if not found:  # a group wider than any block, or more sums side by side than a program should hold
        yield Choice("gemv", rows, height, max(group, 4), 8, _statistics_block(plan, height, 8), 8, 1)


def _tiled_candidates(plan: t.LinearPlan, rows: int | None) -> Iterator[Choice]:
    group, windows = held_lanes(plan), accumulators(plan)
    wide = plan.x_dtype.itemsize == 4
    inner = max(power_of_two(typical(plan.inner)), 16)
    found = False
    for block_m, block_n, block_k, warps, stages in TILES_32 if wide else TILES_16:
        if rows is not None and block_m > max(power_of_two(rows), 16):
            continue
        if rows is None and block_m < (32 if wide else 64) and group == 1:
            continue
        budget = warps * 32 * (SUMS_A_THREAD_BESIDE_LOADS if crowded(plan) else SUMS_A_THREAD) // (4 if wide else 1)
        while block_n > 16 and windows * block_m * block_n > budget:
            block_n //= 2
        if block_n < group:
            block_n = group
        if windows * block_m * block_n > budget:
            continue
        found = True
        yield Choice("tiled", rows, block_m, block_n, min(block_k, inner), _statistics_block(plan, block_m, warps), warps, stages)
    if not found:
        yield Choice("tiled", rows, 16, max(group, 16), min(32, inner), _statistics_block(plan, 16, 8), 8, 2)


def _statistics_block(plan: t.LinearPlan, block_m: int, warps: int) -> int:
    """Columns a step of the passes over rows: what keeps 32 values a thread, at most the whole row."""
    return max(min(warps * 1024 // block_m, power_of_two(typical(plan.inner)), 4096), 16)


def _attention_candidates(plan: t.AttentionPlan, queries: int | None) -> Iterator[Choice]:
    group = plan.heads // plan.kv_heads
    widest = power_of_two(max(plan.head_size, plan.value_size))
    wide = plan.dtype.itemsize == 4
    for block_m, block_n, warps, stages in ATTENTION_TILES:
        if queries is not None and block_m > max(power_of_two(queries * group), 16):
            continue
        # Scores beside which a mask or bias is read: 8 a thread.
        scores = warps * (1024 if plan.mask is None and plan.bias is None else 256)
        # Sums of the output and scores: at most 32 fp32 values a thread each (16 where a head is wider than 128); keys and values in
        # shared memory.
        if block_m * widest > warps * (1024 if widest <= 128 else 512) or block_m * block_n > scores or block_n * widest > 64 * 128:
            continue
        if wide and (block_m > 32 or block_n > 32 or block_m * widest > 16 * 128 or (block_m + block_n) * widest > warps * 1024):
            continue
        yield Choice("attention", queries, block_m, block_n, 1, 1, warps, stages)
    if widest > (128 if wide else 256):
        yield Choice("attention", queries, 16, 16, 1, 1, 8, 1)


def _row_choice(plan: t.RowPlan) -> Choice:
    columns = typical(plan.columns)
    known = sympy.sympify(plan.columns).is_Integer
    if plan.reductions:
        block_n = min(power_of_two(columns), 8192) if known else 1024
    else:
        block_n = min(power_of_two(columns), 1024)
    warps = 8 if block_n > 2048 else 4
    block_m = max(1024 // block_n, 1)
    rows = sympy.sympify(plan.rows)
    if rows.is_Integer:
        block_m = min(block_m, power_of_two(int(rows)))
    return Choice("row", None, block_m, block_n, 1, 1, warps, 1)
