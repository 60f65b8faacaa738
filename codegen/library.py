"""Regions by kernels of libraries: cuBLAS's products between a kernel of the prologue and kernels of the epilogue; SDPA as it is.

With many rows a product is bound by the matrix units, and what stands around it costs little beside it. `why_not` says what keeps a region
from being made that way; everything else about it is derived from the same plan as a generated kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.errors import Refused
from dsi.ir.index_map import Space

from . import apart
from .builder import Builder
from .devices import Device
from .epilogue import epilogue
from .kernel import Choice, LibraryCall, View
from .roofline import evaluate, traffic, typical
from .row import Row
from .row_choices import row_choice

Part = tuple[str, Builder, tuple[sympy.Expr, ...], int, int]  # a kernel's entry, builder, grid, warps and stages
USED = 0.75  # of a weight's rows that windows must read, since the library computes all
# The share of the matrix units' rate that a library's product reaches on whole tiles of this side (512 rows of 4096 x 4096 were measured in
# 25.0 us on an H200, of 14336 x 4096 in 79.1), and of the bandwidth where it streams.
PRODUCT_SHARE, PRODUCT_TILE, STREAM_SHARE = 0.98, 128, 0.85
ATTENTION_SHARE = 0.5  # of the matrix units' rate, in attention
CALL = 1.5e-6  # seconds at a library kernel's start, on top of the gap before it
ROW = 2.2e-6  # and of a row kernel's start and end, the gap before it included


def why_not(spec: t.KernelSpec) -> str:
    """What keeps a region from a library's kernels, as a sentence; "" where nothing does."""
    plan = spec.plan
    if isinstance(plan, t.LinearPlan):
        return _why_no_product(spec, plan)
    if isinstance(plan, t.AttentionPlan):
        return _why_no_attention(spec, plan)
    return "a region without a contraction has no library kernel"


def possible(spec: t.KernelSpec, choice: Choice) -> bool:
    """Whether a region can be made that way: nothing is known against it, and its row kernels can be written."""
    if why_not(spec):
        return False
    try:
        parts(spec, choice, "kernel")
    except (Refused, NotImplementedError):  # the latter: an index that has no form in Triton
        return False
    return True


def parts(spec: t.KernelSpec, choice: Choice, entry: str) -> list[Part | LibraryCall]:
    """The kernels and calls of a region that `why_not` says nothing against, in the order of their launches."""
    return list(_attention(spec) if isinstance(spec.plan, t.AttentionPlan) else _Linear(spec, choice, entry).parts())


def library_seconds(spec: t.KernelSpec, rows: int, assumed: dict[sympy.Symbol, int], device: Device) -> float:
    """Seconds that a region is expected to take by library kernels at `rows` rows."""
    plan, stream = spec.plan, STREAM_SHARE * device.bandwidth
    if isinstance(plan, t.AttentionPlan):
        seen = evaluate(plan.keys, assumed) * (0.5 if plan.causal else 1.0)
        work = 2.0 * evaluate(plan.batch, assumed) * plan.heads * rows * seen * (plan.head_size + plan.value_size)
        seconds = work / (ATTENTION_SHARE * device.matrix.get(plan.dtype.itemsize, device.vector))
        return device.launch + CALL + max(seconds, evaluate(traffic(spec), assumed) / stream) + ROW
    assert isinstance(plan, t.LinearPlan)
    inner, size = typical(plan.inner), plan.x_dtype.itemsize
    rate = PRODUCT_SHARE * device.matrix.get(size, device.vector)
    seconds = 0.0 if _rows_view(spec) is not None else ROW + 2 * rows * inner * size / stream
    for weight in weights(plan):
        columns = typical(_columns(spec, weight))
        blocks = math.ceil(rows / PRODUCT_TILE) * math.ceil(columns / PRODUCT_TILE)
        fill = max(blocks / (math.ceil(blocks / device.processors) * device.processors), 0.5)
        moved = (rows * inner + columns * inner + rows * columns) * size
        seconds += device.launch + CALL + max(2.0 * rows * inner * columns / (rate * fill), moved / stream)
    for segment in plan.segments:
        if _direct(spec, segment) is None:
            read = rows * typical(segment.size) * size * (len(segment.windows) + len(segment.stores))
            seconds += ROW + read / stream
    return seconds


def describe(call: LibraryCall, spec: t.KernelSpec) -> str:
    """A call as a line of text."""

    def name(view: View) -> str:
        tensors = {"input": spec.inputs, "output": spec.outputs}.get(view.kind)
        found = tensors[view.number].name if tensors is not None else ""
        return f"{found or f'{view.kind} {view.number}'}[{', '.join(map(str, view.sizes))}]"

    *given, made = call.operands
    what = {"product": "cuBLAS", "attention": "scaled_dot_product_attention"}[call.function]
    return f"{name(made)} = {what}({', '.join(map(name, given))})"


# ------------------------------------------------------------------------------------------------------------------------- linear


def weights(plan: t.LinearPlan) -> dict[int, t.WeightWindow]:
    """The weights of a plan, each once, with a window that reads it."""
    found: dict[int, t.WeightWindow] = {}
    for segment in plan.segments:
        for window in segment.windows:
            found.setdefault(window.weight, window)
    return found


def _columns(spec: t.KernelSpec, weight: int) -> sympy.Expr:
    window = weights(spec.plan)[weight]  # type: ignore[arg-type]
    return sympy.sympify(spec.inputs[weight].sizes[1 if window.kn else 0])


def _why_no_product(spec: t.KernelSpec, plan: t.LinearPlan) -> str:
    if plan.activations:
        return "its rows are rounded to int8"
    used: dict[int, int] = {}
    for segment in plan.segments:
        for window in segment.windows:
            if window.scale is not None or spec.inputs[window.weight].dtype != plan.x_dtype:
                return f"the weight {spec.inputs[window.weight].name} is not of the dtype of its rows"
            used[window.weight] = used.get(window.weight, 0) + typical(segment.size)
        if len({sympy.sympify(reduction.size) for reduction in segment.reductions}) > 1:
            return "norms over groups of several sizes are no row plan"
    for weight, window in weights(plan).items():
        tensor = spec.inputs[weight]
        inner = sympy.sympify(tensor.sizes[0 if window.kn else 1])
        if len(tensor.sizes) != 2 or inner != sympy.sympify(plan.inner):
            return f"the weight {tensor.name} has more along the contracted dimension than is contracted"
        if used[weight] < USED * typical(_columns(spec, weight)):
            return f"most of the weight {tensor.name} is not used"
    return ""


def _rows_view(spec: t.KernelSpec) -> View | None:
    """The rows as they lie in an input; None where they are computed, or lie in no regular steps."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    if not isinstance(plan.x, t.Load) or plan.x.dtype != plan.x_dtype:
        return None
    return view_of("input", plan.x.input, spec.inputs[plan.x.input], plan.x.coords, {t.R: plan.rows, t.K: plan.inner})


def _direct(spec: t.KernelSpec, segment: t.Segment) -> View | None:
    """The output that is a product as the library leaves it; None where an epilogue is needed."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    if len(segment.stores) != 1 or segment.reductions or len(segment.windows) != 1:
        return None
    (store,), (window,) = segment.stores, segment.windows
    shared = sum(other.weight == window.weight for found in plan.segments for other in found.windows) > 1
    whole = sympy.sympify(window.n) == t.C and sympy.sympify(segment.size) == _columns(spec, window.weight)
    value = store.value
    while isinstance(value, t.Op) and value.name == "cast" and value.dtype in (plan.x_dtype, torch.float32):
        value = value.args[0]
    if value != t.Window(0) or store.dtype != plan.x_dtype or store.base is not None or shared or not whole:
        return None
    return view_of("output", store.output, spec.outputs[store.output], store.coords, {t.R: plan.rows, t.C: segment.size})


def view_of(
    kind, number: int, tensor: t.Tensor, coords: tuple[sympy.Expr | t.Expr, ...], sizes: dict[sympy.Symbol, sympy.Expr]
) -> View | None:
    """A tensor at `coords` as a view with a dimension for each symbol of `sizes`; None where the symbols do not walk it in even steps."""
    if any(isinstance(coord, t.Expr) for coord in coords):
        return None
    sizes = {symbol: sympy.sympify(size) for symbol, size in sizes.items()}
    space = Space(sizes)
    same = {symbol: symbol for symbol in sizes}
    at = space.substitute(sympy.expand(sympy.Add(*(sympy.sympify(c) * s for c, s in zip(coords, tensor.strides, strict=True)))), same)
    at = space.join(sympy.expand(at))
    strides = [sympy.sympify(at.coeff(symbol)) if size != 1 else sympy.Integer(0) for symbol, size in sizes.items()]
    offset = sympy.expand(at - sympy.Add(*(symbol * stride for symbol, stride in zip(sizes, strides, strict=True))))
    if any(expr.free_symbols & sizes.keys() for expr in (offset, *strides)):
        return None
    return View(kind, number, tuple(sizes.values()), tuple(strides), offset)


class _Linear:
    """The parts of one linear region. Scratch memory: the rows, where they are computed, then the products that are not outputs."""

    def __init__(self, spec: t.KernelSpec, choice: Choice, entry: str):
        assert isinstance(spec.plan, t.LinearPlan)
        self.spec, self.plan, self.choice, self.entry = spec, spec.plan, choice, entry
        self.rows, self.inner = sympy.sympify(self.plan.rows), sympy.sympify(self.plan.inner)
        self.scratch: list[t.Tensor] = []
        self.x = _rows_view(spec)
        if self.x is None or self.plan.row_stores:
            self.scratch.append(t.Tensor("rows", (self.rows, self.inner), (self.inner, sympy.Integer(1)), self.plan.x_dtype))
            self.x = self._scratch_view(0)
        self.direct = {number: view for number, segment in enumerate(self.plan.segments) if (view := _direct(spec, segment)) is not None}
        self.products: dict[int, View] = {self.plan.segments[n].windows[0].weight: view for n, view in self.direct.items()}
        self.places: dict[int, int] = {}  # weight -> number of the product in scratch memory
        for weight in weights(self.plan):
            if weight not in self.products:
                columns = _columns(spec, weight)
                name = f"product_{spec.inputs[weight].name or weight}"
                self.places[weight] = len(self.scratch)
                self.scratch.append(t.Tensor(name, (self.rows, columns), (columns, sympy.Integer(1)), self.plan.x_dtype))
                self.products[weight] = self._scratch_view(self.places[weight])

    def _scratch_view(self, number: int) -> View:
        tensor = self.scratch[number]
        return View("workspace", number, tensor.sizes, tensor.strides)

    def parts(self) -> Iterator[Part | LibraryCall]:
        if self.scratch and self.scratch[0].name == "rows":
            product, _, given = apart.product_spec(self.spec, replace(self.choice, digits=0))
            builder, grid, warps = apart.write_rows(self.spec, self.choice, product, given)
            yield f"{self.entry}_rows", builder, grid, warps, 1
        assert self.x is not None
        for weight, window in weights(self.plan).items():
            tensor = self.spec.inputs[weight]
            stored = View("input", weight, tuple(map(sympy.sympify, tensor.sizes)), tuple(map(sympy.sympify, tensor.strides)))
            yield LibraryCall("product", (self.x, stored if window.kn else stored.transposed, self.products[weight]))
        for number, segment in enumerate(self.plan.segments):
            if number not in self.direct:
                yield self.epilogue(number, segment)

    def epilogue(self, number: int, segment: t.Segment) -> Part:
        """The kernel of what becomes of one segment's products."""
        first = len(self.spec.inputs)
        plan = epilogue(self.plan, segment, {weight: first + place for weight, place in self.places.items()})
        spec = replace(self.spec, plan=plan, inputs=[*self.spec.inputs, *self.scratch])
        choice = row_choice(plan)
        row = Row(spec, choice)
        for place, tensor in enumerate(self.scratch):
            size, dtype = sympy.Mul(*tensor.sizes), str(tensor.dtype).removeprefix("torch.")
            row.builder.place(first + place, row.builder.workspace(tensor.name, size, dtype))
        builder, grid = row.write()
        suffix = f"_{number}" if len(self.plan.segments) > 1 else ""
        return f"{self.entry}_epilogue{suffix}", builder, grid, choice.num_warps, choice.num_stages


# ---------------------------------------------------------------------------------------------------------------------- attention


def _why_no_attention(spec: t.KernelSpec, plan: t.AttentionPlan) -> str:
    if plan.softcap or plan.window or plan.bias is not None or plan.sinks is not None:
        return "scaled_dot_product_attention has no softcap, window, bias or sinks of its own"
    if plan.mask is not None:
        return "a row that a mask hides whole is 0 here, and not defined by the library"
    if len(plan.stores) != 1 or _result(spec, plan) is None:
        return "its result is not stored as it is"
    for name, view in zip("qkv", _operands(spec, plan), strict=True):
        if view is None:
            return f"its {name} is computed, or lies in no regular steps"
    return ""


def _operands(spec: t.KernelSpec, plan: t.AttentionPlan) -> list[View | None]:
    """Queries, keys and values as they lie in inputs."""
    sizes = {
        t.B: plan.batch,
        t.H: plan.heads,
        t.G: plan.kv_heads,
        t.S: plan.queries,
        t.J: plan.keys,
        t.D: plan.head_size,
        t.E: plan.value_size,
    }
    found = []
    for value, symbols in ((plan.q, (t.B, t.H, t.S, t.D)), (plan.k, (t.B, t.G, t.J, t.D)), (plan.v, (t.B, t.G, t.J, t.E))):
        plain = isinstance(value, t.Load) and value.dtype == plan.dtype
        shape = {symbol: sizes[symbol] for symbol in symbols}
        found.append(view_of("input", value.input, spec.inputs[value.input], value.coords, shape) if plain else None)  # type: ignore[attr-defined]
    return found


def _result(spec: t.KernelSpec, plan: t.AttentionPlan) -> View | None:
    (store,) = plan.stores
    value = store.value
    while isinstance(value, t.Op) and value.name == "cast" and value.dtype in (plan.dtype, torch.float32):
        value = value.args[0]
    if value != t.Window(0) or store.dtype != plan.dtype or store.base is not None:
        return None
    shape = {t.B: plan.batch, t.H: plan.heads, t.S: plan.queries, t.E: plan.value_size}
    return view_of("output", store.output, spec.outputs[store.output], store.coords, shape)


def _attention(spec: t.KernelSpec) -> Iterator[LibraryCall]:
    plan = spec.plan
    assert isinstance(plan, t.AttentionPlan)
    views = [*_operands(spec, plan), _result(spec, plan)]
    assert None not in views
    options: dict[str, bool | float] = {"scale": plan.scale, "causal": plan.causal, "grouped": plan.heads != plan.kv_heads}
    yield LibraryCall("attention", tuple(views), options)  # type: ignore[arg-type]
