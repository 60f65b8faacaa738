"""The step of a region in a program: its inputs gathered, its outputs provided, its kernel called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from dsi.ir import ops
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import Region

from .expand import in_place_writes
from .sizes import Environment, Sizes, expression


class RegionKernel(Protocol):
    """What runs one region: reads `inputs`, fills `outputs` (fresh, cloned, or an input that is overwritten in place).

    One with an attribute `allocate` (size, stride, dtype) has its outputs made by that. One with `run` and `failed` (error, inputs,
    outputs, sizes) is called as `run`, and `failed` with what that raises.
    """

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None: ...

    def describe(self) -> str:
        """A few words for the printed program."""
        ...


def cloned_inputs(region: Region) -> dict[int, int]:
    """The outputs that start from an input's contents without overwriting it: output number -> input number."""
    found = {}
    for number, output in enumerate(region.outputs):
        base: Any = output
        while base.op == "call_function" and base.target is ops.kv_write:
            base = base.args[0]
        if base is not output and base.op == "placeholder" and number not in region.in_place:
            found[number] = region.inputs.index(base)
    return found


def region_step(
    region: Region,
    kernel: RegionKernel,
    body: RegionKernel,
    reads: Sequence[str],
    writes: Sequence[str],
    sizes: Sizes,
    foreign: set[int],
    name: Callable[[Any], str],
    held: Collection[int] = (),
) -> list[str]:
    """Lines of code that provide a region's outputs, the variables `writes`, and run its kernel on its inputs, the variables `reads`, and
    the values of the size symbols, `sizes`. A region with an empty tensor runs by `body` instead.

    `held` numbers the outputs whose variables hold a tensor before, in which the kernel stores them.
    `foreign` numbers the inputs that operators make which are not ours: they may come in another layout than their fakes state. `name`
    gives what the code may call a value.
    """
    in_place_writes(region)  # raises if what lowering allowed cannot be
    clones = cloned_inputs(region)

    def number(of: Sequence[Any]) -> str:
        """Sizes as source text: the tuple itself, or a call that computes it."""
        compiled = sizes.compile(*of)
        return repr(compiled) if isinstance(compiled, tuple) else f"{name(compiled)}(*sizes)"

    reads, lines = list(reads), []
    values = [node.meta["val"] for node in region.inputs]
    moved = [n for n in sorted(foreign) if isinstance(values[n], torch.Tensor)]
    for n in moved:
        lines.append(f"moved{n} = {name(_laid_out)}({reads[n]}, {number(values[n].stride())})")
        reads[n] = f"moved{n}"
    for n, node in enumerate(region.outputs):
        if n in held:
            continue
        value, overwritten = node.meta["val"], region.in_place.get(n)
        if overwritten is not None:
            if not _equal_strides(value, values[overwritten]):
                raise DsiInternalError(
                    f"output {n} of region {region.name} may not overwrite input {overwritten}, which lies otherwise in memory"
                )
            lines.append(f"{writes[n]} = {reads[overwritten]}")
            continue
        copied = f".copy_({reads[clones[n]]})" if n in clones else ""
        new = name(getattr(kernel, "allocate", None) or functools.partial(_empty, value.device))
        lines.append(f"{writes[n]} = {new}({number(value.shape)}, {number(value.stride())}, {name(value.dtype)}){copied}")
    given = f"[{', '.join(reads)}], [{', '.join(writes)}], sizes"
    maybe_empty = [f"{reads[n]}.numel() == 0" for n, value in enumerate(values) if not never_empty(value)]
    maybe_empty += [f"{writes[n]}.numel() == 0" for n, node in enumerate(region.outputs) if not never_empty(node.meta["val"])]
    called = name(kernel)
    if maybe_empty:
        lines.append(f"({name(body)} if {' or '.join(maybe_empty)} else {called})({given})")
    elif hasattr(kernel, "failed"):  # what it does when it is called
        lines += ["try:", *(f"    {line}" for line in _run(kernel, called, given, reads, writes, name))]
        lines += ["except Exception as error:", f"    {called}.failed(error, {given})"]
    else:
        lines.append(f"{called}({given})")
    return [*lines, *(f"moved{n} = None" for n in moved)]


def _run(kernel: Any, called: str, given: str, reads: Sequence[str], writes: Sequence[str], name: Callable[[Any], str]) -> list[str]:
    """Code that runs `kernel`, which is `called` so. A function that can be written out is, as long as the kernel runs by that one."""
    written_out = getattr(kernel.run, "written_out", None)
    if written_out is None:
        return [f"{called}.run({given})"]
    lines = written_out(reads, writes, name)
    return [f"if {called}.run is {name(kernel.run)}:", *(f"    {line}" for line in lines), "else:", f"    {called}.run({given})"]


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """An input with the strides that its fake has. A kernel that believed the fake would read the wrong elements."""
    same = all(size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), stride, strict=True))
    return tensor if same else tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def never_empty(value: Any) -> bool:
    """Whether a fake has an element whatever its symbols stand for. True for numbers."""
    return not isinstance(value, torch.Tensor) or all(expression(size).is_positive for size in value.shape)


def _equal_strides(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a fake result lies in memory as the input that it may overwrite, which may be a part of a larger cache."""
    return all(expression(a) == expression(b) for a, b in zip(output.stride(), base.stride(), strict=True))


def _empty(device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
