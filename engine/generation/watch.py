"""Whether a model is still the one whose steps were recorded: its modules, hooks and weights, looked at in every generation."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dsi.runtime import packs
from torch import Tensor, nn

_attributes = operator.attrgetter("__dict__")
_tables = [operator.itemgetter(name) for name in ("_parameters", "_buffers", "_modules")]
_hooks = [operator.itemgetter(name) for name in ("_forward_hooks", "_forward_pre_hooks")]
_address = Tensor.data_ptr
_version = operator.attrgetter("_version")


class _State(NamedTuple):
    sizes: list[int]
    kinds: list[type]
    addresses: list[int]
    versions: list[int]
    hooks: list[Any]
    refreshed: int


class Watch:
    """Looks at a model as often as it is asked to. What it compares are whole lists, since a model has hundreds of parts and a small one's
    step takes less than a millisecond. It keeps no replaced weight alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = 0
        self._modules: list[weakref.ref[Any]] = []
        self._tensors: list[weakref.ref[Any]] = []
        self._versioned: list[bool] = []
        self._held: list[int] = []
        self._pick = _picker(())
        # What was held and is no longer alive. Without such, whoever has an id is who had it.
        self._gone: list[Any] = [None]
        self._watched: list[Any] = []
        self._state = _State([], [], [], [], [], 0)

    def look(self) -> int:
        """A number that is another one than at the last look where, since then, a weight has come to lie elsewhere or was written to, or a
        module is another or has another class or mode, other hooks or another forward: what was recorded reads the old one, or an int8
        form of it.
        """
        if not self._as_it_was():
            self._take()
            self._seen += 1
        return self._seen

    def lies(self) -> int | None:
        """The number of the last look, where all that a recorded step reads is still in memory: it may be launched before the next look,
        which says whether it was the right one. None where there may be less. A small part of a look."""
        if self._gone:
            return None
        tensors, state = _alive(self._tensors), self._state
        # What hooks read may be theirs alone.
        if self._gone or state.hooks or state.refreshed != packs.refreshed or list(map(_address, tensors)) != state.addresses:
            return None
        return self._seen

    def _as_it_was(self) -> bool:
        if self._gone:
            return False
        modules = _alive(self._modules)
        if self._gone:
            return False
        held, sizes, hooks = _parts(modules)
        # Where all tables hold what they held, all modules are those that they were.
        if sizes != self._state.sizes or list(map(id, held)) != self._held:
            return False
        tensors = self._pick(held)
        try:
            same = _state(modules, sizes, hooks, tensors, itertools.compress(tensors, self._versioned)) == self._state
        except RuntimeError:  # a tensor that counts its versions no longer
            return False
        return same and not self._gone

    def _take(self) -> None:
        modules = list(self._model.modules())
        held, sizes, hooks = _parts(modules)
        self._pick = _picker([number for number, part in enumerate(held) if isinstance(part, Tensor)])
        tensors = self._pick(held)
        self._versioned = [not tensor.is_inference() for tensor in tensors]
        self._modules, self._tensors = list(map(weakref.ref, modules)), list(map(weakref.ref, tensors))
        self._gone = []
        self._watched = [_noted(part, self._gone.append) for part in held]
        self._held = list(map(id, held))
        self._state = _state(modules, sizes, hooks, tensors, itertools.compress(tensors, self._versioned))


def _noted(part: Any, note: Callable[[Any], None]) -> Any:
    """A reference whose end is noted, if there can be one: None and some callables are kept instead."""
    try:
        return weakref.ref(part, note)
    except TypeError:
        return part


def _parts(modules: Iterable[Any]) -> tuple[list[Any], list[int], bool]:
    """Everything that `modules` hold, in order, forwards of their own and their modes (train or eval) included, how many entries each of
    their tables has, and whether there are hooks."""
    own = list(map(_attributes, modules))
    tables = list(itertools.chain.from_iterable(map(table, own) for table in _tables))
    held = list(itertools.chain.from_iterable(map(dict.values, filter(None, tables))))  # most are empty
    for name in ("forward", "training"):
        held += map(dict.get, own, itertools.repeat(name))
    return held, list(map(len, tables)), any(any(map(hooks, own)) for hooks in _hooks)


def _state(modules: Sequence[Any], sizes: list[int], hooked: bool, tensors: Sequence[Tensor], versioned: Iterable[Tensor]) -> _State:
    tables = [hooks(vars(module)) for module in modules for hooks in _hooks] if hooked else []
    hooks = [(number, *table) for number, table in enumerate(tables) if table]
    numbers = list(map(_address, tensors)), list(map(_version, versioned))
    return _State(sizes, list(map(type, modules)), *numbers, hooks, packs.refreshed)


def _picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What takes these places out of a list."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda held: [held[place] for place in places]


def _alive(parts: Iterable[Callable[[], Any]]) -> list[Any]:
    return [part() for part in parts]
