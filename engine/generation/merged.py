"""Generation configurations that transformers has merged before, from a call's arguments and the model's defaults.

Merging is the longest part of what transformers does before a call's first token, and it depends on settings alone: a prompt of another
length, or with padding, needs none of it again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from .frozen import frozen

CONFIGS = 64  # that are kept; the least recently used one gives way

Merge = Callable[..., tuple[Any, dict[str, Any]]]  # transformers' `_prepare_generation_config`, without self


class Merged:
    """What transformers' `_prepare_generation_config` made of settings.

    It puts the arguments that it knows into a copy of a configuration, and returns that with all others. Those that are no plain values
    (tensors, caches) are nothing to it but names, as long as it hands them on.
    """

    def __init__(self) -> None:
        # (the configuration, the names of the arguments that were handed on, what was added to them)
        self._kept: OrderedDict[Hashable, tuple[Any, list[str], dict[str, Any]]] = OrderedDict()

    def merge(self, model: Any, merge: Merge, config: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """`merge(config, **given)` for `model`."""
        try:
            key = frozen(config), frozen(model.config), frozen(model.generation_config), *((n, _frozen_or_any(v)) for n, v in given.items())
        except TypeError:
            return merge(config, **given)
        found = self._kept.get(key)
        if found is None:
            made, others = merge(config, **given)
            self._keep(key, made, others, given)
            return made, others
        self._kept.move_to_end(key)
        made, names, added = found
        return _copy(made), {**{name: given[name] for name in names}, **added}

    def _keep(self, key: Hashable, made: Any, others: dict[str, Any], given: dict[str, Any]) -> None:
        names = [name for name in others if name in given and others[name] is given[name]]
        added = {name: value for name, value in others.items() if name not in names}
        try:
            frozen(made), frozen(added)
        except TypeError:
            return
        if any(_frozen_or_any(value) is _ANY for name, value in given.items() if name not in names):
            return
        self._kept[key] = _copy(made), names, copy.deepcopy(added)
        if len(self._kept) > CONFIGS:
            self._kept.popitem(last=False)


_ANY = object()


def _frozen_or_any(value: Any) -> Hashable:
    try:
        return frozen(value)
    except TypeError:
        return _ANY


def _copy(config: Any) -> Any:
    """A configuration of plain values that shares none that can be written to."""
    made = copy.copy(config)
    for name, value in vars(made).items():
        if type(value) in (list, dict, tuple):
            vars(made)[name] = copy.deepcopy(value)
    return made
