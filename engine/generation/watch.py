"""Whether a model is still the one whose steps were recorded: its modules, hooks and weights, looked at before every generation."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dsi.runtime import packs
from torch import Tensor, nn

_attributes = operator.attrgetter("__dict__")
_parts = operator.attrgetter("_parameters", "_buffers", "_modules")
_hooks = operator.attrgetter("_forward_hooks", "_forward_pre_hooks")
_address = Tensor.data_ptr
_version = operator.attrgetter("_version")


class Watch:
    """Looks at a model as often as it is asked to. What it compares are whole lists, since a model has hundreds of parts and a small one's
    step takes less than a millisecond. It keeps no replaced weight alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = 0
        self._modules: list[Callable[[], Any]] = []
        self._held: list[Callable[[], Any]] = []
        self._tensors: list[Callable[[], Any]] = []
        self._versioned: list[Callable[[], Any]] = []
        self._state: tuple[Any, ...] = ()

    def look(self) -> int:
        """A number that is another one than at the last look where, since then, a weight has come to lie elsewhere or was written to, or a
        module is another or has another class, other hooks or another forward: what was recorded reads the old one, or an int8 form of it.
        """
        if not self._as_it_was():
            self._take()
            self._seen += 1
        return self._seen

    def _as_it_was(self) -> bool:
        modules, tensors = _alive(self._modules), _alive(self._tensors)
        if not modules or _any_gone(modules) or _any_gone(tensors):
            return False
        held, sizes = _tables(modules)
        # Where all tables hold what they held, all modules are those that they were.
        if sizes != self._state[0] or not all(map(operator.is_, held, _alive(self._held))):
            return False
        try:
            return _state(modules, sizes, tensors, _alive(self._versioned)) == self._state
        except RuntimeError:  # a tensor that counts its versions no longer
            return False

    def _take(self) -> None:
        modules = list(self._model.modules())
        held, sizes = _tables(modules)
        tensors = [part for part in held if isinstance(part, Tensor)]
        versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        self._modules, self._held, self._tensors, self._versioned = map(_weakly, (modules, held, tensors, versioned))
        self._state = _state(modules, sizes, tensors, versioned)


def _tables(modules: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Everything that `modules` hold, in order, forwards of their own included, and how many entries each of their tables has."""
    tables = list(itertools.chain.from_iterable(map(_parts, modules)))
    held = list(itertools.chain.from_iterable(map(dict.values, filter(None, tables))))  # most are empty
    forwards = [attributes.get("forward") for attributes in map(_attributes, modules)]
    return held + forwards, [*map(len, tables), *map(operator.is_not, forwards, itertools.repeat(None))]


def _state(modules: Sequence[Any], sizes: list[int], tensors: Sequence[Tensor], versioned: Sequence[Tensor]) -> tuple[Any, ...]:
    hooks = [(number, *table) for number, table in enumerate(itertools.chain.from_iterable(map(_hooks, modules))) if table]
    return sizes, list(map(type, modules)), list(map(_address, tensors)), list(map(_version, versioned)), hooks, packs.refreshed


def _weakly(parts: Iterable[Any]) -> list[Callable[[], Any]]:
    """For each part what returns it while it is alive, and None afterwards."""
    return list(map(_reference, parts))


def _reference(part: Any) -> Callable[[], Any]:
    if part is None:
        return type(None)
    try:
        return weakref.ref(part)
    except TypeError:  # of some callables there are no weak references
        return lambda: part


def _alive(parts: list[Callable[[], Any]]) -> list[Any]:
    return [part() for part in parts]


def _any_gone(parts: list[Any]) -> bool:
    return any(map(operator.is_, parts, itertools.repeat(None)))
