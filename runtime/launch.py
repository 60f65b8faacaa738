"""Launching a region's generated kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from dsi.codegen.kernel import Argument, Kernel, Launch, Workspace

from .cache import DiskCache
from .kernels import KernelSet, load, symbol_values
from .sizes import Environment, Sizes, expression

Integer = int | Callable[..., tuple[int, ...]]


class GeneratedKernel:
    """Runs one region by the variant of its kernels that fits the number of rows.

    `values` are the fakes and SymInts of the region's inputs in the outer graph, over whose symbols `sizes` is made.
    """

    def __init__(self, found: KernelSet, values: Sequence[Any], sizes: Sizes, disk: DiskCache):
        self.found = found
        symbols = symbol_values(found, values)
        self._strides = [sizes.compile(*value.stride()) if isinstance(value, torch.Tensor) else None for value in values]
        self._rows = sizes.compile(_over(found.rows, symbols))
        variants = found.variants
        if isinstance(self._rows, tuple):  # the number of rows is known: the others are never used, nor loaded
            variants = (_fitting(variants, self._rows[0]),)
        self._variants = [_Variant(kernel, symbols, sizes, disk) for kernel in variants]

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        for number, wanted in enumerate(self._strides):
            if wanted is not None:
                stride = wanted if isinstance(wanted, tuple) else wanted(*sizes)
                if inputs[number].stride() != stride and not _same_layout(inputs[number], stride):
                    # An operator that is not ours gave another layout than its fake states.
                    inputs = list(inputs)
                    inputs[number] = inputs[number].new_empty_strided(inputs[number].shape, stride).copy_(inputs[number])
        if len(self._variants) == 1:
            chosen = self._variants[0]
        else:
            (rows,) = self._rows(*sizes)  # type: ignore[operator]
            chosen = next(variant for variant in self._variants if variant.max_rows is None or rows <= variant.max_rows)
        chosen(inputs, outputs, sizes)

    def describe(self) -> str:
        return "; ".join(variant.describe() for variant in self._variants)


def _fitting(variants: Sequence[Kernel], rows: int) -> Kernel:
    return next(kernel for kernel in variants if kernel.max_rows is None or rows <= kernel.max_rows)


def _same_layout(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    return all(size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), stride, strict=True))


def _over(expr: Any, symbols: dict[str, sympy.Expr]) -> sympy.Expr:
    expr = expression(expr)
    return expr.xreplace({symbol: symbols[symbol.name] for symbol in expr.free_symbols if symbol.name in symbols})


class _Variant:
    """One kernel, loaded, with everything about its launches that does not change between calls worked out."""

    def __init__(self, kernel: Kernel, symbols: dict[str, sympy.Expr], sizes: Sizes, disk: DiskCache):
        self.kernel = kernel
        self.max_rows = kernel.max_rows
        self._workspaces = [_Workspace(workspace, sizes.compile(_over(workspace.size, symbols))) for workspace in kernel.workspaces]
        module = load(kernel, disk)
        self._launches = [_Launch(module, launch, symbols, sizes) for launch in kernel.launches]

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        workspaces = [workspace(outputs[0].device, sizes) for workspace in self._workspaces]
        for launch in self._launches:
            launch(inputs, outputs, workspaces, sizes)

    def describe(self) -> str:
        rows = "any rows" if self.max_rows is None else f"rows <= {self.max_rows}"
        return f"{self.kernel.name} {self.kernel.digest} ({rows}): " + ", ".join(str(launch) for launch in self._launches)


class _Launch:
    def __init__(self, module: Any, launch: Launch, symbols: dict[str, sympy.Expr], sizes: Sizes):
        self.entry = launch.entry
        self._function = getattr(module, launch.entry)
        self._constants = {**launch.constants, "num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
        grid = [_over(size, symbols) for size in launch.grid]
        self._text = f"{launch.entry}[{', '.join(map(str, grid))}]"
        self._grid = sizes.compile(*grid)
        self._integers = sizes.compile(*(_over(argument.expr, symbols) for argument in launch.arguments if argument.kind == "size"))
        # The arguments in order, from a list of groups: inputs, outputs, workspaces, integers.
        self._order = [_place(argument, launch.arguments[:position]) for position, argument in enumerate(launch.arguments)]

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any], workspaces: Sequence[Any], sizes: Environment) -> None:
        grid = self._grid if isinstance(self._grid, tuple) else self._grid(*sizes)
        if 0 in grid:
            return
        integers = self._integers if isinstance(self._integers, tuple) else self._integers(*sizes)
        groups = (inputs, outputs, workspaces, integers)
        self._function[grid](*[groups[group][number] for group, number in self._order], **self._constants)

    def __str__(self) -> str:
        return self._text


_GROUPS = {"input": 0, "output": 1, "workspace": 2, "size": 3}


def _place(argument: Argument, before: Sequence[Argument]) -> tuple[int, int]:
    number = sum(other.kind == "size" for other in before) if argument.kind == "size" else argument.number
    return _GROUPS[argument.kind], number


class _Workspace:
    """Scratch memory of one kernel. One that starts as zeros is kept (kernels leave it zeroed) for each size, device, stream and thread:
    two calls under way at once never share one."""

    def __init__(self, workspace: Workspace, size: tuple[int, ...] | Callable[..., tuple[int, ...]]):
        self.dtype = getattr(torch, workspace.dtype)
        self.zeroed = workspace.zeroed
        self.size = size
        self._kept = threading.local()

    def __call__(self, device: torch.device, sizes: Environment) -> torch.Tensor:
        size = self.size if isinstance(self.size, tuple) else self.size(*sizes)
        if not self.zeroed:
            return torch.empty(size, dtype=self.dtype, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        kept = self._kept.__dict__.setdefault("tensors", {})
        key = (size, device, stream)
        if key not in kept:
            kept[key] = torch.zeros(size, dtype=self.dtype, device=device)
        return kept[key]
