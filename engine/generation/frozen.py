"""Settings as keys: plain values, containers and configurations by their contents."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

_PLAIN = frozenset({bool, float, torch.dtype, torch.device})
_CONSTANT = _PLAIN | {type(None), str, int}


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


class Known:
    """The contents that a configuration had, to tell whether it still has them: much sooner than by freezing it again, which depends on
    every one of its entries."""

    def __init__(self, config: Any) -> None:
        """Raises TypeError where `frozen` does."""
        self.contents = frozen(config)
        self._kind, self._names, self._values = type(config), list(vars(config)), list(vars(config).values())
        self._changing = [value for value in self._values if type(value) not in _CONSTANT]
        self._changed = list(map(frozen, self._changing))

    def has(self, config: Any) -> bool:
        """Whether `config` has these contents. False may be said of one that has them by other objects."""
        entries = vars(config)
        same = type(config) is self._kind and list(entries) == self._names and all(map(operator.is_, entries.values(), self._values))
        return same and list(map(frozen, self._changing)) == self._changed
