"""What a model's own `prepare_inputs_for_generation` adds to transformers' general one, found out by calling both.

The engine's loop makes a step's inputs itself, as the general method does. A model's own may do the same for what a text has (images,
say, are prepared there), or do something else at certain lengths only (LongRoPE computes the whole cache again where frequencies change).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

HOOK = "prepare_inputs_for_generation"
ROWS = 2


class Preparation:
    """The inputs that `model` prepares for a step, held against those that transformers prepares in general.

    `cache_name`: the argument that takes the cache.
    """

    def __init__(self, model: Any, cache_name: str) -> None:
        self.own = getattr(type(model), HOOK, None) is not getattr(GenerationMixin, HOOK, None)
        self._cache_name = cache_name
        self._name = type(model).__name__
        self._encodes = model.config.is_encoder_decoder
        self._sides = [(device, _at(model, device, general=False), _at(model, device, general=True)) for device in ("meta", "cpu")]
        self._differences: dict[tuple[int, int], str] = {}

    def differs(self, held: int, fed: int) -> str:
        """ "" where a step that is fed `fed` tokens behind `held` ones gets what it gets in general, else what is different: a sentence.

        The methods are called on tensors without contents first, so that nothing that they decide can hang on those, then on numbers.
        """
        if not self.own:
            return ""
        if (held, fed) not in self._differences:
            self._differences[held, fed] = self._compared(held, fed)
        return self._differences[held, fed]

    def _compared(self, held: int, fed: int) -> str:
        name = f"the {HOOK} of {self._name}"
        for device, own, general in self._sides:
            try:
                given = self._given(held, fed, device)
                before = dict(vars(own))
                ours, theirs = getattr(own, HOOK)(**given), getattr(general, HOOK)(**given)
                if before.keys() != vars(own).keys() or any(vars(own)[key] is not value for key, value in before.items()):
                    return f"{name} leaves something on the model, which its forward may read"
                if not self._equal(ours, theirs, held):
                    return f"{name} prepares the step behind {held} tokens in a way of its own"
            except Exception as error:  # whatever its code raises where it looks for more than a text has
                return f"{name} cannot be tried: {type(error).__name__}: {error}".splitlines()[0]
        return ""

    def _given(self, held: int, fed: int, device: str) -> dict[str, Any]:
        total = held + fed
        ids = torch.arange(ROWS * total, device=device).reshape(ROWS, total) % 97
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True, self._cache_name: _cache(held, device)}
        given |= {"attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
        if self._encodes:
            states = torch.zeros(ROWS, total, 1, device=device)
            given[self._cache_name] = EncoderDecoderCache(given[self._cache_name], _cache(total if held else 0, device))
            given["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        else:
            given["position_ids"] = ids.flip(1)
        return given | {"next_sequence_length": fed, "is_first_iteration": not held}

    def _equal(self, ours: dict[str, Any], theirs: dict[str, Any], held: int) -> bool:
        """Whether both mean the same call. Without tokens in it, a cache is as good as none: the model makes one."""
        ours, theirs = ({name: value for name, value in side.items() if value is not None} for side in (ours, theirs))
        if not held:
            ours.pop(self._cache_name, None)
            theirs.pop(self._cache_name, None)
        return ours.keys() == theirs.keys() and all(_same(value, theirs[name]) for name, value in ours.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and (one.is_meta or torch.equal(one, other))
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str)) and one == other)


def _cache(held: int, device: str) -> Cache:
    layer = DynamicLayer()
    if held:
        states = torch.zeros(1, 1, 1, 1, device=device).expand(ROWS, 1, held, 1)
        layer.lazy_initialization(states, states)
        layer.keys = layer.values = states
    made = DynamicCache()
    made.layers = [layer]
    return made


def _at(model: Any, device: str, general: bool) -> Any:
    """`model` as if it were on `device`, whose hook is its class's own or the general one."""
    base = type(model)
    members: dict[str, Any] = {"device": property(lambda self: torch.device(device)), "__module__": base.__module__}
    if general:
        members[HOOK] = getattr(GenerationMixin, HOOK)
    made = copy.copy(model)
    made.__class__ = type(base.__name__, (base,), members)
    return made
