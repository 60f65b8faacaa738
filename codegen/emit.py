"""From a kernel specification to finished kernels: picks variants, has their schedule write them, and prints the header."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import sympy
from dsi.ir import tile as t

from . import apart, cost, library
from .attention import Attention
from .attention_decode import AttentionDecode
from .builder import Builder, triton_type
from .deferred import peeled
from .devices import H200, Device
from .grids import countable, fitting
from .kernel import Choice, Kernel, Launch, LibraryCall, digest_of
from .linear import Linear
from .pointwise import HELPERS
from .row import Row

# Module-level names of a kernel's file.
RESERVED = {*keyword.kwlist, *HELPERS, "tl", "triton", "gdc_launch_dependents", "gdc_wait"}
REGISTERS = 65536  # of one processor, every architecture since Kepler
Write = Callable[[t.KernelSpec, Choice], tuple[Builder, tuple[sympy.Expr, ...]]]


def generate(spec: t.KernelSpec, choice: Choice | None = None, device: Device = H200) -> tuple[Kernel, ...]:
    """The kernels of a region, in ascending `max_rows`; the last takes any number of rows.

    Rows that are known give one kernel. With `choice`, only that variant is made, with its blocks. Raises `Refused` where a dtype or a
    size has no kernel.
    """
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor is not None:
            triton_type(tensor.dtype)
    countable(spec.plan)
    picked = (choice,) if choice is not None else cost.choices(spec, device)
    return tuple(_kernel(spec, one, device) for one in picked)


def _kernel(spec: t.KernelSpec, choice: Choice, device: Device) -> Kernel:
    entry = spec.name if spec.name.isidentifier() else re.sub(r"\W", "_", f"k_{spec.name}")
    entry = f"{entry}_kernel" if entry in RESERVED else entry
    steps = [
        replace(step, grid=fitting(step.builder, step.grid)) if isinstance(step, _Part) else step for step in _parts(spec, choice, entry)
    ]
    parts = [step for step in steps if isinstance(step, _Part)]
    builders = [part.builder for part in parts]
    imports = "import triton\nimport triton.language as tl\n"
    if any("PDL" in builder.constants for builder in builders):
        imports += "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
    helpers = {name: text for builder in builders for name, text in builder.helpers.items()}
    texts = [
        header(spec, choice, builders, device, steps),
        imports,
        *helpers.values(),
        *(part.builder.function(part.entry) for part in parts),
    ]
    source = "\n\n".join(text if text.endswith("\n") else text + "\n" for text in (texts[0] + "\n" + texts[1], *texts[2:]))
    launches = tuple(_launch(step, device) if isinstance(step, _Part) else step for step in steps)
    # The last kernel knows all scratch memory: what the ones before it leave comes first.
    workspaces = tuple(builders[-1].workspaces) if builders else ()
    return Kernel(spec.name, source, digest_of(source), launches, choice.max_rows, choice.schedule, workspaces)


@dataclass(frozen=True)
class _Part:
    """One kernel of a region, in the order of their launches."""

    entry: str
    builder: Builder
    grid: tuple[sympy.Expr, ...]
    warps: int
    stages: int
    follows: bool = False  # it starts only after the end of the kernel before it


def _parts(spec: t.KernelSpec, choice: Choice, entry: str) -> list[_Part | LibraryCall]:
    """The kernels of a region: one, two where the prologue of a linear is computed apart, or some around a library's."""
    if choice.schedule == "library":
        return [_Part(*part) if isinstance(part, tuple) else part for part in library.parts(spec, choice, entry)]
    if not apart.is_apart(spec, choice):
        builder, grid = SCHEDULES[choice.schedule](spec, choice)
        follows = choice.schedule == "attention_decode" and not choice.overlaps
        return [_Part(entry, builder, grid, choice.num_warps, choice.num_stages, follows)]
    product, narrowed, given = apart.product_spec(spec, choice)
    rows, rows_grid, warps = apart.write_rows(spec, choice, product, given)
    linear = Linear(product, narrowed, given)
    apart.place(linear.builder, product, given)
    builder, grid = linear.write()
    return [_Part(f"{entry}_rows", rows, rows_grid, warps, 1), _Part(entry, builder, grid, choice.num_warps, choice.num_stages)]


def _launch(part: _Part, device: Device) -> Launch:
    arguments, _ = part.builder.arguments()
    # Without a stated limit ptxas may spill a few registers to fit one more block on a processor.
    options: dict[str, int | bool] = {"enable_fp_fusion": True, "maxnreg": min(255, REGISTERS // (32 * part.warps))}
    constants: dict[str, int | bool | float] = dict(part.builder.constants)
    if "PDL" in constants:
        constants["PDL"] = able = device.capability >= 90
        # Attention over a cache has few programs, through which the kernel behind it would start while the one before it still runs:
        # that one's own programs then wait for room. So either attention starts late, or what is behind it does (`Choice.overlaps`).
        if not part.follows:
            options["launch_pdl"] = able
    read = part.builder.reinterpreted
    words = tuple(place for place, one in enumerate(arguments) if one.kind == "input" and one.number in read)
    return Launch(part.entry, arguments, constants, part.grid, part.warps, part.stages, options, words)


def header(
    spec: t.KernelSpec, choice: Choice, builders: Sequence[Builder], device: Device, steps: Sequence[_Part | LibraryCall] = ()
) -> str:
    """The comment that opens a kernel's file: what it stands for, on what, and what it should cost."""
    plan = spec.plan
    peel = {"last": ", first step peeled and multiplied last", "first": ", first step peeled"}.get(peeled(spec, choice), "")
    lines = [f"{spec.name}: schedule {choice.schedule}{peel}, {_rows(plan, choice)}"]
    if spec.nodes:
        lines += ["", *spec.nodes]
    if spec.source_lines:
        lines += ["", "model source:", *(f"    {line}" for line in spec.source_lines)]
    lines += ["", "tensors:"]
    names = {number: name for builder in builders for number, name in builder.inputs.items()}
    stored = {number: name for builder in builders for number, name in builder.outputs.items()}
    for call in (step for step in steps if isinstance(step, LibraryCall)):
        names |= {view.number: "" for view in call.operands if view.kind == "input"}
        stored |= {view.number: "" for view in call.operands if view.kind == "output"}
    for kind, numbers, tensors in (("in ", names, spec.inputs), ("out", stored, spec.outputs)):
        for number in sorted(numbers):
            tensor = tensors[number]
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"    {kind} {tensor.name or numbers[number]}: {dtype}{_sizes(tensor.sizes)} strides {_sizes(tensor.strides)}")
    if len(steps) > 1 or choice.schedule == "library":
        lines += ["", "in order:", *(f"    {step.entry if isinstance(step, _Part) else library.describe(step, spec)}" for step in steps)]
    traffic, work = cost.traffic(spec), cost.work(plan)
    seconds = cost.predict(spec, choice, device)
    assumed = ", ".join(f"{symbol} = {number}" for symbol, number in cost.assumptions(plan, choice).items())
    lines += [
        "",
        f"bytes: {traffic}    flops: {work}    predicted: {seconds * 1e6:.1f} us on {device.name}{' at ' + assumed if assumed else ''}",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _rows(plan: t.Plan, choice: Choice) -> str:
    one, many = ("query", "queries") if isinstance(plan, t.AttentionPlan) else ("row", "rows")
    rows = cost.rows_of(plan)
    if not rows.is_Integer and choice.max_rows is None:
        return f"any number of {many}"
    count = int(rows) if rows.is_Integer else choice.max_rows
    return f"{'' if rows.is_Integer else 'at most '}{count} {one if count == 1 else many}"


def _sizes(sizes: tuple[sympy.Expr, ...]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


SCHEDULES: dict[str, Write] = {
    "gemv": lambda spec, choice: Linear(spec, choice).write(),
    "skinny": lambda spec, choice: Linear(spec, choice).write(),
    "tiled": lambda spec, choice: Linear(spec, choice).write(),
    "attention": lambda spec, choice: Attention(spec, choice).write(),
    "attention_decode": lambda spec, choice: AttentionDecode(spec, choice).write(),
    "row": lambda spec, choice: Row(spec, choice).write(),
}
