"""One region's kernel on made-up data: tensors like the region's, and the time of a launch on the device.

Nothing of the user's is touched: inputs, caches and outputs are made here, and thrown away.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from dsi.codegen import roofline
from dsi.codegen.devices import Device
from dsi.codegen.integers import Limits, interval, normalise
from dsi.codegen.kernel import Choice, Kernel, Launch, LibraryCall, View
from dsi.ir import tile as t
from dsi.ir.errors import refuse
from dsi.ir.kernel_spec import within

from dsi import codegen

from .cache import DiskCache
from .graphs import CudaRecorder
from .kernels import KernelSet
from .launch import GeneratedKernel
from .launcher import start_driver
from .sizes import Sizes
from .workspaces import stream_of

Assumed = Mapping[sympy.Symbol, int]
Data = tuple[list[Any], list[torch.Tensor]]  # inputs and outputs of one launch
ROUNDS = 5  # timings of which the median is taken
SHORTEST, LONGEST = 10, 200  # launches in one timing
TIMING = 400e-6  # seconds that one timing should take
PAST_CACHE = 2.5  # bytes of all inputs by turns, in sizes of the L2 cache: when a launch comes round, nothing of its own is left there


@dataclass(frozen=True)
class Subject:
    """What is tuned at once: the kernel of all regions with key `key`, for at most `max_rows` rows."""

    key: str
    spec: t.KernelSpec
    max_rows: int | None

    @property
    def assumed(self) -> Assumed:
        """What symbolic sizes are taken to be: what the cost model takes them to be."""
        return roofline.assumptions(self.spec.plan, Choice("", self.max_rows, 1, 1))


@dataclass
class Candidate:
    """A choice whose kernels are compiled. `spills`: whether one of them keeps values in memory for want of registers."""

    choice: Choice
    run: GeneratedKernel
    spills: bool


class DeviceTrials:
    """Trials on a CUDA device, which has to be the current one of every thread that calls."""

    def __init__(self, device: torch.device, figures: Device):
        self.device = device
        self.figures = figures
        start_driver()
        self._disk = DiskCache("trials", enabled=False)  # sources of choices that do not win are no use to anyone

    def compile(self, subject: Subject, choice: Choice) -> Candidate:
        """Compiles a choice. Raises what code generation or Triton raises where it cannot be."""
        with torch.cuda.device(self.device):
            (kernel,) = codegen.generate(subject.spec, choice, self.figures)
            fixed = at_sizes(kernel, subject.assumed)
            found = KernelSet((fixed,), sympy.Integer(1), {})
            run = GeneratedKernel(found, (), Sizes(()), self._disk, self.device, overlaps=True)
            inputs = [None if tensor is None else tensor.dtype for tensor in subject.spec.inputs]
            compiled = run.compile(inputs, [tensor.dtype for tensor in subject.spec.outputs], ())
            return Candidate(choice, run, any(kernel.n_spills for kernel in compiled))

    def time(self, subject: Subject, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds a launch of each. Raises `torch.OutOfMemoryError` where there is no room for the data."""
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self.device):
            data = self._data(subject)
            graphs = [self._graph(candidate, data) for candidate in candidates]
            times: list[list[float]] = [[] for _ in graphs]
            for turn in range(ROUNDS):  # by turns, so that a change of the clock favours none
                for number in range(len(graphs)) if turn % 2 == 0 else reversed(range(len(graphs))):
                    replay, launches = graphs[number]
                    times[number].append(self._seconds(replay) / launches)
            return [statistics.median(found) for found in times]

    def _data(self, subject: Subject) -> list[Data]:
        generator = torch.Generator(self.device).manual_seed(0)
        assumed = subject.assumed
        first = sample(subject.spec, assumed, self.device, generator)
        size = sum(value.numel() * value.element_size() for value in first[0] if isinstance(value, torch.Tensor))
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = min(max(math.ceil(PAST_CACHE * cache / max(size, 1)), 1), LONGEST)
        return [first, *(sample(subject.spec, assumed, self.device, generator) for _ in range(copies - 1))]

    def _graph(self, candidate: Candidate, data: Sequence[Data]) -> tuple[Callable[[], None], int]:
        """What launches the kernel on each of the data by turns, and how often."""

        def run(number: int) -> None:
            inputs, outputs = data[number % len(data)]
            candidate.run(inputs, outputs, ())

        run(0)  # what it zeroes once is zeroed, and not within the graph
        one = self._seconds(lambda: run(1))
        launches = min(max(math.ceil(TIMING / max(one, 1e-7)), SHORTEST), LONGEST)
        launches = math.ceil(launches / len(data)) * len(data)

        def run_all() -> tuple[()]:
            for number in range(launches):
                run(number)
            return ()

        replay, _ = CudaRecorder().record(run_all, stream_of(self.device))
        replay()
        return replay, launches

    def _seconds(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def at_sizes(kernel: Kernel, assumed: Assumed) -> Kernel:
    """The kernel with numbers for its symbolic sizes."""

    def fixed(expr: sympy.Expr) -> sympy.Integer:
        return sympy.Integer(number(expr, assumed))

    def view(seen: View) -> View:
        return dataclasses.replace(
            seen, sizes=tuple(map(fixed, seen.sizes)), strides=tuple(map(fixed, seen.strides)), offset=fixed(sympy.sympify(seen.offset))
        )

    def step(launch: Launch | LibraryCall) -> Launch | LibraryCall:
        if isinstance(launch, LibraryCall):
            return dataclasses.replace(launch, operands=tuple(map(view, launch.operands)))
        arguments = tuple(a if a.expr is None else dataclasses.replace(a, expr=fixed(a.expr)) for a in launch.arguments)
        return dataclasses.replace(launch, grid=tuple(map(fixed, launch.grid)), arguments=arguments)

    launches = tuple(map(step, kernel.launches))
    spaces = tuple(dataclasses.replace(space, size=fixed(space.size)) for space in kernel.workspaces)
    return dataclasses.replace(kernel, launches=launches, workspaces=spaces, max_rows=None)


def number(expr: Any, assumed: Assumed) -> int:
    """A size as a number."""
    return int(roofline.evaluate(expr, dict(assumed)))


# --------------------------------------------------------------------------------------------------------------------------- data


def sample(spec: t.KernelSpec, assumed: Assumed, device: torch.device, generator: torch.Generator) -> tuple[list[Any], list[torch.Tensor]]:
    """Inputs with random values and outputs of a region, with the sizes, strides and dtypes that its specification states.

    Bools are true: every key is seen. Integers that number elements of a dimension number some in its second half. An output that starts
    from an input is that input. Raises `Refused` where integers are used so that it is not known which are safe.
    """
    ranges = index_ranges(spec, assumed)
    known = {symbol.name: value for symbol, value in assumed.items()}
    numbers = {place: known.get(name, roofline.TYPICAL) for name, place in spec.scalars}

    def filled(place: int, tensor: t.Tensor) -> Any:
        if place in numbers:
            return numbers[place]
        flat, sizes, strides = _flat(tensor, assumed, device)
        return _fill(flat, generator, ranges.get(place)).as_strided(sizes, strides)

    inputs = [None if tensor is None else filled(place, tensor) for place, tensor in enumerate(spec.inputs)]
    bases = {store.output: store.base for store in roofline.all_stores(spec.plan) if store.base is not None}
    outputs = []
    for place, tensor in enumerate(spec.outputs):
        flat, sizes, strides = _flat(tensor, assumed, device)
        made = flat.as_strided(sizes, strides)
        base = inputs[bases[place]] if place in bases else None
        outputs.append(base if base is not None and base.stride() == made.stride() else made)
    return inputs, outputs


def index_ranges(spec: t.KernelSpec, assumed: Assumed) -> dict[int, tuple[int, int]]:
    """Of the integer inputs that number elements: the values (first, one past the last) that do so in every dimension they are used for.

    Raises `Refused` for an index that is more than such an input, converted or with something added that is known to be within bounds: a
    literal, or an index of the tile's.
    """
    found: dict[int, tuple[int, int]] = {}
    limits = _limits(spec.plan, assumed)
    for part in within(spec.plan):
        if isinstance(part, t.Load):
            coords, sizes = part.coords, spec.inputs[part.input].sizes
        elif isinstance(part, t.Store):
            coords, sizes = part.coords, spec.outputs[part.output].sizes
        else:
            continue
        for coord, size in zip(coords, sizes, strict=True):
            if not isinstance(coord, t.Expr) or not any(isinstance(part, t.Load) for part in t.parts_of(coord)):
                continue
            place, (least, most) = _index(coord, spec.name, assumed, limits)
            if place is not None:
                first, end = found.get(place, (0, number(size, assumed) - most))
                found[place] = max(first, -least), min(end, number(size, assumed) - most)
                if found[place][0] >= found[place][1]:
                    raise refuse(f"{spec.name} is not tuned: no value of input {place} numbers an element wherever it is used")
    return found


def _index(coord: t.Expr, region: str, assumed: Assumed, limits: Limits) -> tuple[int | None, tuple[int, int]]:
    """The input that an index is read from, and the least and the most that is added to it; None for an index without any input."""
    if isinstance(coord, t.Load):
        return coord.input, (0, 0)
    if isinstance(coord, t.Const):
        return None, (int(coord.value), int(coord.value))
    if isinstance(coord, t.Index):
        sized = coord.expr.xreplace({symbol: sympy.Integer(value) for symbol, value in assumed.items()})
        low, high = interval(normalise(sized, limits), limits)
        if low is not None and high is not None:
            return None, (low, high)
    elif isinstance(coord, t.Op) and coord.name == "cast":
        return _index(coord.args[0], region, assumed, limits)
    elif isinstance(coord, t.Op) and coord.name == "add":
        parts = [_index(arg, region, assumed, limits) for arg in coord.args]
        places = [place for place, _ in parts if place is not None]
        if len(places) <= 1:
            return next(iter(places), None), (sum(least for _, (least, _) in parts), sum(most for _, (_, most) in parts))
    raise refuse(f"{region} is not tuned: an index in it is computed, so that it is not known which values are safe to try it with")


def _limits(plan: t.Plan, assumed: Assumed) -> Limits:
    """The sizes, as numbers, that the symbols of a plan's tile stay below; of columns, those of the widest segment."""
    sizes: dict[sympy.Symbol, list[sympy.Expr | int]]
    if isinstance(plan, t.AttentionPlan):
        sizes = {t.B: [plan.batch], t.H: [plan.heads], t.G: [plan.kv_heads], t.S: [plan.queries], t.J: [plan.keys]}
        sizes |= {t.D: [plan.head_size], t.E: [plan.value_size]}
    elif isinstance(plan, t.LinearPlan):
        sizes = {t.R: [plan.rows], t.K: [plan.inner], t.C: [segment.size for segment in plan.segments]}
    else:
        sizes = {t.R: [plan.rows], t.C: [plan.columns]}
    return {symbol: (sympy.Integer(max(number(size, assumed) for size in of)),) for symbol, of in sizes.items()}


def _flat(tensor: t.Tensor, assumed: Assumed, device: torch.device) -> tuple[torch.Tensor, list[int], list[int]]:
    """Memory for a tensor, and its sizes and strides as numbers."""
    sizes, strides = ([number(expr, assumed) for expr in of] for of in (tensor.sizes, tensor.strides))
    elements = 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return torch.empty(elements, dtype=tensor.dtype, device=device), sizes, strides


def _fill(flat: torch.Tensor, generator: torch.Generator, values: tuple[int, int] | None) -> torch.Tensor:
    if flat.dtype.is_floating_point:
        return flat.normal_(generator=generator)
    if flat.dtype == torch.bool:
        return flat.fill_(True)
    if values is None and flat.dtype in (torch.int8, torch.uint8):
        return flat.random_(-127 if flat.dtype == torch.int8 else 0, 128, generator=generator)
    first, end = values or (0, roofline.TYPICAL)
    return flat.random_((first + end) // 2, end, generator=generator)
