"""`python -m bench linear`: the generated kernels of linears beside cuBLAS's, weights rotated past the last-level cache: to tune with.

Kernels are timed as they run: each launched while the one before it still runs, all over different weights, in one CUDA graph. A sweep
tries what the cost model lists, compiled in many processes ahead of the timing, and writes what won as a table of defaults.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from bench import path, timing
from bench.capture import captured
from bench.comparators import DTYPES, reset, sentence
from bench.compile_pool import Compiled, CompilePool, generated, runner
from bench.linear_forms import FORMS, WEIGHTS, Problem, linears
from bench.report import Report, Settings, figure
from bench.shapes import SHAPES as MODELS

SHAPES = (
    "2304x768x1,4800x1600x1,4096x4096x1,6144x4096x1,12288x4096x1,28672x4096x1,4096x14336x1,"
    "6144x4096x4,4096x4096x16,28672x4096x16,4096x14336x16"
)
SMALL = "48x32x1,32x64x5"
LAUNCHES, REPLAYS = 24, 5  # launches in one graph at least; timings of which the median is taken
POWERS = ("block_m", "block_n", "block_k", "block_s", "num_warps")  # fields of a choice that are powers of two
COUNTS = ("split", "chunks", "num_stages", "max_rows")
AHEAD = 4  # cases whose kernels are being compiled while one is timed
COMPILING, LONGEST = 2.0, 60.0  # seconds that compiling one choice should take, and may


@dataclass(frozen=True)
class Case:
    """A form at a shape: N columns (of one window), K inner, M rows."""

    form: str
    n: int
    k: int
    m: int
    dtype: torch.dtype
    int8: bool = False  # weights in int8


@dataclass(eq=False)
class Candidate:
    """A choice for a problem with its place in the model's order (None: given by hand) and what was found out about it."""

    choice: Any
    rank: int | None
    made: Future[Compiled] | None = None
    predicted: float = 0.0  # microseconds
    us: float | None = None
    error: float | None = None
    spills: int = 0
    problem: str = ""

    def describe(self) -> str:
        """The choice in a few words."""
        c = self.choice
        known = ("schedule", "block_m", "block_n", "block_k", "block_s", "num_warps", "num_stages", "max_rows")
        more = [f"{f.name}={getattr(c, f.name)}" for f in dataclasses.fields(c) if f.name not in known and getattr(c, f.name) != f.default]
        return " ".join([c.schedule, f"{c.block_m}x{c.block_n}x{c.block_k}", f"w{c.num_warps}", f"s{c.num_stages}", *more])

    def as_json(self, floor: float | None, library: float | None) -> dict[str, Any]:
        us = self.us
        return {
            "choice": dataclasses.asdict(self.choice),
            "text": self.describe(),
            "rank": self.rank,
            "predicted us": self.predicted,
            "us": us,
            "share": floor / us if floor is not None and us else None,
            "over library": library / us if library is not None and us else None,
            "error": self.error,
            "spills": self.spills,
            "problem": self.problem,
        }


@dataclass
class Tried:
    """A problem and its candidates, the compiler's own first."""

    problem: Problem
    candidates: list[Candidate]
    library: float | None = None

    @property
    def good(self) -> list[Candidate]:
        """Those that were timed, the fastest first."""
        return sorted((c for c in self.candidates if c.us is not None), key=lambda c: c.us or 0.0)


@dataclass
class Plan:
    """What is tried for each case: the compiler's own choice, fields of it replaced (`wanted`), the first `most` that the model lists."""

    wanted: Sequence[dict[str, Any]] = ()
    most: int = 0
    best: int = 5  # that are printed
    defaults: Path | None = None  # where the winners go
    found: list[Tried] = field(default_factory=list)


def run(settings: Settings, cases: Sequence[Case], plan: Plan) -> Report:
    """Benchmark every case: cuBLAS, the compiler's own choice, and the choices of the plan."""
    report = Report("linear", settings)
    report.measure_rates()
    path.backend()  # so that the package is found
    name = timing.device_name()
    queued: deque[Tried] = deque()
    with ExitStack() as stack, torch.no_grad():
        pool = stack.enter_context(CompilePool(name)) if torch.cuda.is_available() else None
        for case in cases:
            if not report.fits(str(case), 0 if settings.small else COMPILING):
                continue
            try:
                queued.append(_prepare(case, plan, settings.device, name, pool))
            except Exception as error:  # the other cases can still be measured
                report.say(f"{case}: {sentence(error)}")
                continue
            if len(queued) > AHEAD:
                _measure(queued.popleft(), plan, name, report)
        while queued:
            _measure(queued.popleft(), plan, name, report)
    _summary(plan, report)
    return report


def _prepare(case: Case, plan: Plan, device: str, name: str, pool: CompilePool | None) -> Tried:
    """The case's region, and its choices on their way to be compiled."""
    from dsi.codegen import cost
    from dsi.codegen.devices import find_device

    problem = Problem(case.form, case.n, case.k, case.m, case.dtype, device, case.int8)
    reset()
    figures = find_device(name)
    (own,) = cost.choices(problem.spec, figures)
    ranked = list(cost.candidates(problem.spec, None, figures))
    listed = [own, *(dataclasses.replace(own, **fields) for fields in plan.wanted), *ranked[: plan.most]]
    candidates = [Candidate(choice, ranked.index(choice) if choice in ranked else None) for choice in dict.fromkeys(listed)]
    for candidate in candidates:
        candidate.predicted = cost.predict(problem.spec, candidate.choice, figures) * 1e6
    if pool is not None:
        for candidate, future in zip(candidates, pool.submit(problem.spec, [c.choice for c in candidates]), strict=True):
            candidate.made = future
    return Tried(problem, candidates)


def _measure(tried: Tried, plan: Plan, name: str, report: Report) -> None:
    """Check and time a case's candidates as they come out of the pool, the fastest few once more by turns with the library."""
    problem = tried.problem
    problem.fill()
    timed: dict[int, Callable[[int], Any]] = {}
    for number, candidate in enumerate(tried.candidates):
        expected = 0.0 if candidate.made is None or candidate.made.done() else COMPILING
        if number and not report.fits(f"{problem}: {len(tried.candidates) - number} choices", expected):
            for other in tried.candidates[number:]:
                other.problem = "no time was left"
                if other.made is not None:
                    other.made.cancel()
            break
        made = _made(candidate, problem, name)
        candidate.problem, candidate.spills = made.problem, made.spills
        most = candidate.choice.max_rows
        if most is not None and most < problem.m:
            candidate.problem = f"a kernel for at most {most} rows"
        if candidate.problem:
            continue
        run_copy = Running(problem, made)
        _check(problem, candidate, run_copy)
        if torch.cuda.is_available() and not candidate.problem:
            candidate.us = time_of(run_copy, len(problem.sets))
            timed[id(candidate)] = run_copy
    if torch.cuda.is_available():
        again = [c for c in dict.fromkeys((tried.candidates[0], *tried.good[: plan.best])) if id(c) in timed] if tried.good else []
        tried.library = _again(problem, again, [timed[id(c)] for c in again], report.settings.blocks)
    _report(tried, plan, report)
    _keep(tried, plan, name)
    problem.sets.clear()
    problem.packed.clear()
    problem.shared.clear()


def _made(candidate: Candidate, problem: Problem, name: str) -> Compiled:
    """A candidate's kernels, waited for as long as any compilation should take."""
    if candidate.made is None:
        return generated(problem.spec, candidate.choice, name)
    try:
        return candidate.made.result(LONGEST)
    except Exception as error:  # it took too long, or its process died
        return Compiled(problem=f"{type(error).__name__} while it was compiled")


class Running:
    """Runs a candidate's kernels on one copy of the weights."""

    def __init__(self, problem: Problem, made: Compiled):
        self.problem = problem
        self.kernel = runner(problem.spec, made.kernels, torch.device(problem.device))
        fakes = [node.meta["val"] for node in problem.region.outputs]
        self.outputs = [torch.empty_strided(tuple(v.shape), v.stride(), dtype=v.dtype, device=problem.device) for v in fakes]

    def __call__(self, number: int) -> list[Tensor]:
        self.kernel(self.problem.inputs(number), self.outputs, ())
        return self.outputs


def _check(problem: Problem, candidate: Candidate, run_copy: Callable[[int], Sequence[Tensor]]) -> None:
    """Run once, on poisoned outputs, and hold the results against the reference; what is wrong is kept, not raised."""
    try:
        for output in getattr(run_copy, "outputs", ()):
            output.fill_(float("nan"))
        errors = [timing.relative_error(value, reference) for value, reference in zip(run_copy(0), problem.reference, strict=True)]
        candidate.error = max(errors)
        if not all(error <= problem.bound for error in errors):
            candidate.problem = f"wrong: error {candidate.error:.1e}, and {problem.bound:.1e} is allowed"
    except Exception as error:
        candidate.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def products(problem: Problem, number: int) -> list[Tensor]:
    """The library's products of one copy, without what is fused before and behind them."""
    x = next(value for letter, value in zip(problem.letters, problem.sets[number], strict=True) if letter == "x")
    weights = [(letter, value) for letter, value in zip(problem.letters, problem.sets[number], strict=True) if letter in WEIGHTS]
    return [x @ value if letter == "W" else F.linear(x, value) for letter, value in weights]


def _again(problem: Problem, candidates: Sequence[Candidate], runs: Sequence[Callable[[int], Any]], blocks: int) -> float:
    """The library and the best few once more, by turns, so that a change of the chip's clock favours none. Returns the library's
    microseconds."""
    copies = len(problem.sets)
    graphs = [graph_of(run_copy, copies) for run_copy in (lambda number: products(problem, number), *runs)]
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(blocks):
        for number in range(len(graphs)) if turn % 2 == 0 else reversed(range(len(graphs))):
            times[number].append(median_of(*graphs[number], replays=2))
    for candidate, values in zip(candidates, times[1:], strict=True):
        candidate.us = statistics.median(values)
    return statistics.median(times[0])


def time_of(run_copy: Callable[[int], Any], copies: int) -> float:
    """Microseconds of the device a launch: the median of replays of a CUDA graph over every copy in turn."""
    return median_of(*graph_of(run_copy, copies), replays=REPLAYS)


def graph_of(run_copy: Callable[[int], Any], copies: int) -> tuple[Callable[[], None], int]:
    """What replays a CUDA graph of at least `LAUNCHES` calls over every copy in turn, and how many they are."""
    launches = copies * -(-LAUNCHES // copies)

    def calls() -> None:
        for number in range(launches):
            run_copy(number % copies)

    for number in range(2):
        run_copy(number % copies)
    replay = captured(calls, torch.cuda.Stream()).replay
    replay()
    return replay, launches


def median_of(replay: Callable[[], None], launches: int, replays: int) -> float:
    """Microseconds of a launch."""
    return statistics.median(timing.event_times(replay, replays)) * 1e3 / launches


# ------------------------------------------------------------------------------------------------------------------------ report


def _report(tried: Tried, plan: Plan, report: Report) -> None:
    problem, library = tried.problem, tried.library
    roofline = report.roofline(problem.moved)
    floor = roofline * 1e3 if roofline is not None else None
    report.add({"form": problem.form, "n": problem.n, "k": problem.k, "m": problem.m,
                "dtype": str(problem.dtype).removeprefix("torch."), "int8": problem.int8,
                "copies": len(problem.sets), "bytes": problem.moved,
                "roofline us": floor, "library us": library,
                "choices": [candidate.as_json(floor, library) for candidate in tried.candidates]})  # fmt: skip
    own, good = tried.candidates[0], tried.good or [c for c in tried.candidates if not c.problem]
    shown = list(dict.fromkeys((own, *good[: plan.best])))
    share = floor / library if floor is not None and library else None
    lines: list[tuple[str, ...]] = [("products by the library", "-", figure(library, ".2f"), figure(share, ".2f"), "1.00", "-")]
    for candidate in shown:
        found = candidate.as_json(floor, library)
        values = [figure(found[key], form) for key, form in (("us", ".2f"), ("share", ".2f"), ("over library", ".2f"), ("error", ".0e"))]
        name = (
            f"{'own: ' if candidate is own else f'#{candidate.rank} ' if candidate.rank is not None else 'given: '}{candidate.describe()}"
        )
        lines.append((name, f"{candidate.predicted:.2f}", *values))
    title = f"{problem}, {len(problem.sets)} copies, {len(good)} of {len(tried.candidates)} choices"
    report.table(title, ("kernel", "predicted", "us", "of bandwidth", "over library", "error"), lines)
    failed = dict.fromkeys(f"{c.describe()}: {c.problem}" for c in tried.candidates if c.problem)
    for text in list(failed)[:3]:
        report.say(text)
    if len(failed) > 3:
        report.say(f"and {len(failed) - 3} more choices that fail")
    plan.found.append(tried)


def _summary(plan: Plan, report: Report) -> None:
    """One line a case: the winner, and what the model's first choice loses."""
    lines = []
    for tried in plan.found:
        if not tried.good:
            continue
        best, own = tried.good[0], tried.candidates[0]
        roofline = report.roofline(tried.problem.moved)
        share = roofline * 1e3 / best.us if roofline is not None and best.us else None
        lost = own.us / best.us if own.us and best.us else None
        gain = tried.library / best.us if tried.library and best.us else None
        figures = [figure(value, ".2f") for value in (best.us, share, gain, lost)]
        lines.append((f"{tried.problem}: {best.describe()}", *figures))
    if lines:
        report.table("Winners", ("case", "us", "of bandwidth", "over library", "own over winner"), lines)


def _keep(tried: Tried, plan: Plan, name: str) -> None:
    """The winner of a case goes to the table of defaults."""
    if plan.defaults is None or not tried.good:
        return
    from dsi.codegen import defaults

    best = tried.good[0]
    library = next((candidate.us for candidate in tried.good if candidate.choice.schedule == "library"), None)
    defaults.write(plan.defaults, name, [defaults.entry(tried.problem.spec, best.choice, best.us or 0.0, library=library)])


# --------------------------------------------------------------------------------------------------------------------- arguments


def parse_shape(text: str) -> tuple[int, int, int]:
    """(N, K, M) from "NxKxM". Raises ValueError."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not N x K x M")
    return int(parts[0]), int(parts[1]), int(parts[2])


def cases_of(shapes: str, form: str, dtype: torch.dtype) -> list[Case]:
    """Cases of one form from shapes "NxKxM", by commas. Raises ValueError."""
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; known: {', '.join(FORMS)}")
    return [Case(form, *parse_shape(text), dtype) for text in shapes.split(",")]


def model_cases(names: Sequence[str], rows: Sequence[int], dtype: torch.dtype | None, laid_out: bool = False) -> list[Case]:
    """The linears of models (bench/shapes.py) at every number of rows, each once; rows vary slowest, so that a run that is cut short has
    all models. `laid_out`: no weight is stored [K, N]."""
    found: dict[Case, None] = {}
    for m, name in itertools.product(rows, names):
        for form, n, k in linears(MODELS[name], laid_out):
            # A head is asked for the last token of each sequence only.
            if n < 30000 or m <= 64:
                found[Case(form, n, k, m, dtype or DTYPES[MODELS[name].dtype])] = None
    return list(found)


def with_weights(cases: Sequence[Case], kinds: Sequence[str]) -> list[Case]:
    """Each case with its own weights ("own") and with int8 weights, where these are stored [N, K] ("int8"), as `kinds` says. Raises
    ValueError for another kind."""
    unknown = [kind for kind in kinds if kind not in ("own", "int8")]
    if unknown or not kinds:
        raise ValueError(f"unknown weights {', '.join(unknown) or 'none'}; known: own, int8")
    both = [dataclasses.replace(case, int8=kind == "int8") for case in cases for kind in kinds]
    return [case for case in both if not (case.int8 and case.form.endswith("kn"))]


def parse_choices(text: str) -> list[dict[str, Any]]:
    """Every combination of "block_n=8|16,num_warps=4". Raises ValueError naming a field that a choice has not, or a value that the field
    cannot have."""
    path.backend()  # so that the package is found
    from dsi.codegen.emit import SCHEDULES
    from dsi.codegen.kernel import Choice

    known = get_type_hints(Choice)
    fields: dict[str, list[Any]] = {}
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        if name not in known or not values:
            raise ValueError(f"{part!r}: a field and its values are wanted; known: {', '.join(sorted(known))}")
        fields[name] = [_value(value) for value in values.split("|")]
        for value in fields[name]:
            try:
                TypeAdapter(known[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{name} cannot be {value!r}: {error.errors()[0]['msg']}") from None
            if name == "schedule" and value not in (*SCHEDULES, "library"):
                raise ValueError(f"unknown schedule {value!r}; known: {', '.join((*SCHEDULES, 'library'))}")
            if name in POWERS and not (value > 0 and value & (value - 1) == 0):
                raise ValueError(f"{name} must be a power of two, not {value}")
            if name in COUNTS and value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def _value(text: str) -> Any:
    """An integer, True, False, None, or the text itself."""
    return {"True": True, "False": False, "None": None}.get(text, int(text) if text.lstrip("-").isdigit() else text)
