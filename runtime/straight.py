"""What a launcher of Triton's hands to its C function, so that a launch can call that without the Python in between.

`CompiledKernel.run(x, y, z, stream, function, …)` looks for scratch memory that kernels of dsi never have, and calls `run.launch` with what
it was given and with values that are the same in every launch. Which ones, and in which order, differs between versions of Triton; so the
launcher is asked once a kernel, with marks in the place of what changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Straight:
    """`call(x, y, z, stream, function, *between, *arguments)` launches; `together`: with the arguments in one tuple."""

    call: Callable[..., Any]
    between: tuple[Any, ...]
    together: bool = False


def straight(run: Callable[..., Any], metadata: Any, count: int) -> Straight:
    """How to launch a kernel of `count` arguments, constants among them: by the C function of its launcher `run`, or by `run` itself where
    that does more than hand its arguments over. `metadata`: the kernel's, packed."""
    by_itself = Straight(run, (metadata, None, None, None))
    if not callable(getattr(run, "__dict__", {}).get("launch")):
        return by_itself
    marks = [object() for _ in range(5 + count)]
    handed: list[tuple[Any, ...]] = []
    try:
        asked = copy.copy(run)
        asked.launch = lambda *given: handed.append(given)  # type: ignore[attr-defined]
        asked(*marks[:5], *by_itself.between, *marks[5:])
        (given,) = handed
    except Exception:  # it computes with what it is given, or is no such launcher
        return by_itself
    place, arguments = marks[:5], marks[5:]
    together = bool(given) and isinstance(given[-1], tuple)
    between = given[5:-1] if together else given[5 : len(given) - count]
    expected = [*place, *between, *((tuple(arguments),) if together else arguments)]
    if len(given) != len(expected) or any(one is not other and one != other for one, other in zip(given, expected, strict=True)):
        return by_itself
    if any(value is mark for value in between for mark in marks):
        return by_itself
    return Straight(run.__dict__["launch"], between, together)
