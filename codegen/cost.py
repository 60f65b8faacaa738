"""How long a kernel should take, and which choices of blocks are worth having for it.

The model is closed form: arithmetic over a plan's sizes and a device's rates. It ranks choices; it does not pretend to predict to the
microsecond. `candidates` lists what a tuner may try, best first; `choices` is what is used where nothing was measured: the table of
measured defaults, else the model's first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dsi.ir import tile as t

from .attention_choices import attention_candidates
from .attention_cost import attention_seconds, attention_work
from .defaults import lookup
from .devices import H200, Device
from .kernel import Choice
from .library import library_seconds, possible
from .linear_choices import GEMV_ROWS, linear_candidates
from .linear_cost import linear_seconds
from .linear_work import accumulators, held_lanes, linear_work
from .roofline import all_stores, assumed_rows, assumptions, evaluate, rows_of, traffic, typical, work
from .row_choices import row_choice

__all__ = [
    "Choice",
    "accumulators",
    "all_stores",
    "assumptions",
    "buckets",
    "candidates",
    "choices",
    "evaluate",
    "held_lanes",
    "predict",
    "rows_of",
    "traffic",
    "work",
]

# Row buckets of a region with a symbolic row count; the last variant takes any number.
LINEAR_BUCKETS = (1, GEMV_ROWS, 16, 32, 64, 256, None)
LIBRARY_ROWS = 64  # from which on, rows apart, a library's kernels are tried
LEAST_AHEAD = 4  # choices that the model may rank before a library's: so many are always tried
ATTENTION_BUCKETS = (1, 16, None)


# ------------------------------------------------------------------------------------------------------------------------- time


def predict(spec: t.KernelSpec, choice: Choice, device: Device = H200) -> float:
    """Seconds that a variant is expected to take on a device, the gap to the next kernel included."""
    plan, rows = spec.plan, assumed_rows(spec.plan, choice)
    assumed = assumptions(plan, choice)
    if choice.schedule == "library":
        return library_seconds(spec, rows, assumed, device)
    if isinstance(plan, t.LinearPlan):
        return linear_seconds(linear_work(spec, rows, assumed), choice, device)
    if isinstance(plan, t.AttentionPlan):
        return attention_seconds(attention_work(spec, rows, assumed), choice, device)
    programs, operations, again = _shape(plan, choice, rows)
    waves = math.ceil(programs / device.processors)
    fill = programs / (waves * device.processors)
    # A program on every second processor can still draw about all of the bandwidth.
    memory = evaluate(traffic(spec), assumed) / (device.bandwidth * min(1.0, 2 * fill if waves == 1 else fill))
    memory = max(memory, again / (device.cache * min(1.0, 2 * fill)))
    return max(memory, operations / (device.vector * fill)) + device.launch


def _shape(plan: t.Plan, choice: Choice, rows: int) -> tuple[int, float, float]:
    """Programs, operations with padding, and bytes that programs read in all, of a region without a contraction."""
    assert isinstance(plan, t.RowPlan)
    programs = math.ceil(rows / choice.block_m) * (1 if plan.reductions else math.ceil(typical(plan.columns) / choice.block_n))
    return programs, 0.0, 0.0


# ----------------------------------------------------------------------------------------------------------------------- choices


def choices(spec: t.KernelSpec, device: Device = H200) -> tuple[Choice, ...]:
    """The variants of a region's kernel in ascending `max_rows`, the last for any number; one where the number of rows is known."""
    return tuple(lookup(spec, bucket, device.name) or candidates(spec, bucket, device)[0] for bucket in buckets(spec.plan))


def buckets(plan: t.Plan) -> tuple[int | None, ...]:
    """The `max_rows` of a region's variants."""
    if isinstance(plan, t.RowPlan) or rows_of(plan).is_Integer:
        return (None,)
    return ATTENTION_BUCKETS if isinstance(plan, t.AttentionPlan) else LINEAR_BUCKETS


def candidates(spec: t.KernelSpec, max_rows: int | None = None, device: Device = H200) -> Sequence[Choice]:
    """Choices for a region of at most `max_rows` rows (None: any number, or the number that its plan has), best first by the model; never
    empty, and at most a few dozen. With many rows a library's kernels are among them, where the specification allows it."""
    plan, rows = spec.plan, rows_of(spec.plan)
    limit = int(rows) if rows.is_Integer else max_rows
    if isinstance(plan, t.RowPlan):
        return (row_choice(plan),)
    judged = Choice("", limit, 1, 1)
    count, assumed = assumed_rows(plan, judged), assumptions(plan, judged)
    found: Sequence[Choice]
    if isinstance(plan, t.AttentionPlan):
        found = attention_candidates(attention_work(spec, count, assumed), limit, device)
    else:
        found = linear_candidates(linear_work(spec, count, assumed), limit, device)
    if spec.library and (limit is None or limit > LIBRARY_ROWS) and possible(spec, by_library := Choice("library", limit, 1, 1)):
        seconds = library_seconds(spec, count, assumed, device)
        ahead = sum(predict(spec, dataclasses.replace(choice, max_rows=limit), device) <= seconds for choice in found[:LEAST_AHEAD])
        found = [*found[:ahead], by_library, *found[ahead:]]
    return tuple(dataclasses.replace(choice, max_rows=None if rows.is_Integer else max_rows) for choice in found)
