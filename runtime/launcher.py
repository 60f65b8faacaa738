"""Launching a compiled Triton kernel directly, at a small part of what `function[grid](...)` costs on the host.

`function[grid](...)` binds the arguments, asks each tensor for its dtype and address, and looks the compiled kernel up by a key made of
text. The first launch of each specialisation goes that way, and compiles. What it returns is kept under a key of everything that Triton
specialises on and that can differ between two launches here: whether an address is a multiple of 16, and for an integer whether it is 1,
whether it is a multiple of 16, and how wide it is. dtypes, constexprs and options are the same in every launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from dsi.ir.errors import DsiError

from . import lookups
from .straight import straight

# Where an argument is found: its group (an index of GROUPS) and its number there.
GROUPS = ("inputs", "outputs", "workspaces", "integers")
INTEGERS = GROUPS.index("integers")
Place = tuple[int, int]
# (inputs, outputs, sizes, workspaces) -> one launch. `sizes` are not looked at: so a region's step can call it as its kernel.
Bound = Callable[..., Any]
ALIGNMENT = 16  # bytes; Triton loads 16 bytes at once where it knows an address to be a multiple of this


class _NoHooks:
    """Of a Triton without knobs, or of none at all."""

    launch_enter_hook = None
    launch_exit_hook = None


class Launcher:
    """Launches one Triton function, with fixed constexprs and options, on the current device.

    `order`: where each positional argument is found. `stream` gives the raw handle of the current stream; None (a CPU, Triton's
    interpreter) launches by `function[grid](...)` only. `words`: positions of tensors that must lie at multiples of 16 bytes.
    """

    def __init__(
        self,
        function: Any,
        constants: dict[str, Any],
        order: Sequence[Place],
        stream: Callable[[], int] | None = None,
        words: Sequence[int] = (),
    ):
        self.function = function
        self.constants = constants
        self.order = tuple(order)
        self.words = tuple(words)
        self.stream = stream
        self.compiled: dict[Hashable, tuple[Any, ...]] = {}
        parameters = getattr(function, "arg_names", None)
        if stream is None or parameters is None or not self._fits(parameters):
            self.launch = self._by_triton
        else:
            self.launch = self._direct()

    # launch(grid, inputs, outputs, workspaces, integers): one launch on the current stream.
    launch: Callable[[tuple[int, ...], Sequence[Any], Sequence[Any], Sequence[Any], Sequence[int]], Any]

    def _fits(self, parameters: Sequence[str]) -> bool:
        """Whether every parameter is either an argument or a constant: no defaults to fill in."""
        return set(parameters[len(self.order) :]) <= set(self.constants)

    def _by_triton(self, grid: tuple[int, ...], *groups: Sequence[Any]) -> Any:
        # Looked at here alone: nothing is kept under the key of a launch that is refused, so the next one comes here, too.
        for position in self.words:
            group, number = self.order[position]
            if groups[group][number].data_ptr() % ALIGNMENT:
                name = self.function.arg_names[position].removesuffix("_ptr")
                raise DsiError(
                    f"the int8 weight {name} lies at an address that is no multiple of {ALIGNMENT} bytes, and its kernel reads {ALIGNMENT} "
                    "bytes at a time: give the model a copy of it (weight.clone())"
                )
        return self.function[grid](*[groups[group][number] for group, number in self.order], **self.constants)

    def compile(self, grid: tuple[int, ...], *groups: Sequence[Any]) -> Any:
        """Triton's compiled kernel, loaded, for these integers and for aligned tensors, instead of which their dtypes are given.

        Launches nothing, and may be called from several threads. Raises what Triton raises, where it cannot be compiled or loaded.
        """
        kernel = self.function.warmup(*[groups[group][number] for group, number in self.order], grid=grid, **self.constants)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        integers = tuple(groups[INTEGERS])
        self._keep((None, kinds(integers)) if any(group == INTEGERS for group, _ in self.order) else None, kernel)
        return kernel

    def _first(self, key: Hashable, grid: tuple[int, ...], *groups: Sequence[Any]) -> None:
        self._keep(key, self._by_triton(grid, *groups))

    def _keep(self, key: Hashable, kernel: Any) -> None:
        if all(hasattr(kernel, name) for name in ("run", "function", "packed_metadata")):
            # `run` loads the code. The kernel itself is kept too: where nothing else holds it, Triton unloads it.
            way = straight(kernel.run, kernel.packed_metadata, len(self.function.arg_names))
            self.compiled[key] = (way.call, kernel.function, way.between, way.together, kernel)

    def bound(self, grid: tuple[int, ...], integers: tuple[int, ...]) -> Bound:
        """`launch` for one grid and these integers, which then cost nothing in a launch. What launches without Triton's Python has an
        attribute `written_out` (inputs, outputs, name, workspaces): lines of code that do what a call does with these variables, the last
        a sequence; `name` gives what they may call a value."""
        if self.launch == self._by_triton:
            return lambda inputs, outputs, sizes=(), workspaces=(): self._by_triton(grid, inputs, outputs, workspaces, integers)
        launch: Any = self._direct(grid, integers)
        launch.written_out = functools.partial(self._written_out, grid, integers)
        return launch

    def _written_out(
        self,
        grid: tuple[int, ...],
        integers: tuple[int, ...],
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: Callable[[Any], str],
        workspaces: str = "()",
    ) -> list[str]:
        variables = {"inputs": inputs, "outputs": outputs}
        groups = (f"[{', '.join(inputs)}]", f"[{', '.join(outputs)}]", workspaces, "()")

        def at(group: str, number: int) -> str:
            return variables[group][number] if group in variables else f"{workspaces}[{number}]"

        return self._lines(at, groups, name, grid, integers)

    def _direct(self, grid: tuple[int, ...] | None = None, integers: tuple[int, ...] = ()) -> Callable[..., Any]:
        """A function written for the arguments: each step of a loop over them would cost as much as reading an address."""
        scope: dict[str, Any] = {}

        def name(value: Any) -> str:
            scope[f"c{len(scope)}"] = value
            return f"c{len(scope) - 1}"

        lines = self._lines(lambda group, number: f"{group}[{number}]", GROUPS, name, grid, integers)
        head = f"grid, {', '.join(GROUPS)}" if grid is None else "inputs, outputs, sizes=(), workspaces=()"
        exec(f"def launch({head}):\n" + "".join(f"    {line}\n" for line in lines), scope)
        launch: Callable[..., Any] = scope["launch"]
        return launch

    def _lines(
        self,
        at: Callable[[str, int], str],
        groups: Sequence[str],
        name: Callable[[Any], str],
        grid: tuple[int, ...] | None,
        integers: tuple[int, ...],
    ) -> list[str]:
        """Code of one launch: `at` gives a tensor of a group as code, `groups` the groups themselves. Without a grid, that is a variable
        `grid`, and the integers are of their group."""
        pointers = [position for position, (group, _) in enumerate(self.order) if group != INTEGERS]
        reads = [f"a{n} = {at(GROUPS[self.order[n][0]], self.order[n][1])}.data_ptr()" for n in pointers]
        counted = len(pointers) < len(self.order)
        aligned, usual = f"({', '.join(f'a{n} % {ALIGNMENT} == 0' for n in pointers)},)", "None"
        if grid is not None:
            size, where = ", ".join(map(str, (*grid, 1, 1)[:3])), name(grid)
            groups = (*groups[:INTEGERS], name(integers))
        else:
            size, where = "x, y, z", "grid"
        if counted:
            kind = f"{name(kinds)}({groups[INTEGERS]})" if grid is None else name(kinds(integers))
            aligned, usual = (f"({addresses}, {kind})" for addresses in (aligned, usual))
            usual = usual if grid is None else name((None, kinds(integers)))
        hooks = _hooks()
        told = f"{name(hooked)}()"
        if all(isinstance(getattr(hook, "calls", None), list) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook)):
            # What `hooked` looks at, without a call: chains of hooks, which are the ones that were there and have none.
            runtime, enter, leave = name(hooks), name(hooks.launch_enter_hook), name(hooks.launch_exit_hook)
            same = f"{runtime}.launch_enter_hook is {enter} and {runtime}.launch_exit_hook is {leave}"
            told = f"not ({same} and not {enter}.calls and not {leave}.calls) and {told}"
        # All of them in a line at once first: almost every address is a multiple.
        key = f"{aligned} if ({' | '.join(f'a{n}' for n in pointers)}) % {ALIGNMENT} else {usual}" if pointers else usual
        numbers = [repr(value) for value in integers] if grid is not None else [f"integers[{n}]" for n in range(len(self.order))]
        given = [f"a{n}" if group != INTEGERS else numbers[number] for n, (group, number) in enumerate(self.order)]
        given += [name(self.constants[parameter]) for parameter in self.function.arg_names[len(self.order) :]]
        launched = f"found[0]({size}, {name(self.stream)}(), found[1], *found[2], "
        return [
            *reads,
            f"key = {key}",
            f"found = {name(self.compiled)}.get(key)",
            *(["x, y, z = (*grid, 1, 1)[:3]"] if grid is None else []),
            f"if found is None or {told}:",
            f"    {name(self._first)}(key, {where}, {', '.join(groups)})",
            "elif found[3]:",
            f"    {launched}({', '.join(given)},))",
            "else:",
            f"    {launched}{', '.join(given)})",
        ]


@functools.lru_cache(maxsize=4096)
def kinds(integers: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton specialises on of each integer: being 1, being a multiple of 16, and fitting 32, 64 or only 64 unsigned bits."""
    return tuple(_kind(value) for value in integers)


def _kind(value: int) -> int:
    if value == 1:
        return -1
    width = 0 if -(2**31) <= value < 2**31 else 1 if -(2**63) <= value < 2**63 else 2
    return 2 * width + (value % ALIGNMENT == 0)


@functools.cache
def _hooks() -> Any:
    try:
        from triton import knobs
    except ImportError:
        return _NoHooks
    return getattr(knobs, "runtime", _NoHooks)


def hooked() -> bool:
    """Whether somebody wants to be told of launches (a profiler): then Triton must make them, since it knows what to tell."""
    hooks = _hooks()
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (leave is not None and bool(getattr(leave, "calls", True)))


def current_stream(device: torch.device) -> Callable[[], int] | None:
    """What gives the raw handle of a CUDA device's current stream; None for other devices."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type != "cuda" or raw is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return functools.partial(raw, index)


def start_driver() -> None:
    """Has Triton load its driver, which is not made to be loaded by several threads at once."""
    from triton.runtime import driver

    lookups.wait()
    driver.active.get_current_device()
