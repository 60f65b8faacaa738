"""Settings as keys: plain values, containers and configurations by their contents."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

_PLAIN = frozenset({bool, float, torch.dtype, torch.device})


def frozen(value: Any) -> Hashable:
    """The contents of a setting, to be compared. Raises TypeError for anything but plain values, in containers or configurations."""
    kind = type(value)
    if value is None or kind is str or kind is int:
        return value
    if kind in _PLAIN:
        return kind, value  # True and 1.0 are no 1
    if kind is list or kind is tuple:
        return kind, *map(frozen, value)
    if kind is dict:
        return kind, *_items(value.items())
    if isinstance(value, (PretrainedConfig, GenerationConfig)):
        return kind, *_items(vars(value).items())
    raise TypeError(f"a {kind.__name__} is no plain setting")


def _items(items: Iterable[tuple[Any, Any]]) -> list[Hashable]:
    return [(name, value if value is None else frozen(value)) for name, value in items]
