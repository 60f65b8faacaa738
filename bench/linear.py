"""`python -m bench linear`: the generated kernel of one linear beside cuBLAS's, weights rotated past the last-level cache: to tune with.

A form is a function of one linear (or two with a common input) and what is fused around it; its region is planned by the whole compiler,
and the kernel printed for each `Choice` that is asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import path, timing
from bench.comparators import DTYPES, FLOOR, SLACK, WIDER, reset
from bench.gpt_regions import copies_past_cache
from bench.report import Report, Settings, figure

SHAPES = (
    "2304x768x1,4800x1600x1,4096x4096x1,6144x4096x1,12288x4096x1,28672x4096x1,4096x14336x1,"
    "6144x4096x4,4096x4096x16,28672x4096x16,4096x14336x16"
)
SMALL = "48x32x1,32x64x5"
THREADS = 8  # that compile kernels at once

# Built-in sweeps, by schedule: every combination whose tile a program can hold. A schedule that is not here is swept as "tiled" is.
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "gemv": {"block_n": (4, 8, 16, 32, 64), "block_k": (128, 256, 512, 1024), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "tiled": {
        "block_m": (16,),
        "block_n": (16, 32, 64, 128),
        "block_k": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
    },
}
MOST_A_THREAD = 128  # elements of the weight tile (times the rows of a gemv) that a thread of a sweep's candidate holds
LEAST_A_THREAD = 8


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), g, 1e-5), w)


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w)


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def gated(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, u)


# Each with its inputs' letters: x [M, K], g [K], weights w and u [N, K], b [N], r [M, N].
FORMS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "plain": (plain, "xw"),
    "norm": (norm, "xgw"),
    "residual": (residual, "xwr"),
    "bias-gelu": (bias_gelu, "xwb"),
    "gated": (gated, "xwu"),
}


@dataclass
class Problem:
    """A form at N columns, K inner and M rows: real inputs, the weights in several copies, and the region that dsi makes of it."""

    form: str
    n: int
    k: int
    m: int
    dtype: torch.dtype
    device: str
    sets: list[list[Tensor]] = field(default_factory=list)  # a list of inputs for each copy
    region: Any = None

    def __post_init__(self) -> None:
        self.function, letters = FORMS[self.form]
        weight = (self.n, self.k)
        shapes = {"x": (self.m, self.k), "g": (self.k,), "w": weight, "u": weight, "b": (self.n,), "r": (self.m, self.n)}
        self.moved = sum(self.n * self.k * self.dtype.itemsize for letter in letters if letter in "wu")
        generator = torch.Generator(self.device).manual_seed(0)

        def random(letter: str) -> Tensor:
            values = torch.randn(shapes[letter], generator=generator, device=self.device)
            return (values / self.k**0.5 if letter in "wu" else values).to(self.dtype)

        shared = {letter: random(letter) for letter in letters if letter not in "wu"}
        for _ in range(copies_past_cache(self.moved)):
            self.sets.append([shared[letter] if letter in shared else random(letter) for letter in letters])
        self.reference = self.function(*(x.to(WIDER[self.dtype]) for x in self.sets[0]))
        self.bound = SLACK * timing.relative_error(self.function(*self.sets[0]), self.reference) + FLOOR
        self.region, self.order = region_of(self.function, self.sets[0])

    def inputs(self, number: int) -> list[Tensor]:
        """The region's inputs of one copy."""
        return [self.sets[number][index] for index in self.order]


def region_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, list[int]]:
    """The one region that dsi makes of a function, planned but not run, and which argument each of its inputs is.

    The function must use its arguments first in the order of its signature. Raises ValueError where there are more regions or none.
    """
    backend = path.backend()
    from dsi.compiler.observe import collecting

    reset()
    with torch.no_grad(), collecting() as contexts:
        torch.compile(function, backend=backend, options={"executor": "reference"}, fullgraph=True, dynamic=False)(*inputs)
    regions = [region for context in contexts for region in context.report.regions]
    if len(regions) != 1 or regions[0].spec is None:
        raise ValueError(f"{len(regions)} regions with plans are made of {getattr(function, '__name__', function)}; one is wanted")
    # AOTAutograd numbers a graph's arguments from 1: "arg0_1".
    return regions[0], [int(node.name.removeprefix("arg").split("_")[0]) for node in regions[0].inputs]


class Candidate:
    """The kernel of a problem under one choice (None: the compiler's own), launched as the runtime launches it."""

    def __init__(self, problem: Problem, choice: Any = None):
        from dsi.codegen import cost
        from dsi.codegen.devices import find_device
        from dsi.runtime.cache import DiskCache
        from dsi.runtime.kernels import KernelSet
        from dsi.runtime.launch import GeneratedKernel
        from dsi.runtime.sizes import Sizes

        from dsi import codegen

        region = problem.region
        device = find_device(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
        self.problem = problem
        self.choice = choice if choice is not None else cost.choices(region.spec, device)[-1]
        self.kernels = codegen.generate(region.spec, self.choice, device)
        values = [node.meta["val"] for node in region.inputs]
        found = KernelSet(tuple(self.kernels), cost.rows_of(region.spec.plan), {})
        self._kernel = GeneratedKernel(found, values, Sizes(values), DiskCache("bench", enabled=False))
        fakes = [node.meta["val"] for node in region.outputs]
        self.outputs = [torch.empty_strided(tuple(v.shape), v.stride(), dtype=v.dtype, device=problem.device) for v in fakes]
        self.us: float | None = None
        self.error: float | None = None
        self.problem_text = ""

    def run(self, number: int = 0) -> Tensor:
        """The kernel on one copy of the weights."""
        self._kernel(self.problem.inputs(number), self.outputs, ())
        return self.outputs[0]

    def check(self) -> None:
        """Compile and run once, on poisoned outputs, and hold the result against the reference; the problem is kept, not raised."""
        try:
            for output in self.outputs:
                output.fill_(float("nan"))
            self.error = timing.relative_error(self.run(), self.problem.reference)
            if not self.error <= self.problem.bound:
                self.problem_text = f"wrong: error {self.error:.1e}, and {self.problem.bound:.1e} is allowed"
        except Exception as error:
            self.problem_text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def describe(self) -> str:
        """The choice in a few words."""
        c = self.choice
        known = ("schedule", "block_m", "block_n", "block_k", "block_s", "num_warps", "num_stages", "max_rows")
        more = [f"{f.name}={getattr(c, f.name)}" for f in dataclasses.fields(c) if f.name not in known and getattr(c, f.name) != f.default]
        return " ".join([c.schedule, f"{c.block_m}x{c.block_n}x{c.block_k}", f"w{c.num_warps}", f"s{c.num_stages}", *more])


Shape = tuple[int, int, int]


def run(settings: Settings, cases: Sequence[Shape], form: str, wanted: Sequence[dict[str, Any]], sweep: bool, best: int) -> Report:
    """Benchmark every (N, K, M): cuBLAS, the compiler's own choice, and the choices given or swept."""
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; known: {', '.join(FORMS)}")
    report = Report("linear", settings)
    report.measure_rates()
    dtype = DTYPES[settings.dtype or ("fp32" if settings.small else "fp16")]
    for n, k, m in cases:
        if report.fits(f"{form} {n}x{k}x{m}", 0 if settings.small else 5):
            with torch.no_grad():
                _case(Problem(form, n, k, m, dtype, settings.device), wanted, sweep, best, report)
            reset()
    return report


def _case(problem: Problem, wanted: Sequence[dict[str, Any]], sweep: bool, best: int, report: Report) -> None:
    title = f"{problem.form} N={problem.n} K={problem.k} M={problem.m}, {len(problem.sets)} copies"
    own = Candidate(problem)
    own.check()
    others = [dataclasses.replace(own.choice, **fields) for fields in wanted]
    others += list(swept(own.choice)) if sweep else []
    tried = [own, *_checked(problem, others, title, report)]
    good = [candidate for candidate in tried if not candidate.problem_text]
    library: float | None = None
    if torch.cuda.is_available():
        for candidate in good:
            if candidate is own or report.fits(f"{title}: {candidate.describe()}", 0.1):
                candidate.us = time_of(candidate.run, len(problem.sets))
        library = _again(problem, own, sorted((c for c in good if c.us), key=lambda c: c.us or 0.0)[: max(best, 1)], report.settings.blocks)
    floor = report.roofline(problem.moved)
    rows = [_row(own, floor, library, "dsi's own"), *(_row(candidate, floor, library, "tried") for candidate in tried[1:])]
    report.add({"form": problem.form, "n": problem.n, "k": problem.k, "m": problem.m, "dtype": str(problem.dtype).removeprefix("torch."),
                "copies": len(problem.sets), "bytes": problem.moved, "roofline us": None if floor is None else floor * 1e3,
                "library us": library, "choices": rows})  # fmt: skip
    _print(title, rows, library, floor, best, report)


def _checked(problem: Problem, choices: Sequence[Any], title: str, report: Report) -> list[Candidate]:
    """Candidates compiled, many at once, and checked; those that code generation refuses or that do not fit the budget are left out."""
    made: list[Candidate] = []
    for choice in choices:
        try:
            made.append(Candidate(problem, choice))
        except Exception as error:  # a refusal, or a choice that makes no sense: the sweep goes on
            report.say(f"{title}: {choice}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
    done: list[Candidate] = []
    began, threads = time.monotonic(), THREADS if torch.cuda.is_available() else 1
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(made), 4 * threads):
            part = made[start : start + 4 * threads]
            expected = (time.monotonic() - began) / max(start, 1) * len(part)
            if not report.fits(f"{title}: {len(made) - start} choices", expected):
                break
            list(pool.map(_check_without_gradients, part))
            timing.synchronize()
            done += part
            report.say(f"{title}: {len(done)} of {len(made)} choices compiled")
    return done


def _check_without_gradients(candidate: Candidate) -> None:
    with torch.no_grad():  # a thread has its own mode
        candidate.check()


def _again(problem: Problem, own: Candidate, candidates: list[Candidate], blocks: int) -> float:
    """The library, dsi's own choice and the best few once more, by turns, so that a change of the chip's clock favours none. Returns the
    library's microseconds."""
    runs: list[Callable[[int], Any]] = [lambda number: problem.function(*problem.sets[number])]
    again = [c for c in dict.fromkeys((own, *candidates)) if c.us is not None]
    runs += [candidate.run for candidate in again]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(blocks):
        for number in range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs))):
            times[number].append(time_of(runs[number], len(problem.sets), replays=3))
    for candidate, values in zip(again, times[1:], strict=True):
        candidate.us = statistics.median(values)
    return statistics.median(times[0])


def time_of(run_copy: Callable[[int], Any], copies: int, replays: int = 5) -> float:
    """Microseconds of the device a launch: median of replays of a CUDA graph that holds at least 20 launches, over every copy in turn."""
    rounds = -(-20 // copies)
    timer = timing.Timer([lambda number=number: run_copy(number) for number in range(copies)] * rounds, in_graph=copies * rounds)
    timer.capture()
    times = timing.event_times(timer.graph.replay, replays + 1)[1:]
    return statistics.median(times) * 1e3 / (copies * rounds)


def _row(candidate: Candidate, floor: float | None, library: float | None, name: str) -> dict[str, Any]:
    us = candidate.us
    return {
        "name": name,
        "choice": dataclasses.asdict(candidate.choice),
        "text": candidate.describe(),
        "us": us,
        "share": floor * 1e3 / us if floor is not None and us else None,
        "over library": library / us if library is not None and us else None,
        "error": candidate.error,
        "problem": candidate.problem_text,
    }


def _print(title: str, rows: Sequence[dict[str, Any]], library: float | None, floor: float | None, best: int, report: Report) -> None:
    good = [row for row in rows if not row["problem"]]
    shown = [rows[0], *sorted((row for row in good if row is not rows[0]), key=lambda row: row["us"] or float("inf"))[:best]]
    share = floor * 1e3 / library if floor is not None and library else None
    lines: list[tuple[str, ...]] = [("library", figure(library, ".2f"), figure(share, ".2f"), "1.00" if library else "-", "-")]
    for row in shown:
        text = f"{row['name']}: {row['text']}"
        figures = [figure(row[key], form) for key, form in (("us", ".2f"), ("share", ".2f"), ("over library", ".2f"), ("error", ".0e"))]
        lines.append((text, *figures))
    report.table(title, ("kernel", "us", "of bandwidth", "over library", "error"), lines)
    failed = [row for row in rows if row["problem"]]
    for text in dict.fromkeys(f"{row['text']}: {row['problem']}" for row in failed[:5]):
        report.say(text)
    if len(failed) > 5:
        report.say(f"and {len(failed) - 5} more choices that fail")


# -------------------------------------------------------------------------------------------------------------------------- choices


def parse_shape(text: str) -> tuple[int, int, int]:
    """(N, K, M) from "NxKxM". Raises ValueError."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not N x K x M")
    return int(parts[0]), int(parts[1]), int(parts[2])


def parse_choices(text: str) -> list[dict[str, Any]]:
    """Every combination of "block_n=8|16,num_warps=4". Raises ValueError naming a field that a choice has not."""
    path.backend()  # so that the package is found
    from dsi.codegen.kernel import Choice

    known = {f.name for f in dataclasses.fields(Choice)}
    fields: dict[str, list[Any]] = {}
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        if name not in known or not values:
            raise ValueError(f"{part!r}: a field and its values are wanted; known: {', '.join(sorted(known))}")
        fields[name] = [_value(value) for value in values.split("|")]
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def _value(text: str) -> Any:
    """An integer, True, False, None, or the text itself."""
    return {"True": True, "False": False, "None": None}.get(text, int(text) if text.lstrip("-").isdigit() else text)


def swept(own: Any) -> Iterator[Any]:
    """The built-in choices for the schedule of `own`, which gives the fields that are not swept, and those of "tiled"."""
    for schedule in dict.fromkeys((own.schedule, "tiled")):
        grid = GRIDS.get(schedule, GRIDS["tiled"])
        for values in itertools.product(*grid.values()):
            choice = dataclasses.replace(own, schedule=schedule, **dict(zip(grid, values, strict=True)))
            rows = choice.block_m if choice.schedule == "gemv" else 1
            held = choice.block_n * choice.block_k * rows / (32 * choice.num_warps)
            if LEAST_A_THREAD <= held <= MOST_A_THREAD and choice != own:
                yield choice
