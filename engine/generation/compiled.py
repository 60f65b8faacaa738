"""Functions compiled for one engine alone: nothing that another engine or the caller has compiled counts against them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.config
from dsi.compiler.backend import dsi

SHAPES = 64  # compiled forms of one function before a call with yet another shape is an error

_numbers = itertools.count()


def compiled(function: Callable[..., Any], options: dict[str, Any] | None, *, whole: bool) -> Callable[..., Any]:
    """`function` (no method) under torch.compile with this backend. `whole`: an error where it is more than one graph.

    Dynamo keeps compiled forms, their number and the shapes that it has seen by code object: this one is the function's own.
    """
    name = f"{function.__name__}_{next(_numbers)}"
    own = types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    own.__wrapped__ = getattr(function, "__wrapped__", None) or function  # type: ignore[attr-defined]
    return torch.compile(own, backend=dsi, options={**(options or {}), "guard_filter_fn": _kept_guards}, fullgraph=whole)


def switched_off() -> bool:
    """Whether Dynamo is told to compile nothing, as TORCH_COMPILE_DISABLE=1 does."""
    return bool(torch._dynamo.config.disable)


def _kept_guards(guards: Sequence[Any]) -> list[bool]:
    """All but those on transformers' table of what each class can record, which every further model in the process adds a line to: what
    was compiled would be compiled again, and nothing that it looked up there can change."""
    return ["_CAN_RECORD_REGISTRY" not in guard.name for guard in guards]


class _Loudly(contextlib.ContextDecorator):
    """Within: a function that is called with too many shapes is an error, and hooks that a module is given after it was compiled count.
    Dynamo would go on uncompiled, and leave the hooks out, in silence.

    Its configuration is the process's, or each thread's from torch 2.12 or so on. Whoever is the first to enter where it is shared changes
    it; the last one to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Counter[int] = Counter()
        self._patches: dict[int, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            place = _place()
            self._inside[place] += 1
            if self._inside[place] == 1:
                limits = {"recompile_limit": SHAPES, "accumulated_recompile_limit": 8 * SHAPES, "fail_on_recompile_limit_hit": True}
                wanted = {**limits, "skip_nnmodule_hook_guards": False}
                known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
                self._patches[place] = torch._dynamo.config.patch(known)
                self._patches[place].__enter__()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            place = _place()
            self._inside[place] -= 1
            if self._inside[place] == 0:
                del self._inside[place]
                self._patches.pop(place).__exit__(*error)


def _place() -> int:
    """What Dynamo's configuration belongs to here: a number for this thread, or the same one for all."""
    return threading.get_ident() if _configured_by_thread() else 0


@functools.cache
def _configured_by_thread() -> bool:
    seen: list[int] = []
    with torch._dynamo.config.patch(recompile_limit=SHAPES + 1):
        other = threading.Thread(target=lambda: seen.append(torch._dynamo.config.recompile_limit))
        other.start()
        other.join()
    return seen != [SHAPES + 1]


loudly = _Loudly()
