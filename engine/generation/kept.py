"""Calls of `generate` that differ from an earlier one in their tokens alone: what transformers prepared then is used again.

Preparing takes transformers longer than a small model needs for a prompt, and nearly all of it depends on settings and shapes only. A call
is told from others by everything that its preparation reads: the arguments, the contents of the model's configurations, and the prompt's
shape; its length, too, unless nothing hangs on that but positions, which count from 0. A call that is given anything else (a cache, a
criterion, embeddings), or whose tokens decide something, is prepared anew.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from .frozen import Known, frozen
from .hooks import HOOK
from .prompts import TEXT
from .request import Request

CALLS = 256  # that are kept; the least recently used one gives way
COPIED = 1 << 16  # entries of a mask that are copied to the host in less time than operators on a device take

_MEMBERS = frozenset(
    name for name, member in vars(GenerationMixin).items() if callable(member) or isinstance(member, (property, staticmethod, classmethod))
)


@dataclass(frozen=True)
class Call:
    """A call's tokens `ids` [rows, n], its mask [rows, n] if it has one, its streamer, and everything else that decides about it but n: its
    `key`, and therein what stands for the contents of the model's `configs`."""

    key: Hashable
    configs: object
    name: str
    ids: Tensor
    mask: Tensor | None
    streamer: Any

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """That of calls of all lengths, and that of calls of this one."""
        return (self.key, None), (self.key, self.ids.shape[1])


@dataclass(frozen=True)
class _Prepared:
    """A request without tokens, nor positions where it is for prompts of all lengths. `looked`: which model it is for. `pad`: a token that
    transformers would take for padding."""

    request: Request
    looked: int
    pad: int | None
    counted: tuple[int, torch.device] | None = None  # rows of the positions that are left out, and where they are to be


class Further:
    """A streamer that has been given the prompt."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._given = streamer, False

    def put(self, value: Tensor) -> None:
        if self._given:
            self._streamer.put(value)
        self._given = True

    def end(self) -> None:
        self._streamer.end()


class Kept:
    """The requests of earlier calls of `generate` of `model`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plain = _prepares_plainly(type(model))
        self._prepared: OrderedDict[Hashable, _Prepared] = OrderedDict()
        self._positions: dict[tuple[int, torch.device, int], Tensor] = {}
        self._configs: dict[Hashable, object] = {}  # by their contents, which are long, what stands for configurations in keys
        self._known: tuple[Known, Known, object] | None = None  # those of the last call, and what stands for them

    def call(self, given: Mapping[str, Any]) -> Call | None:
        """The call with these arguments; None for one that is always to be prepared."""
        model = self._model
        if not self._plain or not _MEMBERS.isdisjoint(vars(model)):
            return None
        named = [name for name in TEXT if given.get(name) is not None]
        if len(named) != 1:
            return None
        ids, mask = given[named[0]], given.get("attention_mask")
        if type(ids) is not Tensor or ids.dim() != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
            return None
        if torch.is_autocast_enabled(ids.device.type):
            return None
        if mask is not None and (type(mask) is not Tensor or mask.shape != ids.shape or mask.device != ids.device):
            return None
        streamer = given.get("streamer")
        try:
            settings = [(name, frozen(value)) for name, value in given.items() if name not in (named[0], "attention_mask", "streamer")]
            configs = self._stands_for(model.config, model.generation_config)
        except TypeError:
            return None
        rows, n = ids.shape
        tensors = named[0], rows, n == 1, ids.device, None if mask is None else mask.dtype, streamer is not None
        return Call((tensors, frozenset(settings), configs, _distributed()), configs, named[0], ids, mask, streamer)

    def _stands_for(self, config: Any, defaults: Any) -> object:
        """What stands for the contents of both configurations in keys. Raises TypeError where these are no plain settings."""
        known = self._known
        if known is None or not (known[0].has(config) and known[1].has(defaults)):
            both = Known(config), Known(defaults)
            if len(self._configs) > CALLS:
                self._configs.clear()
            self._known = known = *both, self._configs.setdefault((both[0].contents, both[1].contents), object())
        return known[2]

    def has(self, call: Call) -> bool:
        """Whether an equal call was kept."""
        return any(key in self._prepared for key in call.keys)

    def request(self, call: Call, looked: int, ids: Tensor) -> Request | None:
        """The request of `call`, whose tokens are `ids` on the host; None where it has to be prepared. `looked`: what a look at the model
        has said."""
        for key in call.keys:
            found = self._prepared.get(key)
            if found is not None and found.looked == looked:
                break
        else:
            return None
        if found.pad is not None and bool((ids == found.pad).any()):
            return None
        if call.mask is not None and not _hides_nothing(call.mask):
            return None
        self._prepared.move_to_end(key)
        made = {**vars(found.request), "ids": call.ids, "streamer": call.streamer, "fed": ids.shape[1]}
        if found.counted is not None:
            made["positions"] = self._from_zero(*found.counted, ids.shape[1])
        return Request(**made)

    def _from_zero(self, rows: int, device: torch.device, n: int) -> Tensor:
        """Positions [rows, n] that count from 0: the same tensor for the same sizes, as the loop's buffers take it."""
        key = rows, device, n
        if key not in self._positions:
            if len(self._positions) >= CALLS:
                self._positions.clear()
            self._positions[key] = _counted(rows, n).to(device)
        return self._positions[key]

    def keep(self, call: Call, request: Request, config: Any, looked: int, plain: bool) -> None:
        """Keep what transformers has prepared for `call`, which returned the loop's ids as they were: `request`, and the configuration
        `config`. Nothing is kept where tokens had a say in it, or where it is for one call alone. `plain`: the model has no hook that looks
        at the lengths of prompts."""
        whole = request.ids is call.ids and request.held == 0 and request.fed == call.ids.shape[1]
        if not whole or request.criteria is not None or request.recipe.skipped is not None:
            return
        if any(mask is not None and not _hides_nothing(mask) for mask in (call.mask, request.mask)):
            return
        pad = config._pad_token_tensor
        if pad is not None and pad.numel() != 1:
            return
        marks = None  # as transformers has it: without a mask, a pad_token_id that ends no text marks padding
        if pad is not None and call.mask is None:
            ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.reshape(-1).tolist()
            marks = None if int(pad) in ends else int(pad)
        kept = dataclasses.replace(request, ids=call.ids.new_empty(0, 0), mask=None, past=None, streamer=None)
        for_all, for_one = call.keys
        if plain and config.max_new_tokens == request.limit and not request.recipe.numbers and _counts(request.positions):
            placed = request.positions
            counted = None if placed is None else (placed.shape[0], placed.device)
            self._prepared[for_all] = _Prepared(dataclasses.replace(kept, positions=None), looked, marks, counted)
        else:
            self._prepared[for_one] = _Prepared(kept, looked, marks)
        if len(self._prepared) > CALLS:
            self._prepared.popitem(last=False)

    def forget(self) -> None:
        """Keep nothing: the next requests are another loop's."""
        self._prepared.clear()
        self._positions.clear()


def _prepares_plainly(kind: type) -> bool:
    """Whether a model's class prepares a generation as transformers does in general. What it prepares for a step is looked at elsewhere."""
    return all(inspect.getattr_static(kind, name, None) is vars(GenerationMixin)[name] for name in _MEMBERS if name != HOOK)


def _hides_nothing(mask: Tensor) -> bool:
    """Whether a mask holds ones alone: transformers counts positions by adding up what is in it."""
    mask = mask.cpu() if mask.numel() <= COPIED else mask
    return bool((mask if mask.dtype == torch.bool else mask == 1).all())


def _counted(rows: int, n: int) -> Tensor:
    return torch.arange(n).repeat(rows, 1)


def _counts(positions: Tensor | None) -> bool:
    """Whether positions [rows, n], if there are any, are those of prompts without padding that nothing comes before."""
    return positions is None or (positions.dtype == torch.int64 and torch.equal(positions.cpu(), _counted(*positions.shape)))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
