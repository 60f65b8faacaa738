"""A decoder-only model as the engine's loop calls it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .cache import LayerShape
from .hooks import Preparation
from .rolling import close, mask_of_slots, opened


class NotOurs(Exception):
    """The engine's loop does not do this; transformers' loop does. Says why, in a sentence."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only model as the loop calls it.

    `cache_name`: the argument that takes a cache (`cache`, or `past_key_values` before transformers 5.20 or so). `positions`, `keeps`:
    whether forward takes position_ids and logits_to_keep. `always_masked`: whether it must be given a mask where nothing is padded.
    `rolls`: whether it must find the newest token in the last slot of its cache (rolling.py). `prepares`: its own preparation of inputs.
    """

    model: nn.Module
    layers: tuple[LayerShape, ...]
    cache_name: str
    positions: bool
    keeps: bool
    always_masked: bool
    rolls: bool
    prepares: Preparation

    def arguments(self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Any, keep: Tensor | None) -> dict[str, Any]:
        """Arguments of the model's forward for ids [rows, new]; positions [rows, new] and mask [rows, slots] where it takes them."""
        given: dict[str, Any] = {"input_ids": ids, self.cache_name: cache, "use_cache": True}
        if self.positions:
            given["position_ids"] = positions
        if mask is not None:
            given["attention_mask"] = mask
        if self.keeps and keep is not None:
            given["logits_to_keep"] = keep
        return given

    def reads(self, states: Tensor) -> bool:
        """Whether encoder states [rows, places, width] are such as the model reads."""
        return False

    def decoding(self) -> contextlib.AbstractContextManager[Any]:
        """Within: experts are computed as transformers has them computed for a few tokens at a time, without a look at the host."""
        optimised = getattr(self.model, "_optimize_model_for_decode", contextlib.nullcontext)
        within: contextlib.AbstractContextManager[Any] = optimised()
        return within

    def logits(self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Any, fed: Tensor, keep: Tensor | None) -> Tensor:
        """Logits [rows, new or 1, vocabulary] behind ids [rows, new], of which the `fed` [] last are tokens if the model rolls, the first
        ones otherwise. mask [rows, slots]: of tokens. `cache` is the engine's; what is new is written to it. Traced as it is."""
        if not self.rolls:
            made: Tensor = self.model(**self.arguments(ids, positions, mask, cache, keep)).logits
            return made
        assert mask is not None
        grown = opened(cache, ids.shape[1])
        mask = mask_of_slots(mask, cache.layers[0].cumulative_length + fed)
        made = self.model(**self.arguments(ids, positions, mask, grown, keep)).logits
        close(cache, grown)
        return made
