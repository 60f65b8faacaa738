"""Choosing a region's kernels by trying them on the device, within a budget of seconds.

The choices that the model ranks first are compiled side by side, then timed by turns. The winner is kept on disk under the region's key,
so that every equal region has it, in this process and in later ones. The same timings give the same winner: of two that are as fast, the
one that the model ranks higher.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch
from dsi.codegen import cost
from dsi.codegen.devices import Device
from dsi.codegen.kernel import Choice
from dsi.ir.context import Context
from dsi.ir.errors import Refused
from dsi.ir.region import Region

from .choices import untuned, winner, write_winner
from .trial import Candidate, Subject, index_ranges

TRIED = 10  # choices a subject
THREADS = 8
COMPILING = 0.7  # share of the budget after which no further choice is compiled
SPENT = "the seconds for tuning were spent"
ALIKE = 0.01  # a choice that the model ranks lower must be faster by more than this share


class Trials(Protocol):
    """How choices are tried: on the device, or a test's way."""

    def compile(self, subject: Subject, choice: Choice) -> Candidate:
        """Compiles a choice; called from several threads. Raises where it cannot be compiled."""

    def time(self, subject: Subject, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds a launch of each."""


@dataclass
class Outcome:
    """What was tried for a subject: seconds by choice in ranked order, None with a reason for a choice that was not timed."""

    subject: Subject
    choices: Sequence[Choice]
    compiled: list[Candidate | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    sole: int | None = None  # the only choice that can be launched, where there is but one: there is nothing to time

    @property
    def best(self) -> int | None:
        """The number of the fastest choice that was timed, or of the only one that can be launched; None where there is neither."""
        best, least = self.sole, float("inf")
        for number, found in enumerate(self.seconds):
            if found is not None and found < (1 - ALIKE) * least:
                best, least = number, found
        return best

    def lines(self) -> list[str]:
        """A line for each choice, the winner marked."""
        rows = "any number of rows" if self.subject.max_rows is None else f"at most {self.subject.max_rows} rows"
        lines = [f"{self.subject.spec.name} {self.subject.key}, {rows}"]
        for number, choice in enumerate(self.choices):
            found = self.seconds[number] if number < len(self.seconds) else None
            text = f"{found * 1e6:9.2f} us" if found is not None else f"   skipped: {self.reasons[number]}"
            fields = " ".join(f"{f.name}={getattr(choice, f.name)}" for f in dataclasses.fields(choice) if f.name != "schedule")
            lines.append(f"  {'*' if number == self.best else ' '} {text}  {choice.schedule} {fields}")
        return lines


def tune(
    regions: Sequence[Region],
    context: Context,
    trials: Trials,
    device: str,
    figures: Device,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Finds and keeps winners for the kernels of `regions` that have none yet; whether it found any.

    `device` names the device as caches are keyed, `figures` are what the cost model knows of it. The report says what was won.
    """
    start, budget = clock(), context.options.tuning
    outcomes = [Outcome(subject, _ranked(subject, device, figures)) for subject in _subjects(regions, context, device)]
    outcomes = [outcome for outcome in outcomes if len(outcome.choices) > 1 and _can_be_tried(outcome.subject, context)]
    if not outcomes:
        return False
    _compile(outcomes, trials, lambda: start + COMPILING * budget - clock())
    notes: list[str] = []
    for outcome in outcomes:
        if clock() - start >= budget:
            _skip_rest(outcome, SPENT)
        else:
            _time(outcome, trials, notes)
        outcome.compiled = []  # their code is unloaded
        if (best := outcome.best) is not None:
            write_winner(device, context.options.cache, outcome.subject.key, outcome.subject.max_rows, outcome.choices[best])
    _report(outcomes, notes, clock() - start, context)
    return any(outcome.best is not None for outcome in outcomes)


def _subjects(regions: Sequence[Region], context: Context, device: str) -> list[Subject]:
    found: dict[tuple[str, int | None], Subject] = {}
    for region in regions:
        if region.spec is not None and region.key:
            for bucket in cost.buckets(region.spec.plan):
                if winner(device, context.options.cache, region.key, bucket) is None:
                    found.setdefault((region.key, bucket), Subject(region.key, region.spec, bucket))
    return list(found.values())


def _can_be_tried(subject: Subject, context: Context) -> bool:
    """Whether it is known what data to try a subject with; if not, the report says so, and nothing is compiled for it."""
    try:
        index_ranges(subject.spec, subject.assumed)
    except Refused as refused:
        context.report.notes += {str(refused)} - {*context.report.notes}
        return False
    return True


def _ranked(subject: Subject, device: str, figures: Device) -> list[Choice]:
    """The choice that is taken untuned, and those that the model ranks first."""
    ranked = list(cost.candidates(subject.spec, subject.max_rows, figures))
    first = untuned(subject.spec, subject.max_rows, device, figures)
    return list(dict.fromkeys([first, *ranked]))[:TRIED]


def _compile(outcomes: Sequence[Outcome], trials: Trials, left: Callable[[], float]) -> None:
    """Compiles choices side by side: the first of every subject, then every second, so that a short budget is spent on all of them."""
    order = sorted(((number, outcome) for outcome in outcomes for number in range(len(outcome.choices))), key=lambda item: item[0])
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    futures: dict[tuple[int, int], Future[Candidate]] = {}
    for number, outcome in order:
        futures[id(outcome), number] = pool.submit(trials.compile, outcome.subject, outcome.choices[number])
    wait([*futures.values()], timeout=max(left(), 0.0))
    pool.shutdown(wait=True, cancel_futures=True)
    for outcome in outcomes:
        for number in range(len(outcome.choices)):
            future = futures[id(outcome), number]
            found: Candidate | None = None
            if future.cancelled():
                reason = SPENT
            elif (error := future.exception()) is not None:
                reason = _sentence(error)
            else:
                found, reason = future.result(), ""
                if found.spills:
                    found, reason = None, "its values do not fit the registers"
            outcome.compiled.append(found)
            outcome.reasons.append(reason)


def _time(outcome: Outcome, trials: Trials, notes: list[str]) -> None:
    numbers = [number for number, found in enumerate(outcome.compiled) if found is not None]
    outcome.seconds = [None] * len(outcome.choices)
    if len(numbers) < 2:
        outcome.sole = next(iter(numbers), None) if SPENT not in outcome.reasons else None
        return
    try:
        found = trials.time(outcome.subject, [candidate for candidate in outcome.compiled if candidate is not None])
    except (Refused, RuntimeError) as error:  # indices that are not understood; no memory for the data
        notes.append(_sentence(error))
        outcome.reasons = [reason or _sentence(error) for reason in outcome.reasons]
        return
    for number, seconds in zip(numbers, found, strict=True):
        outcome.seconds[number] = seconds


def _skip_rest(outcome: Outcome, reason: str) -> None:
    outcome.reasons = [old or reason for old in outcome.reasons]


def _report(outcomes: Sequence[Outcome], notes: Sequence[str], seconds: float, context: Context) -> None:
    timed = [outcome for outcome in outcomes if outcome.best is not None and any(found is not None for found in outcome.seconds)]
    # An untuned choice that cannot be launched is no match for the one that won.
    before = sum(outcome.seconds[0] or outcome.seconds[outcome.best or 0] or 0.0 for outcome in timed)
    after = sum(outcome.seconds[outcome.best or 0] or 0.0 for outcome in timed)
    tried = sum(found is not None for outcome in outcomes for found in outcome.seconds)
    text = f"tuned {len(timed)} of {len(outcomes)} kernels in {seconds:.1f} s: {tried} choices timed"
    if timed:
        text += f", {before * 1e6:.1f} us before and {after * 1e6:.1f} us after, each kernel counted once"
    context.report.notes += [text, *dict.fromkeys(notes)]
    context.emit("tuning.txt", "\n".join(line for outcome in outcomes for line in outcome.lines()) + "\n")


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def unusable(device: torch.device) -> str:
    """Why nothing can be tried on a device now; "" where something can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "there is no CUDA device to try kernels on"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being recorded"
    return ""
