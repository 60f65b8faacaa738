"""What Triton looks up once a process before it compiles or loads anything: found out by a thread, while a graph is still looked at.

The key of its cache holds a hash of its own library of 400 MB, and the version of ptxas, for which it starts a process. Neither needs
Python's lock, and nothing before the kernels needs either.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("dsi.runtime")

_starting = threading.Lock()
_thread: threading.Thread | None = None


def begin(device: torch.device) -> None:
    """Has a thread begin with it for a CUDA device, the first time that this is called."""
    global _thread
    with _starting:
        if _thread is None:
            # Imported here: threads that import parts of one package at once may see modules half made.
            looks = [_attempt(functools.partial(find, device)) for find in (_key, _version, _folders)]
            thread = threading.Thread(target=lambda: [_attempt(look) for look in looks if look], name="dsi-lookups", daemon=True)
            _attempt(thread.start)  # there may be as many threads as there can be
            _thread = thread if thread.ident is not None else None  # now: who waits may join none that has not started


def wait() -> None:
    """Returns when the thread is done, if one has begun."""
    if _thread is not None:
        _thread.join()


def _attempt(function: Callable[[], Any]) -> Any:
    """What `function` gives, None where it fails: another Triton looks for itself, and says what is wrong if anything is."""
    try:
        return function()
    except Exception as error:
        log.debug("dsi: not looked up ahead: %s", error)
        return None


def _key(device: torch.device) -> Callable[[], Any]:
    return _found("triton_key", "triton.runtime.cache", "triton.compiler.compiler")


def _version(device: torch.device) -> Callable[[], Any]:
    major, minor = torch.cuda.get_device_capability(device)
    target = _found("GPUTarget", "triton.backends.compiler")("cuda", 10 * major + minor, 32)
    return _found("make_backend", "triton.compiler.compiler")(target).hash


def _folders(device: torch.device) -> Callable[[], Any]:
    return _found("library_dirs", "triton.backends.nvidia.driver")


def _found(name: str, *modules: str) -> Callable[..., Any]:
    """The function of the first of `modules` that has it. Raises ImportError where none has."""
    for module in modules:
        found: Any = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise ImportError(f"this Triton has no {name}")
