"""The step of a region in a program: its inputs gathered, its outputs provided, its kernel called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from dsi.ir import ops
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import Region

from .expand import in_place_writes
from .sizes import Environment, Sizes, expression

Run = Callable[[list[Any], Environment], None]


class RegionKernel(Protocol):
    """What runs one region: reads `inputs`, fills `outputs` (fresh, cloned, or an input that is overwritten in place).

    One with an attribute `allocate` (size, stride, dtype) has its outputs made by that.
    """

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None: ...

    def describe(self) -> str:
        """A few words for the printed program."""
        ...


def define(statement: str, names: dict[str, Any]) -> Run:
    """A step whose body is `statement`, over the slots `s` and the values of the size symbols, `sizes`."""
    scope = dict(names)
    exec(f"def run(s, sizes):\n    {statement}", scope)
    return scope["run"]


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
    region: Region, kernel: RegionKernel, body: RegionKernel, reads: list[int], writes: list[int], sizes: Sizes, foreign: set[int]
) -> Run:
    """Gathers a region's inputs, provides its outputs, and runs its kernel. A region with an empty tensor runs by `body` instead.

    `foreign` numbers the inputs that operators make which are not ours: they may come in another layout than their fakes state.
    """
    in_place_writes(region)  # raises if what lowering allowed cannot be
    clones = cloned_inputs(region)
    names: dict[str, Any] = {"kernel": kernel, "body": body, "lay_out": _lay_out}

    def number(of: Sequence[Any]) -> str:
        """Sizes as source text: the tuple itself, or a call that computes it."""
        compiled = sizes.compile(*of)
        name = f"c{len(names)}"
        names[name] = compiled
        return name if isinstance(compiled, tuple) else f"{name}(*sizes)"

    lines = [f"i = [{', '.join(f's[{slot}]' for slot in reads)}]"]
    values = [node.meta["val"] for node in region.inputs]
    lines += [f"lay_out(i, {n}, {number(values[n].stride())})" for n in sorted(foreign) if isinstance(values[n], torch.Tensor)]
    for n, node in enumerate(region.outputs):
        value, overwritten = node.meta["val"], region.in_place.get(n)
        if overwritten is not None:
            if not _equal_strides(value, values[overwritten]):
                raise DsiInternalError(
                    f"output {n} of region {region.name} may not overwrite input {overwritten}, which lies otherwise in memory"
                )
            lines.append(f"o{n} = i[{overwritten}]")
            continue
        base = clones.get(n)
        copied = "" if base is None else f".copy_(i[{base}])"
        allocate = getattr(kernel, "allocate", None)
        names[f"new{n}"] = allocate or functools.partial(_empty, value.device)
        names[f"dtype{n}"] = value.dtype
        lines.append(f"o{n} = new{n}({number(value.shape)}, {number(value.stride())}, dtype{n}){copied}")
    outputs = f"[{', '.join(f'o{n}' for n in range(len(writes)))}]"
    maybe_empty = [f"i[{n}].numel() == 0" for n, value in enumerate(values) if not never_empty(value)]
    maybe_empty += [f"o{n}.numel() == 0" for n, node in enumerate(region.outputs) if not never_empty(node.meta["val"])]
    if maybe_empty:
        lines.append(f"(body if {' or '.join(maybe_empty)} else kernel)(i, {outputs}, sizes)")
    else:
        lines.append(f"kernel(i, {outputs}, sizes)")
    return define("\n    ".join([*lines, *(f"s[{slot}] = o{n}" for n, slot in enumerate(writes))]), names)


def _lay_out(inputs: list[Any], number: int, stride: tuple[int, ...]) -> None:
    """Gives an input the strides that its fake has. A kernel that believed the fake would read the wrong elements."""
    tensor = inputs[number]
    same = all(size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), stride, strict=True))
    if not same:
        inputs[number] = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def never_empty(value: Any) -> bool:
    """Whether a fake has an element whatever its symbols stand for. True for numbers."""
    return not isinstance(value, torch.Tensor) or all(expression(size).is_positive for size in value.shape)


def _equal_strides(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a fake result lies in memory as the input that it may overwrite, which may be a part of a larger cache."""
    return all(expression(a) == expression(b) for a, b in zip(output.stride(), base.stride(), strict=True))


def _empty(device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
