"""`python -m bench timeline`: where a decode step's time goes, kernel by kernel, as the step runs.

A kernel's own duration says little where the next one starts while it still runs (programmatic dependent launch), and nothing of the gap
before it. What a kernel costs the step is the time from its start to the next one's start: those add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import timing
from bench.comparators import Workload, reset, sentence
from bench.decode import STEPS, workloads
from bench.kernels import kernel_events, traced
from bench.limits import at_most
from bench.report import Report, Settings, figure
from bench.sides import SIDES, Side

REPLAYS = STEPS  # that are traced, as many as the cache has room for; the first one warms up, the last one has no successor


@dataclass(frozen=True)
class Slot:
    """One kernel of a step: microseconds from its start to the next kernel's, and its own duration; medians over steps."""

    name: str
    step: float
    own: float


def slots_of(events: Sequence[dict[str, Any]], steps: int) -> list[Slot]:
    """The kernels of one step in order, from the kernel events of `steps` equal steps (3 at least) in the order of their start.

    Raises ValueError where the events are not `steps` times the same kernels.
    """
    count, rest = divmod(len(events), steps)
    names = [event["name"] for event in events[:count]]
    if rest or not count or any([event["name"] for event in events[n * count : (n + 1) * count]] != names for n in range(steps)):
        raise ValueError(f"{len(events)} kernels are not {steps} times the same step: the profiler lost some, or steps differ")
    found = []
    for position, name in enumerate(names):
        numbers = [step * count + position for step in range(1, steps - 1)]
        found.append(
            Slot(
                name,
                statistics.median(events[number + 1]["ts"] - events[number]["ts"] for number in numbers),
                statistics.median(events[number]["dur"] for number in numbers),
            )
        )
    return found


def folded(slots: Sequence[Slot]) -> list[tuple[str, int, float, float]]:
    """Name, count, and the sums of both times of the kernels of one name, the costliest first."""
    found: dict[str, tuple[int, float, float]] = {}
    for slot in slots:
        count, step, own = found.get(slot.name, (0, 0.0, 0.0))
        found[slot.name] = (count + 1, step + slot.step, own + slot.own)
    return sorted(((name, *sums) for name, sums in found.items()), key=lambda item: -item[2])


def run(
    settings: Settings,
    cases: Sequence[str],
    batches: Sequence[int],
    layers: int | None,
    cache: int,
    live: int | None,
) -> Report:
    """The timeline of every case at every batch on every side."""
    report = Report("timeline", settings)
    report.measure_rates()
    for name, batch, work in workloads(settings, cases, batches, layers, cache, live):
        for side in settings.against:
            if report.fits(f"{work.title}: {side}", SIDES[side].seconds(work.size) if not settings.small else 0):
                report.add(_row(work, SIDES[side], report) | {"case": name, "batch": batch})
    return report


def _row(work: Workload, side: Side, report: Report) -> dict[str, Any]:
    row: dict[str, Any] = {"title": work.title, "side": side.name, "problem": "", "slots": []}
    try:
        with torch.no_grad(), at_most(report.settings.limit, f"compiling and warming up {side.name}"):
            reset()
            timer = timing.Timer(work.compile_for(side), work.prepare)
            for _ in range(3):
                timer.prepare()
                for call in timer.calls:
                    call()
            timing.synchronize()
            if torch.cuda.is_available():
                _trace(timer, side, row)
    except Exception as error:
        row["problem"] = sentence(error)
    _print(row, report.roofline(work.moved, work.flops, work.dtype), report)
    return row


def _trace(timer: timing.Timer, side: Side, row: dict[str, Any]) -> None:
    """Device time without a profiler, and the slots of a step with one."""
    if side.captures:
        timer.capture()
    timer.block()
    timer.times = timing.Times()
    for _ in range(5):
        timer.block()
    row["device ms"] = timer.times.summary()["device"]
    step = timer.graph.replay if timer.graph is not None else timer.calls[0]

    def steps() -> None:
        timing.sleep(2e-3)
        for _ in range(REPLAYS):
            step()

    timer.prepare()
    steps()
    timer.prepare()
    events = [event for event in kernel_events(traced(steps)) if "spin_kernel" not in event["name"]]
    row["slots"] = [vars(slot) for slot in slots_of(events, REPLAYS)]


def _print(row: dict[str, Any], floor: float | None, report: Report) -> None:
    if row["problem"] or not row["slots"]:
        report.say(f"{row['title']}, {row['side']}: {row['problem'] or 'no CUDA device, no timeline'}")
        return
    slots = [Slot(**slot) for slot in row["slots"]]
    total = sum(slot.step for slot in slots)
    lines = [
        (
            name.removeprefix("void ").split("<")[0],
            str(count),
            figure(step / count, ".2f"),
            figure(own / count, ".2f"),
            figure(step / total, ".3f"),
        )
        for name, count, step, own in folded(slots)
    ]
    floor_text = "" if floor is None else f", roofline {floor * 1e3:.1f}"
    report.table(
        f"{row['title']}, {row['side']}: {total:.1f} us a step under the profiler, {row['device ms'] * 1e3:.1f} without{floor_text}",
        ("kernel", "count", "us to next", "own us", "share"),
        lines,
    )
