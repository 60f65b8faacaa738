"""A decode step compiled once, whose kernels are exchanged for others without compiling it again: checked, and timed in a CUDA graph."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import path, timing
from bench.capture import Captured, captured
from bench.comparators import Workload, reset, rounding_error, run_checked
from bench.decode import STEPS
from bench.kernels import kernel_events, traced
from bench.limits import at_most
from bench.report import Report
from bench.sides import SIDES, Side
from bench.timeline import Slot, slots_of

REPLAYS = 3  # blocks of `STEPS` replays of which one timing is the median


@dataclass(eq=False)
class Group:
    """The regions of a step that run one kernel: `places` are what runs each in the program, `choice` and `kernels` the best so far."""

    places: list[tuple[Any, Any]]  # (Region, FallingBack)
    choice: Any
    kernels: list[Any]
    predicted: float  # microseconds of all of them together
    us: float | None = None  # from the start of each to the next kernel's start, in a trace of the step

    @property
    def spec(self) -> Any:
        return self.places[0][0].spec

    @property
    def sources(self) -> tuple[Any, ...]:
        """What the kernels are made of: equal where two choices give the same kernels."""
        return fingerprint(self.kernels[0].found.variants)

    @property
    def title(self) -> str:
        """What it computes, and columns x inner x rows of a linear; key heads x queries of each x channels x keys of attention."""
        from dsi.codegen import attention_defaults, defaults
        from dsi.ir import tile as t

        title = self.places[0][0].label or self.places[0][0].kind
        if isinstance(self.spec.plan, t.LinearPlan):
            linear = defaults.entry(self.spec, self.choice, 1.0)
            return f"{title} {linear.columns}x{linear.inner}x{linear.rows}"
        found = attention_defaults.entry(self.spec, {}, 1.0)
        return title if found is None else f"{title} {found.heads}x{found.group}x{found.size}x{found.keys}"

    def use(self, kernels: Sequence[Any]) -> None:
        """Has `kernels` run the group's regions from now on."""
        for (_, place), kernel in zip(self.places, kernels, strict=True):
            place.use(kernel)


def fingerprint(variants: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for kernels that are launched alike from the same source."""
    return tuple((kernel.source, repr(kernel.launches), repr(kernel.workspaces)) for kernel in variants)


class Poisoned:
    """Runs a region's kernel on outputs that hold NaN before: memory that comes back from an earlier step would hold right results."""

    def __init__(self, kernel: Any, region: Any):
        from dsi.runtime.region_step import cloned_inputs

        self.kernel = kernel
        self.kept = set(cloned_inputs(region))  # outputs that begin as copies of inputs

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Tensor], sizes: Any) -> None:
        for number, output in enumerate(outputs):
            own = number not in self.kept and all(output is not given for given in inputs)
            if own and output.is_floating_point():
                output.fill_(float("nan"))
        self.kernel(inputs, outputs, sizes)

    def describe(self) -> str:
        return f"poisoned {self.kernel.describe()}"


class ModelStep:
    """A step of `work` as `side` compiles it, its error bound, and its groups in the order of the program.

    Without a CUDA device kernels run under Triton's interpreter, those being tried and no others, and nothing is timed. Raises ValueError
    for a step that is more than one graph, or of symbolic sizes, ArithmeticError where its results are wrong as it is.
    """

    timed = torch.cuda.is_available()

    def __init__(self, work: Workload, side: Side, report: Report, device_name: str):
        self.work, self.side = work, side
        self._state = [tensor.clone() for tensor in work.state]
        reset()
        with at_most(report.settings.limit, f"compiling and warming up {side.name}"):
            self.reference = work.reference()
            reset()  # the wider copy's memory
            rounding = rounding_error(work, self.reference, report)
            eager = timing.relative_error(run_checked(work, work.compile_for(SIDES["eager"])), self.reference)
            self.bound = side.bound(eager, rounding)
            with _watched() as programs:
                self.calls = work.compile_for(side)
                for _ in range(2):
                    values = run_checked(work, self.calls)
        if len(programs) != 1:
            raise ValueError(f"{work.title} was compiled as {len(programs)} graphs, and choices are tried in one")
        if programs[0].sizes.names:
            raise ValueError(
                f"{work.title} was compiled for any {', '.join(programs[0].sizes.names)}, and choices are tried at fixed sizes"
            )
        error = timing.relative_error(values, self.reference)
        if not error <= self.bound:
            raise ArithmeticError(f"wrong before anything is tried: error {error:.1e}, and {self.bound:.1e} is allowed")
        self.program = programs[0]
        self.groups = _groups(self.program, device_name)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def settle(self, group: Group) -> None:
        """Has the best kernels so far run a group."""
        group.use(group.kernels if torch.cuda.is_available() else _references(group.places))

    def make(self, group: Group, variants: Sequence[Any]) -> list[Any]:
        """Kernels of another choice for every region of a group, compiled. Raises what Triton raises where the device cannot hold one."""
        kernels = [place.remade(variants) for _, place in group.places]
        if torch.cuda.is_available():
            for (region, _), kernel in zip(group.places, kernels, strict=True):
                values = [[node.meta["val"] for node in nodes] for nodes in (region.inputs, region.outputs)]
                inputs, outputs = ([getattr(value, "dtype", value) for value in of] for of in values)
                kernel.compile(inputs, outputs, ())
        return kernels

    def check(self, group: Group, kernels: Sequence[Any]) -> tuple[float, str]:
        """Runs the group by `kernels`: the error of the step's results, and what is wrong with them ("" where nothing is)."""
        for tensor, before in zip(self.work.state, self._state, strict=True):
            tensor.copy_(before)  # a wrong choice before may have left NaN where hidden keys are
        group.use([Poisoned(kernel, region) for (region, _), kernel in zip(group.places, kernels, strict=True)])
        values = run_checked(self.work, self.calls)
        error = timing.relative_error(values, self.reference)
        if not error <= self.bound:
            return error, f"wrong: error {error:.1e}, and {self.bound:.1e} is allowed"
        group.use(kernels)
        again = [run_checked(self.work, self.calls) for _ in range(3 if torch.cuda.is_available() else 1)]
        return error, "" if all(torch.equal(one, values) for one in again) else "wrong: the bits of the result change from run to run"

    def capture(self) -> Captured:
        """The step by the kernels that are in place. Raises ArithmeticError where a replay gives other bits than the call."""
        expected = run_checked(self.work, self.calls)[0]
        self.work.prepare()
        found = captured(self.calls[0], self._stream)
        found.result.fill_(float("nan"))
        self.work.prepare()
        found.replay()
        torch.cuda.synchronize()
        if not torch.equal(found.result.float(), expected):
            raise ArithmeticError("wrong: a replay of its CUDA graph gives other bits than the call")
        return found

    def time(self, step: Captured) -> float:
        """Microseconds of the device for one step."""
        found = []
        for _ in range(REPLAYS):
            self.work.prepare()
            torch.cuda.synchronize()
            found += timing.event_times(lambda: _steps(step), 1)
        return statistics.median(found) * 1e3 / STEPS

    def measure_groups(self, step: Captured) -> None:
        """Sets every group's `us` from a trace. Raises ValueError where the trace is not that of the step."""

        def steps() -> None:
            timing.sleep(2e-3)
            _steps(step)

        self.work.prepare()
        steps()
        self.work.prepare()
        events = [event for event in kernel_events(traced(steps)) if "spin_kernel" not in event["name"]]
        spent = time_by_group(slots_of(events, STEPS), launches_of(self.program, self.groups))
        for number, group in enumerate(self.groups):
            group.us = spent.get(number)


def _steps(step: Captured) -> None:
    for _ in range(STEPS):
        step.replay()


def launches_of(program: Any, groups: Sequence[Group]) -> list[tuple[int, str]]:
    """The generated kernels that a step launches, in order: the number of the group, and the kernel's name."""
    kernels = {id(place): (number, kernel) for number, group in enumerate(groups) for (_, place), kernel in _each(group)}
    found = []
    for _, place in program.regions:
        if id(place) in kernels:
            number, kernel = kernels[id(place)]
            found += [(number, launch.entry) for launch in kernel.chosen(()).launches if hasattr(launch, "entry")]
    return found


def _each(group: Group) -> Iterator[tuple[tuple[Any, Any], Any]]:
    yield from zip(group.places, group.kernels, strict=True)


def time_by_group(slots: Sequence[Slot], launches: Sequence[tuple[int, str]]) -> dict[int, float]:
    """Microseconds of a step that each group's kernels take from their start to the next kernel's start.

    `launches` are (group, kernel's name) in the program's order; kernels of the trace that are none of them are passed over. Raises
    ValueError naming a kernel that the trace has not.
    """
    found: dict[int, float] = {}
    left = iter(slots)
    for group, name in launches:
        slot = next((slot for slot in left if slot.name == name), None)
        if slot is None:
            raise ValueError(f"{name} is not where the trace should have it")
        found[group] = found.get(group, 0.0) + slot.step
    return found


def _groups(program: Any, device_name: str) -> list[Group]:
    """The regions of equal keys, in the order of their first one; those that run by references have no choice to be tried."""
    from dsi.codegen import cost
    from dsi.codegen.devices import find_device
    from dsi.runtime.choices import untuned
    from dsi.runtime.fallback import FallingBack

    places: dict[str, list[tuple[Any, Any]]] = {}
    for region, place in program.regions:
        if not isinstance(place, FallingBack) or region.spec is None or len(cost.buckets(region.spec.plan)) != 1:
            continue
        if not torch.cuda.is_available() or place.describe() == place.kernel.describe():  # else the device cannot hold it
            places.setdefault(region.key or region.name, []).append((region, place))
    figures, found = find_device(device_name), []
    for each in places.values():
        spec = each[0][0].spec
        choice = untuned(spec, None, device_name, figures)
        predicted = cost.predict(spec, choice, figures) * 1e6 * len(each)
        found.append(Group(each, choice, [place.kernel for _, place in each], predicted))
    return found


def _references(places: Sequence[tuple[Any, Any]]) -> list[Any]:
    from dsi.runtime.program import ReferenceKernel

    return [ReferenceKernel(region) for region, _ in places]


@contextlib.contextmanager
def _watched() -> Iterator[list[Any]]:
    """Within: the list of programs that are compiled, on a CUDA device or, without one, for Triton's interpreter."""
    path.backend()  # so that the package is found
    from dsi.runtime import cpu, cuda

    programs: list[Any] = []
    module, name = (cuda, "compile_cuda") if torch.cuda.is_available() else (cpu, "compile_cpu")
    original = getattr(module, name)

    def on_cuda(gm: Any, inputs: Sequence[Any], context: Any) -> Any:
        call = original(gm, inputs, context)
        programs.append(call.program)
        return call

    def interpreted(gm: Any, inputs: Sequence[Any], context: Any) -> Any:
        program = cuda.compile_interpreted(gm, inputs, context)
        for region, place in program.regions:
            place.use(_references([(region, place)])[0])  # the interpreter is slow
        programs.append(program)
        return program

    setattr(module, name, on_cuda if torch.cuda.is_available() else interpreted)
    try:
        yield programs
    finally:
        setattr(module, name, original)


def choices_of(group: Group, device_name: str, wanted: Sequence[dict[str, Any]], most: int) -> list[Any]:
    """What is tried for a group: fields of its choice replaced, what was measured to be best at other numbers of rows, the first `most`
    that the cost model lists; not its own choice. `most` of 0: only what is wanted."""
    from dsi.codegen import cost
    from dsi.codegen.devices import find_device

    figures = find_device(device_name)
    listed = [dataclasses.replace(group.choice, **fields) for fields in wanted]
    if most:
        listed += [*_of_other_rows(group, figures), *list(cost.candidates(group.spec, None, figures))[:most]]
    return [choice for choice in dict.fromkeys(listed) if choice != group.choice]


def _of_other_rows(group: Group, device: Any) -> list[Any]:
    """The shipped choices of the same linear for other numbers of rows, as far as they are choices for this one."""
    from dsi.codegen import defaults
    from dsi.codegen.kernel import Choice
    from dsi.codegen.linear_choices import admissible, statistics_block
    from dsi.codegen.linear_work import linear_work
    from dsi.codegen.roofline import assumed_rows, assumptions
    from dsi.ir import tile as t

    plan = group.spec.plan
    if not isinstance(plan, t.LinearPlan):
        return []
    own = defaults.entry(group.spec, group.choice, 1.0)
    work = linear_work(group.spec, assumed_rows(plan, group.choice), assumptions(plan, group.choice))
    found = []
    for other in defaults.table().get(device.name, ()):
        same = (other.kind, other.columns, other.inner, other.norm) == (own.kind, own.columns, own.inner, own.norm)
        if same and own.rows / 4 <= other.rows <= 4 * own.rows and other.choice["schedule"] != "library":
            choice = Choice(**{"max_rows": None, **other.choice})
            choice = dataclasses.replace(choice, block_s=statistics_block(work, choice.block_m, choice.num_warps))
            found += [choice] if admissible(work, choice, own.rows, device) else []
    return found
