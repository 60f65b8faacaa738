"""`python -m bench in-model`: choices of kernels that make the whole step faster, tried in the model.

What is fastest launched behind itself (`python -m bench linear --sweep`) is not always fastest between other kernels. Here a step is
compiled once; group by group of regions that run one kernel, the costliest first, other choices take its place in all of them, the step's
result is checked, and the step is captured in a CUDA graph and timed by turns with the best so far. What is faster stays (coordinate
descent), and goes to the tables of defaults.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import path, timing
from bench.capture import Captured
from bench.comparators import reset, sentence
from bench.compile_pool import Compiled, CompilePool, generated
from bench.decode import workloads
from bench.linear import COMPILING, LONGEST, Candidate
from bench.model_step import Group, ModelStep, choices_of, fingerprint
from bench.report import Report, Settings, figure
from bench.sides import SIDES

NOISE = 0.003  # share by which a step must be faster
HOPELESS = 0.01  # share by which a step is slower in the first turn that ends its trial
AGAIN = 0.01  # what was slower by no more is tried once more when other groups have changed


@dataclass
class Plan:
    """What is tried in each group whose title holds one of `groups` (none: in all): fields of its choice replaced (`wanted`: a part of a
    title, and the fields), what was measured for other numbers of rows, and the first `most` choices of the cost model; all of it `rounds`
    times, as long as something wins. Winners go to `defaults`."""

    wanted: Sequence[tuple[str, dict[str, Any]]] = ()
    most: int = 8
    groups: Sequence[str] = ()
    rounds: int = 2
    defaults: Path | None = None

    def includes(self, group: Group) -> bool:
        """Whether choices are to be tried in a group."""
        return not self.groups or any(text in group.title for text in self.groups)


@dataclass
class Trial:
    """A choice in a group: the step's error, its microseconds by turns with the best before (`before`, `after`), whether it stayed."""

    group: Group
    candidate: Candidate
    before: float | None = None
    after: float | None = None
    kept: bool = False

    def as_json(self) -> dict[str, Any]:
        found = self.candidate.as_json(None, None)
        named = {key: found[key] for key in ("choice", "text", "rank", "predicted us", "error", "spills", "problem")}
        return {"group": self.group.title, **named, "step us before": self.before, "step us after": self.after, "kept": self.kept}


def run(
    settings: Settings, cases: Sequence[str], batches: Sequence[int], layers: int | None, cache: int, live: int | None, plan: Plan
) -> Report:
    """Improve the choices of every case at every batch on every side."""
    report = Report("in-model", settings)
    report.measure_rates()
    path.backend()  # so that the package is found
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    with ExitStack() as stack, torch.no_grad():
        pool = stack.enter_context(CompilePool(name)) if torch.cuda.is_available() else None
        for case, batch, work in workloads(settings, cases, batches, layers, cache, live):
            for side in settings.against:
                if not report.fits(f"{work.title}: {side}", 0 if settings.small else SIDES[side].seconds(work.size)):
                    continue
                row: dict[str, Any] = {"title": work.title, "case": case, "batch": batch, "side": side, "problem": "", "choices": []}
                try:
                    _improve(ModelStep(work, SIDES[side], report, name), plan, report, pool, name, row)
                except Exception as error:  # the other cases can still be improved
                    row["problem"] = sentence(error)
                    report.say(f"{work.title}, {side}: {row['problem']}")
                finally:
                    report.add(row)
                reset()
    return report


def _improve(step: ModelStep, plan: Plan, report: Report, pool: CompilePool | None, name: str, row: dict[str, Any]) -> None:
    descent = Descent(step, plan, report, pool, name)
    before = [group.choice for group in step.groups]
    row["step us"] = descent.start()
    shares = [group.us for group in step.groups]
    works, stopped = step.timed, None
    try:
        descent.go()
    except (Exception, KeyboardInterrupt) as error:  # the device has failed, or somebody's patience: what was found until then is kept
        row["problem"], works, stopped = sentence(error), False, error
        report.say(f"{step.work.title}: {row['problem']}")
    won = [(group, choice) for group, choice in zip(step.groups, before, strict=True) if group.choice != choice]
    if works and won:
        descent.look()
    alone = {id(group): _alone(group, choice, report) if works else None for group, choice in won}
    row["step us after"], row["choices"] = descent.us, [trial.as_json() for trial in descent.trials]
    row["groups"] = [
        {
            "group": group.title,
            "count": len(group.places),
            "before": _text(choice),
            "after": _text(group.choice),
            "us in step": share,
            "us in step after": group.us,
            "us alone": alone.get(id(group)),
        }
        for group, choice, share in zip(step.groups, before, shares, strict=True)
    ]
    _print(step, row, descent, report)
    if plan.defaults is not None:
        times = [(group, alone[id(group)]) for group, _ in won]
        keep(plan.defaults, name, [(group, None if both is None else both[1]) for group, both in times], report)
    if isinstance(stopped, KeyboardInterrupt):
        raise stopped


class Descent:
    """Goes through a step's groups, and keeps in each what makes the step faster. `us`: the step's microseconds as last timed."""

    def __init__(self, step: ModelStep, plan: Plan, report: Report, pool: CompilePool | None, name: str):
        self.step, self.plan, self.report, self.pool, self.name = step, plan, report, pool, name
        self.trials: list[Trial] = []
        self.us: float | None = None
        self._best: Captured | None = None
        self._tried: set[Any] = set()  # (group, what its kernels are made of)

    def start(self) -> float | None:
        """Puts in place what an untuned start takes, and times the step; None without a device."""
        for group in self.step.groups:
            made = generated(group.spec, group.choice, self.name)
            if not made.problem and fingerprint(made.kernels) != group.sources:  # tuned before, or made for an equal region elsewhere
                try:
                    group.kernels = self.step.make(group, made.kernels)
                except Exception as error:  # what runs has fewer stages, say, because this does not fit
                    self.report.say(f"{group.title}: something else than {_text(group.choice)} runs: {sentence(error)}")
            self.step.settle(group)
        if self.step.timed:
            self._best = self.step.capture()
            self.us = self.step.time(self._best)
            self.look()
        return self.us

    def look(self) -> None:
        """Has each group know its time in the step; where the trace does not tell, what is predicted stays."""
        try:
            if self._best is not None:
                self.step.measure_groups(self._best)
        except (ValueError, RuntimeError) as error:
            self.report.say(f"groups are taken in the order of their predicted times: {error}")

    def go(self) -> None:
        """All rounds of the plan, as long as the last one changed something and time is left."""
        listed = [group for group in self.step.groups if self.plan.includes(group)]
        listed.sort(key=lambda group: -(group.us if group.us is not None else group.predicted))
        for number in range(self.plan.rounds):
            queued = [(group, self._candidates(group)) for group in listed]  # compiled in the order in which they are tried
            won = [self._group(group, candidates) for group, candidates in queued]
            if None in won or not any(won):
                return
            self.report.say(f"round {number + 1}: the step takes {figure(self.us, '.1f')} us")

    def _candidates(self, group: Group) -> list[Candidate]:
        from dsi.codegen import cost
        from dsi.codegen.devices import find_device

        figures = find_device(self.name)
        ranked = list(cost.candidates(group.spec, None, figures))
        wanted = [fields for part, fields in self.plan.wanted if part in group.title]
        found = [
            Candidate(choice, ranked.index(choice) if choice in ranked else None, predicted=cost.predict(group.spec, choice, figures) * 1e6)
            for choice in choices_of(group, self.name, wanted, self.plan.most)
            if (id(group), choice) not in self._tried
        ]
        made: Sequence[Future[Compiled] | None] = [None] * len(found)
        if self.pool is not None:
            made = self.pool.submit(group.spec, [candidate.choice for candidate in found])
        for candidate, future in zip(found, made, strict=True):
            candidate.made = future
        return found

    def _group(self, group: Group, candidates: Sequence[Candidate]) -> bool | None:
        """Whether one of the candidates has won; None where no time was left for all of them."""
        won, seen = False, {group.sources}
        for number, candidate in enumerate(candidates):
            waits = 0.3 if candidate.made is None or candidate.made.done() else COMPILING
            if not self.report.fits(f"{group.title}: {len(candidates) - number} choices", 0 if self.report.settings.small else waits):
                return None
            trial = Trial(group, candidate)
            self.trials.append(trial)
            try:
                made = generated(group.spec, candidate.choice, self.name) if candidate.made is None else candidate.made.result(LONGEST)
                candidate.problem, candidate.spills = made.problem, made.spills
                if not made.problem and fingerprint(made.kernels) in seen:
                    candidate.problem = "the same kernel as another choice"
                if not candidate.problem:
                    seen.add(fingerprint(made.kernels))
                    self._try(trial, made.kernels)
            except Exception as error:  # it does not fit the device, took too long to compile, or failed when it ran
                candidate.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                timing.synchronize()  # raises where the device has failed
            if not trial.kept:
                self.step.settle(group)
            close = trial.before is not None and trial.after is not None and trial.after < (1 + AGAIN) * trial.before
            if not close:
                self._tried.add((id(group), candidate.choice))
            won |= trial.kept
            self._say(trial)
        return won

    def _try(self, trial: Trial, variants: Sequence[Any]) -> None:
        group = trial.group
        kernels = self.step.make(group, variants)
        trial.candidate.error, trial.candidate.problem = self.step.check(group, kernels)
        if trial.candidate.problem or not self.step.timed or self._best is None:
            return
        best, new = self._best, self.step.capture()
        times = by_turns(lambda: self.step.time(best), lambda: self.step.time(new), self.report.settings.blocks)
        trial.before, trial.after = (statistics.median(side) for side in zip(*times, strict=True))
        trial.kept = faster(times)
        if trial.kept:
            group.choice, group.kernels, self._best, self.us = trial.candidate.choice, kernels, new, trial.after

    def _say(self, trial: Trial) -> None:
        right = "right, and nothing is timed without a device" if trial.after is None else ""
        times = f"{figure(trial.before, '.2f')} to {figure(trial.after, '.2f')} us{', kept' if trial.kept else ''}"
        self.report.say(f"{trial.group.title}: {_text(trial.candidate.choice)}: {trial.candidate.problem or right or times}")


def by_turns(one: Callable[[], float], other: Callable[[], float], blocks: int) -> list[tuple[float, float]]:
    """(one, other) of every block, each timed first in every second block; only the first block where that is hopeless for `other`."""

    def pairs() -> Iterator[tuple[float, float]]:
        for number in range(blocks):
            second = other() if number % 2 else None
            first = one()
            yield first, other() if second is None else second

    found: list[tuple[float, float]] = []
    for pair in pairs():
        found.append(pair)
        if len(found) == 1 and pair[1] > (1 + HOPELESS) * pair[0]:
            break
    return found


def faster(times: Sequence[tuple[float, float]]) -> bool:
    """Whether the second of each pair is faster: in every pair, and its median by more than the noise."""
    before, after = (statistics.median(side) for side in zip(*times, strict=True))
    return after < (1 - NOISE) * before and all(second < first for first, second in times)


def keep(file: Path, name: str, winners: Sequence[tuple[Group, float | None]], report: Report) -> None:
    """Writes the choices of groups to a file of defaults: linears' to `file`, attention's to a file beside it whose name begins with
    "attention_". A linear has its microseconds alone, as sweeps have them, where these are known; attention's time depends on what
    is live, and is left out. What the tables have no place for, the report names."""
    from dsi.codegen import attention_defaults, defaults
    from dsi.codegen.devices import find_device
    from dsi.ir import tile as t

    linears, attentions = [], []
    shipped = {entry.key: entry.library for entry in defaults.table().get(find_device(name).name, ())}
    for group, alone in winners:
        entry: Any = None
        if isinstance(group.spec.plan, t.LinearPlan):
            entry = defaults.entry(group.spec, group.choice, alone)
            linears.append(entry.model_copy(update={"library": shipped.get(entry.key)}))
        elif isinstance(group.spec.plan, t.AttentionPlan):
            fields = {field: value for field, value in vars(group.choice).items() if value != _unset().get(field) and field != "max_rows"}
            entry = attention_defaults.entry(group.spec, fields, None)
            attentions += [entry] if entry is not None else []
        if entry is None:
            report.say(f"{group.title}: the tables of defaults have no place for its {_text(group.choice)}")
    if linears:
        defaults.write(file, name, linears)
    if attentions:
        attention_defaults.write(file.with_name(f"attention_{file.name}"), name, attentions)


def _unset() -> dict[str, Any]:
    from dsi.codegen.kernel import Choice

    return {field.name: field.default for field in dataclasses.fields(Choice)}


def _alone(group: Group, before: Any, report: Report) -> tuple[float, float] | None:
    """Microseconds of a group's kernel behind itself by the choice before and the one now, over data past the cache; None for what is no
    linear, whose time depends on the data, and where it cannot be had."""
    from dsi.codegen.devices import find_device
    from dsi.ir import tile as t
    from dsi.runtime.trial import DeviceTrials, Subject

    if not isinstance(group.spec.plan, t.LinearPlan) or not report.fits(f"{group.title} alone", 2.0):
        return None
    try:
        trials = DeviceTrials(torch.device("cuda", torch.cuda.current_device()), find_device(torch.cuda.get_device_name()))
        subject = Subject(group.places[0][0].key, group.spec, None)
        one, other = trials.time(subject, [trials.compile(subject, choice) for choice in (before, group.choice)])
    except Exception as error:
        report.say(f"{group.title} was not timed alone: {sentence(error)}")
        return None
    return one * 1e6, other * 1e6


def _text(choice: Any) -> str:
    return Candidate(choice, None).describe()


def _print(step: ModelStep, row: dict[str, Any], descent: Descent, report: Report) -> None:
    """One line a group: its choices before and after, its time in the step before and after, alone before and after."""
    lines = []
    for group, found in zip(step.groups, row["groups"], strict=True):
        changed = f" -> {found['after']}" if found["after"] != found["before"] else ""
        times = (found["us in step"], found["us in step after"] if changed else None, *(found["us alone"] or (None, None)))
        tried = [trial for trial in descent.trials if trial.group is group]
        right = sum(not trial.candidate.problem for trial in tried)
        name = f"{group.title}: {found['before']}{changed}"
        lines.append((name, str(len(group.places)), f"{right}/{len(tried)}", *(figure(value, ".2f") for value in times)))
    floor = report.roofline(step.work.moved_int8 if step.side.int8 else step.work.moved, step.work.flops, step.work.dtype)
    title = f"{step.work.title}, {step.side.name}: {figure(row['step us'], '.1f')} us a step before, {figure(descent.us, '.1f')} after"
    title += "" if floor is None else f", roofline {floor * 1e3:.1f}"
    report.table(title, ("group: choice", "count", "right", "us in step", "after", "us alone", "after"), lines)
    for trial in descent.trials:
        if trial.candidate.problem.startswith("wrong"):
            report.say(f"{trial.group.title}: {_text(trial.candidate.choice)}: {trial.candidate.problem}")
