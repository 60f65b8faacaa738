"""Which choice of blocks a kernel is made with: the winner of trials on this device, else one that is shipped, else the model's."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from dsi.codegen import cost, defaults
from dsi.codegen.devices import Device
from dsi.codegen.kernel import Choice
from dsi.ir.tile import KernelSpec

from .cache import DiskCache

_winners: dict[tuple[str, str, int | None], Choice] = {}  # (device, region key, max_rows)
_lock = threading.Lock()


def untuned(spec: KernelSpec, max_rows: int | None, device: str, figures: Device) -> Choice:
    """The choice of a kernel that was never tried: the one shipped for the device named `device`, else the one that the model, which knows
    the device by `figures`, ranks first."""
    return defaults.lookup(spec, max_rows, device) or cost.candidates(spec, max_rows, figures)[0]


def winner(device: str, cache: bool, key: str, max_rows: int | None) -> Choice | None:
    """The choice that won on a device for all regions with a key; `cache`: whether to look on disk, too."""
    with _lock:
        if (device, key, max_rows) in _winners:
            return _winners[device, key, max_rows]
    value = DiskCache(device, cache).read("tuned", _name(key, max_rows))
    try:
        found = None if value is None else Choice(**value)
    except TypeError:  # of another format
        return None
    if found is not None:
        with _lock:
            _winners[device, key, max_rows] = found
    return found


def write_winner(device: str, cache: bool, key: str, max_rows: int | None, choice: Choice) -> None:
    """Keeps a winner, for this process and, with `cache`, for others."""
    with _lock:
        _winners[device, key, max_rows] = choice
    value: dict[str, Any] = dataclasses.asdict(choice)
    DiskCache(device, cache).write("tuned", _name(key, max_rows), value)


def _name(key: str, max_rows: int | None) -> str:
    return f"{key} {'any' if max_rows is None else max_rows}"
