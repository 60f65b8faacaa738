"""Cases for code generation: a specification with real tensors and what a kernel must make of them; how to launch and to compile
kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sympy
import torch
from dsi.codegen import Choice, Kernel, generate
from dsi.codegen.integers import normalise
from dsi.codegen.kernel import LibraryCall, View
from dsi.ir import tile as t
from dsi.ir.tolerances import disagreement
from dsi.runtime.library import FUNCTIONS

from bench import ptx


@dataclass
class Case:
    """A specification being put together, beside real tensors for its inputs, its outputs, and the values expected in these."""

    name: str
    dtype: torch.dtype
    values: dict[sympy.Symbol, int] = field(default_factory=dict)
    seed: int = 0
    spec: t.KernelSpec = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)
    scalars: list[tuple[str, int]] = field(default_factory=list)
    input_specs: list[t.Tensor] = field(default_factory=list)
    output_specs: list[t.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        # On the meta device (large models, to compile only) nothing is computed.
        self.generator = None if torch.empty(0).is_meta else torch.Generator().manual_seed(self.seed)

    def number(self, expr) -> int:
        return int(normalise(sympy.sympify(expr)).xreplace({s: sympy.Integer(v) for s, v in self.values.items()}))

    def _make(self, name: str, sizes, dtype, strides) -> tuple[t.Tensor, torch.Tensor]:
        sizes = tuple(sympy.sympify(s) for s in sizes)
        if strides is None:
            strides, step = [], sympy.Integer(1)
            for size in reversed(sizes):
                strides.insert(0, step)
                step = step * size
        strides = tuple(sympy.sympify(s) for s in strides)
        real_sizes, real_strides = [self.number(s) for s in sizes], [self.number(s) for s in strides]
        extent = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(real_sizes, real_strides, strict=True))
        storage = torch.full((extent,), float("nan") if dtype.is_floating_point else 0).to(dtype)
        return t.Tensor(name, sizes, strides, dtype), storage.as_strided(real_sizes, real_strides)

    def input(
        self, name: str, sizes, dtype=None, strides=None, scale: float = 1.0, shift: float = 0.0, values: torch.Tensor | None = None
    ) -> int:
        """Adds an input of random (or the given) values; returns its number."""
        spec, tensor = self._make(name, sizes, dtype or self.dtype, strides)
        if values is None:
            values = torch.randn(tensor.shape, generator=self.generator) * scale + shift
        tensor.copy_(values)
        self.input_specs.append(spec)
        self.inputs.append(tensor)
        return len(self.inputs) - 1

    def output(self, name: str, sizes, expected: torch.Tensor, dtype=None, strides=None, base: int | None = None) -> int:
        """Adds an output with the values it must get; it starts as NaN, or as a copy of input `base`."""
        spec, tensor = self._make(name, sizes, dtype or self.dtype, strides)
        if base is not None:
            tensor.copy_(self.inputs[base])
        self.output_specs.append(spec)
        self.outputs.append(tensor)
        self.expected.append(expected.to(tensor.dtype).reshape(tensor.shape))
        return len(self.outputs) - 1

    def scalar(self, symbol: sympy.Symbol) -> None:
        """Adds a size that is passed as a number, where no tensor has it."""
        if symbol.is_Symbol:
            self.scalars.append((str(symbol), len(self.inputs)))
            self.input_specs.append(t.Tensor(str(symbol), (), (), torch.int64))
            self.inputs.append(self.values[symbol])

    def finish(self, plan: t.Plan, nodes: Sequence[str] = (), source_lines: Sequence[str] = ()) -> Case:
        self.spec = t.KernelSpec(self.name, plan, self.input_specs, self.output_specs, self.scalars, list(nodes), list(source_lines))
        return self

    def load(self, number: int, *coords) -> t.Load:
        """A load of an input at coordinates."""
        coords = tuple(c if isinstance(c, t.Expr) else sympy.sympify(c) for c in coords)
        return t.Load(number, coords, self.inputs[number].dtype)

    def real(self, number: int) -> torch.Tensor:
        """An input's values in fp64 (integers and bools as they are)."""
        value = self.inputs[number]
        return value.double() if value.is_floating_point() else value


def op(name: str, *args: t.Expr, dtype: torch.dtype = torch.float32) -> t.Op:
    return t.Op(name, args, dtype)


def cast(value: t.Expr, dtype: torch.dtype) -> t.Op:
    return t.Op("cast", (value,), dtype)


def const(value: float, dtype: torch.dtype = torch.float32) -> t.Const:
    return t.Const(value, dtype)


def bindings(case: Case) -> dict[sympy.Symbol, int]:
    """The size symbols as a runtime finds them: from the sizes and strides of the input tensors."""
    found: dict[sympy.Symbol, int] = {s: case.inputs[n] for s in case.values for name, n in case.spec.scalars if str(s) == name}
    for spec, tensor in zip(case.spec.inputs, case.inputs, strict=True):
        if not isinstance(tensor, torch.Tensor):
            continue
        for expr, value in zip((*spec.sizes, *spec.strides), (*tensor.shape, *tensor.stride()), strict=True):
            if sympy.sympify(expr).is_Symbol:
                found[expr] = value
    return found


def pick(kernels: Sequence[Kernel], rows: int) -> Kernel:
    return next(k for k in kernels if k.max_rows is None or rows <= k.max_rows)


def rows_of(case: Case) -> int:
    plan = case.spec.plan
    return case.number(plan.queries if isinstance(plan, t.AttentionPlan) else plan.rows)


def run(case: Case, interpreter, kernel: Kernel | None = None, choice: Choice | None = None) -> list[torch.Tensor]:
    """The outputs as the generated kernel leaves them, under the interpreter."""
    if kernel is None:
        kernels = generate(case.spec, choice)
        kernel = pick(kernels, rows_of(case))
    sizes = {s: sympy.Integer(v) for s, v in bindings(case).items()}
    outputs = [o.clone() if o.is_contiguous() else o for o in case.outputs]
    return execute(kernel, case.inputs, outputs, lambda expr: int(normalise(sympy.sympify(expr)).xreplace(sizes)), interpreter)


def execute(kernel: Kernel, inputs: list, outputs: list[torch.Tensor], number, interpreter) -> list[torch.Tensor]:
    """The outputs as a kernel's launches leave them, one after another, under the interpreter; `number` gives the value of a size."""
    tensors = {"input": list(inputs), "output": outputs}
    tensors["workspace"] = [torch.full((number(w.size),), 0 if w.zeroed else 7, dtype=getattr(torch, w.dtype)) for w in kernel.workspaces]
    for launch in kernel.launches:
        if isinstance(launch, LibraryCall):
            *given, made = (_view(view, tensors, number) for view in launch.operands)
            FUNCTIONS[launch.function](given, made, launch.options)
            continue
        arguments = [number(a.expr) if a.kind == "size" else tensors[a.kind][a.number] for a in launch.arguments]
        grid = tuple(map(number, launch.grid))
        if 0 in grid:
            continue
        constants = {**launch.constants, **{name: False for name in ("PDL", "DP4A") if name in launch.constants}}
        results = iter(interpreter.run(kernel.source, launch.entry, grid, arguments, constants))
        for argument in launch.arguments:
            if argument.kind != "size" and isinstance(tensors[argument.kind][argument.number], torch.Tensor):
                value = next(results)
                if argument.kind != "input":
                    tensors[argument.kind][argument.number] = value
    for workspace, left in zip(kernel.workspaces, tensors["workspace"], strict=True):
        assert not workspace.zeroed or not left.any(), "a kernel leaves its counters as it found them"
    return tensors["output"]


def _view(view: View, tensors: dict[str, list], number) -> torch.Tensor:
    tensor = tensors[view.kind][view.number]
    sizes, strides = ([number(expr) for expr in numbers] for numbers in (view.sizes, view.strides))
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + number(view.offset))


def check(case: Case, interpreter, kernel: Kernel | None = None, choice: Choice | None = None) -> None:
    """Asserts that every output is what the case expects."""
    for spec, value, expected in zip(case.spec.outputs, run(case, interpreter, kernel, choice), case.expected, strict=True):
        difference = disagreement(value, expected)
        assert not difference, f"{case.name}, output {spec.name}: {difference}"


# ---------------------------------------------------------------------------------------------------------------------- compiling

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def resources(case: Case, kernel: Kernel, capability: int, ones: bool = False, texts: dict[str, str] | None = None) -> dict[str, int]:
    """Registers, stack, local and shared memory of a kernel compiled for sm_`capability`. Needs no GPU. `ones`: all sizes are 1, as
    triton then specialises. `texts` is given the PTX."""
    import triton
    from triton.backends.compiler import GPUTarget

    from .interpret import load_module

    launch = kernel.launches[-1]  # where the rows are computed apart, the product
    with tempfile.TemporaryDirectory() as folder:
        function = getattr(load_module(kernel.source, folder), launch.entry)
        signature, attributes, constants = {}, {}, dict(launch.constants)
        names = [name for name in function.arg_names if name not in launch.constants]
        for position, (name, argument) in enumerate(zip(names, launch.arguments, strict=True)):
            if argument.kind == "size":
                signature[name] = "constexpr" if ones else "i32"
                if ones:
                    constants[name] = 1
                continue
            if argument.kind == "workspace":
                dtype = getattr(torch, kernel.workspaces[argument.number].dtype)
            else:
                dtype = (case.spec.inputs if argument.kind == "input" else case.spec.outputs)[argument.number].dtype
            signature[name] = "*" + _TYPES[dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        signature.update(dict.fromkeys(launch.constants, "constexpr"))
        source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found = ptx.resources(compiled.asm["cubin"], launch.entry, Path(folder))
    if texts is not None:
        texts["ptx"] = compiled.asm["ptx"]
    return {**found, "SHARED": compiled.metadata.shared}
