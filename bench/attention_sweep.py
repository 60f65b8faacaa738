"""`python -m bench.attention_sweep`: attention's generated kernels under many choices beside SDPA: the tool to tune them with.

A case is written as for `python -m bench attention`. The mask is an input, as models compute it once for all layers. Kernels are timed as
they run, each launched while the one before it still runs, over different keys and values, in one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from bench import path, timing
from bench.attention import Case
from bench.cli import Json, Seconds, Small, known_ones, listed, settings, table_of_defaults
from bench.comparators import DTYPES, WIDER, reset
from bench.compile_pool import CompilePool, generated
from bench.linear import Candidate, Running, graph_of, median_of, parse_choices
from bench.linear_forms import region_of
from bench.report import Report, figure
from bench.sides import FLOOR, SLACK

DECODE = "1x12x12x64x512x502,1x25x25x64x1024x1000,1x28x28x152x1024x1000,1x32x8x128x512x502,16x32x8x128x512x502,16x32x8x128x4096x512"
PAST_CACHE, MOST_COPIES = 2.5, 1500  # bytes read by turns, in sizes of the last-level cache; and of what they are
LONGEST = 120.0  # seconds that compiling one choice may take
PREFILL = "1x32x8x128x512,1x32x8x128x2048,1x16x16x64x128"


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Problem:
    """A case with its inputs (keys and values in copies past the last-level cache), its region, and the result in a wider dtype."""

    def __init__(self, case: Case, form: str, dtype: torch.dtype, device: str):
        self.case, self.form, self.dtype, self.device = case, form, dtype, device
        generator = torch.Generator(device).manual_seed(0)
        live, room = case.live or case.room, case.room
        queries = 1 if case.live is not None else room
        self.moved = 2.0 * case.batch * case.kv_heads * live * case.size * dtype.itemsize
        pairs = case.batch * case.heads * (room * (room + 1) / 2 if case.live is None else live)
        self.flops = 4.0 * case.size * pairs

        def random(heads: int, length: int) -> Tensor:
            return torch.randn((case.batch, heads, length, case.size), generator=generator, device=device).to(dtype)

        q = random(case.heads, queries)
        seen = torch.arange(room, device=device) <= torch.arange(live - queries, live, device=device)[:, None]
        more = [] if form == "causal" else [seen[None, None].expand(case.batch, 1, queries, room).contiguous()]
        self.function = causal if form == "causal" else masked
        # Of what is read, since a step's weights leave nothing of a cache in the last-level cache.
        copies = max(2, min(MOST_COPIES, math.ceil(PAST_CACHE * timing.cache_bytes() / self.moved)))
        self.sets = [[q, random(case.kv_heads, room), random(case.kv_heads, room), *more] for _ in range(copies)]
        self.region, self.order = region_of(self.function, self.sets[0])
        self.spec = self.region.spec
        wide = self.function(*(x.to(WIDER[dtype]) if x.is_floating_point() else x for x in self.sets[0]))
        self.bound = SLACK * timing.relative_error(self.function(*self.sets[0]), wide) + FLOOR
        # The region may store the result in another order, as the next linear reads it.
        body = self.region.body(*self.inputs(0))
        body = body[0] if isinstance(body, tuple | list) else body
        self.reference = wide if body.shape == wide.shape else wide.transpose(1, 2).reshape(body.shape)

    def inputs(self, number: int) -> list[Tensor]:
        """The region's inputs of one copy."""
        return [self.sets[number][index] for index in self.order]

    def __str__(self) -> str:
        return f"{self.form} " + "x".join(str(value) for value in dataclasses.astuple(self.case) if value is not None)


@dataclass(eq=False)
class Tried:
    """A problem and its candidates, the compiler's own choice first, with their kernels on the way to be compiled."""

    problem: Problem
    candidates: list[Candidate]


def prepare(problem: Problem, wanted: Sequence[dict[str, Any]], most: int, pool: CompilePool | None, name: str) -> Tried:
    """What is tried: the compiler's own choice, fields of it replaced, and the first `most` that the model lists."""
    from dsi.codegen import cost
    from dsi.codegen.devices import find_device

    device = find_device(name)
    ranked, own = list(cost.candidates(problem.spec, None, device)), cost.choices(problem.spec, device)[-1]
    listed = [own, *(dataclasses.replace(own, **fields) for fields in wanted), *ranked[:most]]
    candidates = [Candidate(choice, ranked.index(choice) if choice in ranked else None) for choice in dict.fromkeys(listed)]
    made = pool.submit(problem.spec, [c.choice for c in candidates]) if pool is not None else [None] * len(candidates)
    for candidate, future in zip(candidates, made, strict=True):
        candidate.predicted = _predicted(problem, candidate.choice, device) * 1e6
        candidate.made = future
    return Tried(problem, candidates)


def _predicted(problem: Problem, choice: Any, device: Any) -> float:
    """Seconds by the model, which is told the live length."""
    from dsi.codegen import attention_cost, cost
    from dsi.codegen.roofline import assumptions

    if choice.schedule != "attention_decode" or problem.case.live is None:
        return cost.predict(problem.spec, choice, device)
    work = attention_cost.attention_work(problem.spec, 1, assumptions(problem.spec.plan, choice))
    return attention_cost.attention_seconds(dataclasses.replace(work, live=problem.case.live), choice, device)


def keep(tried: Sequence[Tried], name: str, file: Path) -> None:
    """Writes what won to a table of defaults: of one prompt, or of one cache over all live lengths that were measured, the choice with the
    least time in all, if it was right at each of them."""
    from dsi.codegen import attention_defaults

    of_a_cache: dict[tuple[Any, ...], list[Tried]] = {}
    for one in tried:
        entry = attention_defaults.entry(one.problem.spec, {}, 1.0)
        if entry is not None:
            of_a_cache.setdefault(entry.key, []).append(one)
    entries = []
    for alike in of_a_cache.values():
        times = [{c.choice: c.us for c in one.candidates if not c.problem and c.us} for one in alike]
        sums = {choice: sum(each[choice] for each in times) for choice in times[0] if all(choice in each for each in times)}
        if sums:
            best = min(sums, key=lambda choice: sums[choice])
            fields = {f.name: getattr(best, f.name) for f in dataclasses.fields(best) if getattr(best, f.name) != f.default}
            fields.pop("max_rows")
            entries.append(attention_defaults.entry(alike[0].problem.spec, fields, round(sums[best] / len(alike), 2)))
    if entries:
        attention_defaults.write(file, name, [entry for entry in entries if entry is not None])


def measure(tried: Tried, best: int, name: str, report: Report) -> None:
    """Check and time every candidate, the fastest once more by turns with SDPA; prints the best."""
    problem, candidates = tried.problem, tried.candidates
    runs: dict[int, Callable[[int], Any]] = {}
    for candidate in candidates:
        if report.fits(f"{problem}: {candidate.describe()}", 0.5):
            _try(problem, candidate, name, runs)
        else:
            candidate.problem = "no time was left"
    library = None
    if torch.cuda.is_available():
        good = sorted((c for c in candidates if not c.problem), key=lambda c: c.us or 0.0)
        again = [c for c in dict.fromkeys((candidates[0], *good[:best])) if id(c) in runs]
        graphs = [graph_of(lambda number: [problem.function(*problem.sets[number])], len(problem.sets))]
        graphs += [graph_of(runs[id(c)], len(problem.sets)) for c in again]
        times: list[list[float]] = [[] for _ in graphs]
        for turn in range(report.settings.blocks):
            for number in range(len(graphs)) if turn % 2 == 0 else reversed(range(len(graphs))):
                times[number].append(median_of(*graphs[number], replays=2))
        library = statistics.median(times[0])
        for candidate, values in zip(again, times[1:], strict=True):
            candidate.us = statistics.median(values)
    _report(problem, candidates, library, best, report)


def _try(problem: Problem, candidate: Candidate, name: str, runs: dict[int, Callable[[int], Any]]) -> None:
    """Run on poisoned outputs, hold against the reference, and time; what is wrong is kept, not raised."""
    try:
        made = generated(problem.spec, candidate.choice, name) if candidate.made is None else candidate.made.result(LONGEST)
        candidate.problem, candidate.spills = made.problem, made.spills
        if candidate.problem:
            return
        run: Any = Running(problem, made)  # type: ignore[arg-type]
        for output in run.outputs:
            output.fill_(float("nan"))
        candidate.error = timing.relative_error(run(0)[0], problem.reference)
        first = run(0)[0].clone()
        if not candidate.error <= problem.bound:
            candidate.problem = f"wrong: error {candidate.error:.1e}, and {problem.bound:.1e} is allowed"
        elif not all(torch.equal(run(0)[0], first) for _ in range(3)):
            candidate.problem = "wrong: the bits of the result change from run to run"
        elif torch.cuda.is_available():
            candidate.us = median_of(*graph_of(run, len(problem.sets)), replays=5)
            runs[id(candidate)] = run
    except Exception as error:
        candidate.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _report(problem: Problem, candidates: list[Candidate], library: float | None, best: int, report: Report) -> None:
    roofline = report.roofline(problem.moved, problem.flops, problem.dtype)
    floor = None if roofline is None else roofline * 1e3
    report.add({"case": str(problem), "copies": len(problem.sets), "bytes": problem.moved, "flops": problem.flops, "roofline us": floor,
                "library us": library, "choices": [c.as_json(floor, library) for c in candidates]})  # fmt: skip
    good = sorted((c for c in candidates if not c.problem), key=lambda c: c.us or 0.0)
    lines = [("SDPA", "-", figure(library, ".2f"), figure(floor / library if floor and library else None, ".2f"), "1.00", "-")]
    for c in dict.fromkeys((candidates[0], *good[:best])):
        found = c.as_json(floor, library)
        values = [figure(found[key], form) for key, form in (("us", ".2f"), ("share", ".2f"), ("over library", ".2f"), ("error", ".0e"))]
        rank = "own" if c is candidates[0] else f"#{c.rank}" if c.rank is not None else "given"
        scan = f" scan {c.choice.block_s}" if c.choice.block_s > 1 else ""
        lines.append((f"{rank}: {c.describe()}{scan}", f"{c.predicted:.2f}", *values))
    title = f"{problem}, {len(problem.sets)} copies, {len(good)} of {len(candidates)} choices"
    report.table(title, ("kernel", "predicted", "us", "of roofline", "over SDPA", "error"), lines)
    for text in list(dict.fromkeys(f"{c.describe()}: {c.problem}" for c in candidates if c.problem))[:5]:
        report.say(text)


def main(
    decode: Annotated[str, typer.Option(help="Decode steps: batch x heads x kv heads x head size x cache x live, by commas.")] = DECODE,
    prefill: Annotated[str, typer.Option(help="Prompts: batch x heads x kv heads x head size x length, by commas.")] = PREFILL,
    form: Annotated[str, typer.Option(help="Of prompts: masked (a mask as models compute it) or causal.")] = "masked,causal",
    choice: Annotated[list[str] | None, typer.Option(help="Fields of a choice, 'split=1|4,block_n=64|128'; | tries each.")] = None,
    most: Annotated[int, typer.Option(help="Choices of the cost model's list that are tried.")] = 36,
    best: Annotated[int, typer.Option(help="Choices that are printed.")] = 6,
    blocks: Annotated[int, typer.Option(min=1, help="Interleaved blocks of which the median is taken.")] = 5,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "bf16",
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    defaults: Annotated[
        Path | None, typer.Option(help="File in the form of codegen/attention_defaults.json that gets the winners.")
    ] = None,
) -> None:
    """Attention's kernels under many choices, beside SDPA."""
    path.backend()  # so that the package is found
    from dsi.codegen.attention_defaults import read

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = settings("eager,dsi", blocks, dtype, small, budget, json)
    table_of_defaults(defaults, read)
    if small:
        decode, prefill, most = "2x4x2x16x32x9", "1x4x4x16x12", min(most, 2)
    kinds = known_ones(form, ("masked", "causal"), "form") if form else []
    try:
        cases = [(Case.parse(text), "masked") for text in listed(decode)]
        cases += [(Case.parse(text), kind) for text in listed(prefill) for kind in kinds]
        wanted = [fields for text in choice or () for fields in parse_choices(text)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    report = Report("attention_sweep", shared)
    report.measure_rates([DTYPES[dtype]] if prefill else [])
    name = timing.device_name()
    with ExitStack() as stack, torch.no_grad():
        pool = stack.enter_context(CompilePool(name)) if device == "cuda" else None
        queued = []
        for case, kind in cases:
            reset()
            queued.append(prepare(Problem(case, kind, DTYPES[dtype], device), wanted, most, pool, name))
        for tried in queued:
            if report.fits(str(tried.problem), 0 if small else 5):
                measure(tried, best, name, report)
            tried.problem.sets.clear()
        if defaults is not None:
            keep(queued, name, defaults)


if __name__ == "__main__":
    typer.run(main)
