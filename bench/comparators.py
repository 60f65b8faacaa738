"""What dsi is compared with, and how: every side compiled, checked, profiled, and timed by turns with the others in one process."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from bench import estimates, timing
from bench.estimates import Size
from bench.limits import Expired, at_most, expired
from bench.memory import Memory, Meter, transient
from bench.report import Report
from bench.sides import SIDES, Side
from bench.tables import print_row

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Workload:
    """Something to run on every side.

    `compile_for(side)` gives the calls of one block for a side, each returning a tensor; `prepare` puts state back to where a block begins.
    `reference()` gives what the first `checked` calls return, stacked, computed in a wider dtype. `moved` bytes must be read and `flops`
    operations done in a call. `in_graph` calls are captured in one graph. `size`: how much there is to compile.
    `held`: bytes of its weights and caches on the device. `rounded()` gives what `reference` does, of weights rounded to int8, of which
    `moved_int8` bytes must be read in a call; without it sides that read int8 weights cannot be judged. `state` is what calls write in
    place besides what `prepare` puts back, such as keys and values.
    """

    title: str
    facts: dict[str, Any]
    dtype: torch.dtype
    compile_for: Callable[[Side], list[Callable[[], Tensor]]]
    reference: Callable[[], Tensor]
    prepare: Callable[[], None] = timing.nothing
    moved: float = 0.0
    flops: float = 0.0
    checked: int = 1
    in_graph: int = 1
    size: Size = field(default_factory=Size)
    held: int = 0
    rounded: Callable[[], Tensor] | None = None
    moved_int8: float = 0.0
    state: Sequence[Tensor] = ()


@dataclass
class Outcome:
    """One side of one workload."""

    side: Side
    timer: timing.Timer | None = None
    error: float | None = None  # against the wider dtype
    from_eager: float | None = None
    compile_seconds: float = 0.0
    profile: timing.Profile = field(default_factory=timing.Profile)
    memory: Memory | None = None
    problem: str = ""


_measured: dict[str, float] = {}  # side -> compile seconds over what was expected of it, as last seen in this process


def expected(side: Side, size: Size, before: Iterable[Side] = ()) -> float:
    """Seconds of compiling so much after the sides `before`, by what the side has taken in this process where it has run already."""
    return side.seconds(size, before) * _measured.get(side.name, 1.0)


def compare(workload: Workload, report: Report) -> list[Outcome]:
    """Run a workload on every side of the settings; adds its row to the report, prints its table, and returns the outcomes.

    A side that fails, or whose numbers are wrong, is not timed: its row says why. Where no side can be judged (memory runs out for the
    reference, say), the row has no sides and says why. Raises where the device itself has failed: nothing more runs in this process then.
    """
    before = len(report.rows)
    try:
        return _compare(workload, report)
    except Exception as error:
        if len(report.rows) == before:
            report.add({**_row(workload, [], 0, report), "problem": sentence(error)})
        report.say(f"{workload.title}: {sentence(error)}")
        reset()
        timing.synchronize()  # raises where the device has failed
        return []


def sentence(error: BaseException) -> str:
    """An error in a line, with the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


def _compare(workload: Workload, report: Report) -> list[Outcome]:
    torch._dynamo.config.recompile_limit = 64  # sides share the model's code
    torch._inductor.config.autotune_num_choices_displayed = 0  # a log of every choice would drown the tables
    reset()
    report.say(f"{workload.title}: reference")
    outcomes: list[Outcome] = []
    rest = estimates.timing(len(report.settings.against))
    with torch.no_grad():
        reference = workload.reference()
        reset()  # the wider copy's memory
        rounding = rounding_error(workload, reference, report)
        calls = workload.compile_for(SIDES["eager"])
        eager = run_checked(workload, calls)
        workload.prepare()
        activations = transient(calls[0])
        error = timing.relative_error(eager, reference)
        for name in report.settings.against:
            side = SIDES[name]
            before = [outcome.side for outcome in outcomes if outcome.compile_seconds and not outcome.problem]
            likely = estimates.LIKELY * expected(side, workload.size, before)
            if report.fits(f"{workload.title}: {name}", 0.0 if report.settings.small else likely + rest):
                outcomes.append(_ready(workload, side, reference, eager, side.bound(error, rounding), report, before))
        for outcome in outcomes:  # after everything is compiled: what a graph of ours holds must not move any more
            if outcome.timer is not None and outcome.side.captures and torch.cuda.is_available():
                _capture(outcome.timer, workload, outcome.side.bound(error, rounding), outcome)
        timers = [outcome.timer for outcome in outcomes if outcome.timer is not None]
        report.say(f"{workload.title}: timing {len(timers)} sides in {report.settings.blocks} blocks")
        try:
            timing.interleave(timers, report.settings.blocks)
        finally:  # where the device failed, no more can be run in this process; what is known is kept
            report.add(_row(workload, outcomes, activations, report))
    print_row(report.rows[-1], report)
    reset()
    return outcomes


def reset() -> None:
    """Forget what was compiled: a case must not find another's sizes dynamic, nor its memory taken."""
    torch._dynamo.reset()
    reset_memory()


def reset_memory() -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_checked(workload: Workload, calls: Sequence[Callable[[], Tensor]]) -> Tensor:
    """What the first `checked` calls return, in fp32 and stacked."""
    workload.prepare()
    return torch.stack([call().to(torch.float32, copy=True) for call in calls[: workload.checked]])


def rounding_error(workload: Workload, reference: Tensor, report: Report) -> float:
    """The error that rounding weights to int8 makes, where a side does so and its numbers can be told; else none is allowed for."""
    if workload.rounded is None or not any(SIDES[name].int8 for name in report.settings.against):
        return 0.0
    error = timing.relative_error(workload.rounded(), reference)
    reset()
    report.say(f"{workload.title}: weights rounded to int8 are {error:.1e} off")
    return error


def _ready(
    workload: Workload, side: Side, reference: Tensor, eager: Tensor, bound: float, report: Report, before: Sequence[Side]
) -> Outcome:
    """Compile, check, profile and measure the memory of one side, after those `before`. It is broken off where the others' timing would
    no longer fit the budget."""
    outcome = Outcome(side)
    start = time.perf_counter()
    try:
        with at_most(report.limit(estimates.timing(len(report.settings.against))), f"compiling and warming up {side.name}"):
            calls = workload.compile_for(side)
            if side.weights:
                reset_memory()  # of what its copy of the model was made of
            meter = Meter(workload.held)
            start = time.perf_counter()
            run_checked(workload, calls)
            timing.synchronize()
            outcome.compile_seconds = time.perf_counter() - start
            _measured[side.name] = outcome.compile_seconds / side.seconds(workload.size, before)
            for _ in range(2):  # CUDA graphs inside a side are recorded in the second call with the same addresses
                workload.prepare()
                for call in calls:
                    call()
        values = run_checked(workload, calls)
        meter.compiled()
        workload.prepare()
        for call in calls:
            call()
        outcome.memory = meter.done() if torch.cuda.is_available() else None
        outcome.error, outcome.from_eager = timing.relative_error(values, reference), timing.relative_error(values, eager)
        if not outcome.error <= bound:
            raise ArithmeticError(f"wrong: error {outcome.error:.1e}, and {bound:.1e} is allowed")
        timer = timing.Timer(calls, workload.prepare, workload.in_graph)
        workload.prepare()
        outcome.profile = timing.profile(calls[0])
        timer.launches = 1 if outcome.profile.graphs else outcome.profile.launches
        outcome.timer = timer
    except Exception as error:
        outcome.compile_seconds = outcome.compile_seconds or time.perf_counter() - start
        error = expired(error) or error
        plain = isinstance(error, ArithmeticError | Expired)
        outcome.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if plain else sentence(error)
    found = outcome.problem or f"error {outcome.error:.1e}, {outcome.profile.launches} kernels"
    report.say(f"{workload.title}: {side.name} in {outcome.compile_seconds:.1f} s: {found}")
    return outcome


def _capture(timer: timing.Timer, workload: Workload, bound: float, outcome: Outcome) -> None:
    """Capture a side's calls, and hold what a replay gives against the calls themselves. A failure to capture is noted, no more; a side
    whose replay is wrong is not timed."""
    try:
        result = timer.capture()
    except Exception as error:
        torch.cuda.synchronize()
        outcome.problem = f"not captured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return
    workload.prepare()
    result.fill_(float("nan"))
    timer.graph.replay()
    replayed = result.float().clone()
    workload.prepare()
    for call in timer.calls[: workload.in_graph]:
        expected = call()
    off = timing.relative_error(replayed, expected.float())
    if not off <= bound:
        outcome.timer, outcome.problem = None, f"wrong: a replay of its CUDA graph is {off:.1e} off the call"


# --------------------------------------------------------------------------------------------------------------------- what is said


def _row(workload: Workload, outcomes: Sequence[Outcome], activations: int, report: Report) -> dict[str, Any]:
    floor = report.roofline(workload.moved, workload.flops, workload.dtype)
    sides = {}
    for outcome in outcomes:
        times: dict[str, Any] = outcome.timer.times.summary() if outcome.timer is not None else {}
        device = times.get("device")
        own = report.roofline(workload.moved_int8, workload.flops, workload.dtype) if outcome.side.int8 else floor
        sides[outcome.side.name] = {
            **times,
            "method": outcome.timer.method if outcome.timer is not None else "",
            "int8": outcome.side.int8,
            "roofline ms": own,
            "roofline share": own / device if own and device else None,
            "error": outcome.error,
            "error from eager": outcome.from_eager,
            "compile seconds": outcome.compile_seconds,
            "problem": outcome.problem,
            **(outcome.memory.as_json(workload.held + activations) if outcome.memory is not None and workload.held else {}),
            **outcome.profile.as_json(),
        }
    return {
        "title": workload.title,
        **workload.facts,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "bytes": workload.moved,
        "flops": workload.flops,
        "held bytes": workload.held,
        "activation bytes": activations,
        "roofline ms": floor,
        "sides": sides,
    }
