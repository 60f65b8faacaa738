"""Launching a region's generated kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from dsi.codegen.kernel import Argument, Kernel, Launch, LibraryCall

from .cache import DiskCache
from .kernels import KernelSet, load, symbol_values
from .launcher import GROUPS, Launcher, current_stream
from .library import LibraryStep
from .sizes import Environment, Sizes, expression
from .workspaces import ScratchMemory, allocator, together


class GeneratedKernel:
    """Runs one region by the variant of its kernels that fits the number of rows.

    `values` are the fakes and SymInts of the region's inputs in the outer graph, over whose symbols `sizes` is made. `device` is where its
    tensors are (left out: its first input's), and the current device when it is called. `overlaps` allows its first kernel to start before
    the one before it has ended.
    """

    def __init__(
        self,
        found: KernelSet,
        values: Sequence[Any],
        sizes: Sizes,
        disk: DiskCache,
        device: torch.device | None = None,
        overlaps: bool = False,
    ):
        self.found = found
        self.overlaps = overlaps
        device = device or next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
        self.allocate = allocator(device)
        symbols = symbol_values(found, values)
        self._rows = sizes.compile(_over(found.rows, symbols))
        variants = found.variants
        if isinstance(self._rows, tuple):  # the number of rows is known: the others are never used, nor loaded
            variants = (_fitting(variants, self._rows[0]),)
        self._variants = [_Variant(kernel, symbols, sizes, disk, device, overlaps) for kernel in variants]
        self.launches = max(len(variant.kernel.launches) for variant in self._variants)
        # (inputs, outputs, sizes) -> None: what a call does, without the steps on the way to it that choose between one thing.
        self.run: Callable[..., Any] = self._variants[0].run if len(self._variants) == 1 else self._by_rows

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        self.run(inputs, outputs, sizes)

    def _by_rows(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        self._chosen(sizes).run(inputs, outputs, sizes)

    def compile(self, inputs: Sequence[Any], outputs: Sequence[torch.dtype], sizes: Environment) -> list[Any]:
        """Triton's compiled kernels for these sizes, loaded but not launched; `inputs` and `outputs` are dtypes, not tensors. May be called
        from several threads. Raises what Triton raises, where one cannot be compiled or loaded."""
        return self._chosen(sizes).compile(inputs, outputs, sizes)

    def chosen(self, sizes: Environment) -> Kernel:
        """The variant that runs at these sizes."""
        return self._chosen(sizes).kernel

    def _chosen(self, sizes: Environment) -> _Variant:
        if len(self._variants) == 1:
            return self._variants[0]
        (rows,) = self._rows(*sizes)  # type: ignore[operator]
        return next(variant for variant in self._variants if variant.max_rows is None or rows <= variant.max_rows)

    def describe(self) -> str:
        return "; ".join(variant.describe() for variant in self._variants)


def programmatic(device: torch.device) -> bool:
    """Whether kernels of a device may start before the one before them has ended (programmatic dependent launch): sm_90 and later."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def settle(launch: Launch, able: bool, overlaps: bool) -> dict[str, Any]:
    """The keyword arguments of a launch. `able`: the device has programmatic dependent launch; where it has not, `PDL` is off.
    Triton's interpreter knows no assembly: there `DP4A` is off.

    A kernel that waits but is launched without the attribute (`overlaps` false) finds all work before it done when it starts.
    """
    settled: dict[str, Any] = {**launch.constants, "num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
    if settled.get("PDL") and not able:
        settled["PDL"] = False
    if settled.get("DP4A") and os.environ.get("TRITON_INTERPRET") == "1":
        settled["DP4A"] = False
    if not (able and overlaps and settled.get("PDL")):
        settled.pop("launch_pdl", None)
    return settled


def _fitting(variants: Sequence[Kernel], rows: int) -> Kernel:
    return next(kernel for kernel in variants if kernel.max_rows is None or rows <= kernel.max_rows)


def _over(expr: Any, symbols: dict[str, sympy.Expr]) -> sympy.Expr:
    expr = expression(expr)
    return expr.xreplace({symbol: symbols[symbol.name] for symbol in expr.free_symbols if symbol.name in symbols})


class _Variant:
    """One kernel, loaded, with everything about its launches that does not change between calls worked out."""

    def __init__(self, kernel: Kernel, symbols: dict[str, sympy.Expr], sizes: Sizes, disk: DiskCache, device: torch.device, overlaps: bool):
        self.kernel = kernel
        self.max_rows = kernel.max_rows
        self._workspaces = [ScratchMemory(space, sizes.compile(_over(space.size, symbols)), device) for space in kernel.workspaces]
        self._scratch = together(self._workspaces)
        module, able = load(kernel, disk), programmatic(device)

        def step(number: int, launch: Launch | LibraryCall) -> _Launch | LibraryStep:
            if isinstance(launch, LibraryCall):
                return LibraryStep(launch, lambda expr: _over(expr, symbols), sizes)
            # A second launch comes after the first one's start, whatever comes before that.
            return _Launch(module, launch, symbols, sizes, settle(launch, able, overlaps or number > 0), device)

        self._launches = [step(number, launch) for number, launch in enumerate(kernel.launches)]
        self._runs = [launch.run for launch in self._launches]
        # (inputs, outputs, sizes) -> None: the kernel's launches on the current stream.
        self.run: Callable[..., Any] = self._runs[0] if len(self._runs) == 1 and not self._workspaces else self._several()

    def _several(self) -> Callable[..., Any]:
        scratch, runs = self._scratch, self._runs

        def several(inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
            workspaces = scratch(sizes)
            for run in runs:
                run(inputs, outputs, sizes, workspaces)

        if all(hasattr(run, "written_out") for run in runs):
            several.written_out = self._written_out  # type: ignore[attr-defined]
        return several

    def _written_out(self, inputs: Sequence[str], outputs: Sequence[str], name: Callable[[Any], str]) -> list[str]:
        """What `run` does as lines of code (runtime/launcher.py: `bound`)."""
        runs: list[Any] = self._runs
        launches = [run.written_out(inputs, outputs, name, "scratch") for run in runs]
        return [f"scratch = {name(self._scratch)}(sizes)", *(line for lines in launches for line in lines), "scratch = None"]

    def compile(self, inputs: Sequence[Any], outputs: Sequence[torch.dtype], sizes: Environment) -> list[Any]:
        workspaces = [workspace.dtype for workspace in self._workspaces]
        compiled = [launch.compile(inputs, outputs, workspaces, sizes) for launch in self._launches]
        return [kernel for kernel in compiled if kernel is not None]

    def describe(self) -> str:
        rows = "any rows" if self.max_rows is None else f"rows <= {self.max_rows}"
        return f"{self.kernel.name} {self.kernel.digest} ({rows}): " + ", ".join(str(launch) for launch in self._launches)


class _Launch:
    def __init__(
        self, module: Any, launch: Launch, symbols: dict[str, sympy.Expr], sizes: Sizes, settled: dict[str, Any], device: torch.device
    ):
        self.entry = launch.entry
        grid = [_over(size, symbols) for size in launch.grid]
        self._text = f"{launch.entry}[{', '.join(map(str, grid))}]"
        self._grid = sizes.compile(*grid)
        self._integers = sizes.compile(*(_over(argument.expr, symbols) for argument in launch.arguments if argument.kind == "size"))
        order = [_place(argument, launch.arguments[:position]) for position, argument in enumerate(launch.arguments)]
        self.launcher = Launcher(getattr(module, launch.entry), settled, order, current_stream(device), launch.words)
        # (inputs, outputs, sizes, workspaces) -> one launch.
        self.run: Callable[..., Any] = self._run
        if isinstance(self._grid, tuple) and isinstance(self._integers, tuple) and 0 not in self._grid:
            self.run = self.launcher.bound(self._grid, self._integers)

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Any], sizes: Environment, workspaces: Sequence[Any] = ()) -> None:
        grid = self._grid if isinstance(self._grid, tuple) else self._grid(*sizes)
        if 0 in grid:
            return
        integers = self._integers if isinstance(self._integers, tuple) else self._integers(*sizes)
        self.launcher.launch(grid, inputs, outputs, workspaces, integers)

    def compile(self, inputs: Sequence[Any], outputs: Sequence[Any], workspaces: Sequence[Any], sizes: Environment) -> Any:
        grid = self._grid if isinstance(self._grid, tuple) else self._grid(*sizes)
        if 0 in grid:
            return None
        integers = self._integers if isinstance(self._integers, tuple) else self._integers(*sizes)
        return self.launcher.compile(grid, inputs, outputs, workspaces, integers)

    def __str__(self) -> str:
        return self._text


def _place(argument: Argument, before: Sequence[Argument]) -> tuple[int, int]:
    number = sum(other.kind == "size" for other in before) if argument.kind == "size" else argument.number
    group = {"input": "inputs", "output": "outputs", "workspace": "workspaces", "size": "integers"}[argument.kind]
    return GROUPS.index(group), number
