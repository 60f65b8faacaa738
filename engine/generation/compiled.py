"""Functions compiled for one engine alone: nothing that another engine or the caller has compiled counts against them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
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


def _kept_guards(guards: Sequence[Any]) -> list[bool]:
    """All but those on transformers' table of what each class can record, which every further model in the process adds a line to: what
    was compiled would be compiled again, and nothing that it looked up there can change."""
    return ["_CAN_RECORD_REGISTRY" not in guard.name for guard in guards]


class _Loudly(contextlib.ContextDecorator):
    """Within: a function that is called with too many shapes is an error, and hooks that a module is given after it was compiled count.
    Dynamo would go on uncompiled, and leave the hooks out, in silence.

    Its configuration is the process's. Whoever is the first to enter, in whatever thread, changes it; the last one to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._patch: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                limits = {"recompile_limit": SHAPES, "accumulated_recompile_limit": 8 * SHAPES, "fail_on_recompile_limit_hit": True}
                wanted = {**limits, "skip_nnmodule_hook_guards": False}
                self._patch = torch._dynamo.config.patch({n: v for n, v in wanted.items() if hasattr(torch._dynamo.config, n)})
                self._patch.__enter__()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._patch.__exit__(*error)


loudly = _Loudly()
