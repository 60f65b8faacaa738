"""A decoder behind an encoder as the engine's loop calls it, and how that is found out: by running a few tokens on made-up states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .cache import KeyValueStore, LayerShape
from .decoder import Decoder, NotOurs
from .source import Joint, SourceShape, SourceStore
from .tables import described
from .trial import TOLERANCES

ROWS, TOKENS, PLACES, PADDING = 2, 6, 5, 2  # of the trial; PADDING: places at the end of the second row's source


@dataclass(frozen=True)
class Seq2Seq(Decoder):
    """A model with an encoder, called with the encoder's states. Positions and the mask of its own tokens are the model's affair: it counts
    what its cache holds, and no token is padding."""

    source: SourceShape | None = None

    def reads(self, states: Tensor) -> bool:
        """Whether encoder states [rows, places, width] are such as the model reads."""
        return self.source is not None and (states.shape[2], states.dtype) == (self.source.width, self.source.dtype)

    def arguments(self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Any, keep: Tensor | None) -> dict[str, Any]:
        """Arguments of the model's forward for ids [rows, new], with a `Behind` for a cache."""
        states, hides = BaseModelOutput(last_hidden_state=cache.states), cache.mask
        joint = Joint(cache.own, cache.cross, cache.written)
        given: dict[str, Any] = {"decoder_input_ids": ids, "encoder_outputs": states, self.cache_name: joint, "use_cache": True}
        if hides is not None:
            given["attention_mask"] = hides
        if self.keeps and keep is not None:
            given["logits_to_keep"] = keep
        return given


def states_of(outputs: Any) -> Tensor:
    """The encoder's states [rows, n, width] in what a call of it returned. Raises `NotOurs` where a decoder may read more than those."""
    found = getattr(outputs, "last_hidden_state", None)
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[1] == 0:
        raise NotOurs("the encoder's output holds no states [rows, places, width]")
    if others := [name for name, value in outputs.items() if value is not None and name not in _TOLD]:
        raise NotOurs(f"the encoder's output holds {others[0]!r}, which the decoder may read")
    return found


_TOLD = ("last_hidden_state", "hidden_states", "attentions")  # the last two are for the caller


@torch.no_grad()
def behind_encoder(draft: Seq2Seq, states: Tensor) -> Seq2Seq:
    """`draft` with what its layers keep of a token and of a source, for encoder states such as `states`. Raises `NotOurs` for a model that
    is not right with the engine's caches, and whatever its code does.

    Two rows of six tokens and five places: what is true of positions and masks at any length shows in them.
    """
    device = states.device
    made = torch.arange(ROWS * PLACES * states.shape[2], device=device).reshape(ROWS, PLACES, -1)
    made = (made * 12.9898).sin().to(states.dtype)
    ids = _ids(draft.model, device)
    own, cross = _kept(draft, ids, made)
    decoder = replace(draft, layers=own, source=SourceShape(states.shape[2], states.dtype, cross, True))
    mask = torch.ones(ROWS, PLACES, dtype=torch.int64, device=device)
    mask[1, PLACES - PADDING :] = 0
    if not (wrong := _difference(decoder, ids, made, mask)):
        return decoder
    name = type(draft.model).__name__
    whole, hidden = (draft.model(**_alone(ids, made), attention_mask=part).logits for part in (None, mask))
    if not torch.equal(whole, hidden):
        raise NotOurs(f"{name} computes something else with a source that is padded ({wrong})")
    assert decoder.source is not None
    decoder = replace(decoder, source=replace(decoder.source, masked=False))
    if wrong := _difference(decoder, ids, made, None):
        raise NotOurs(f"{name} computes something else with a cache whose sizes do not change ({wrong})")
    return decoder


def _alone(ids: Tensor, states: Tensor) -> dict[str, Any]:
    return {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states), "use_cache": False}


def _kept(draft: Seq2Seq, ids: Tensor, states: Tensor) -> tuple[tuple[LayerShape, ...], tuple[LayerShape, ...]]:
    """What each layer keeps of its own tokens, and what of the source."""
    caches = DynamicCache(), DynamicCache()
    draft.model(**{**_alone(ids, states), "use_cache": True, draft.cache_name: EncoderDecoderCache(*caches)})
    own, cross = (tuple(_shape(layer, n) for layer in cache.layers) for cache, n in zip(caches, (TOKENS, PLACES), strict=True))
    if not own or len(own) != len(cross):
        raise NotOurs(f"{len(own)} layers keep their tokens, and {len(cross)} the source")
    return own, cross


def _shape(layer: Any, n: int) -> LayerShape:
    keys, values = layer.keys, layer.values
    for states in (keys, values):
        if not isinstance(states, Tensor) or states.dim() != 4 or (states.shape[0], states.shape[2]) != (ROWS, n):
            raise NotOurs(f"a layer keeps {tuple(getattr(states, 'shape', ()))} of {ROWS} rows of {n}, no [rows, heads, tokens, size]")
    if keys.shape[1] != values.shape[1]:
        raise NotOurs(f"a layer has {keys.shape[1]} heads of keys and {values.shape[1]} of values")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)


def _difference(decoder: Seq2Seq, ids: Tensor, states: Tensor, mask: Tensor | None) -> str:
    """ "" where the logits behind each row's tokens are those without a cache and without padding, else by how much they are off.
    Where masks hide places, no mask must be one that hides nothing."""
    assert decoder.source is not None
    device = states.device
    own = KeyValueStore(decoder.layers, device).cache(ROWS, TOKENS + 3)
    prompt, step = SourceStore(decoder.source, device).hold(own, states, mask)
    length: Tensor = own.layers[0].cumulative_length
    for first, end, behind in ((0, TOKENS - 2, prompt), (TOKENS - 2, TOKENS - 1, step), (TOKENS - 1, TOKENS, step)):
        fed = torch.tensor(end - first, device=device)
        logits = decoder.logits(ids[:, first:end], None, None, behind, fed, torch.tensor([end - first - 1], device=device))
        length.add_(fed)
    for row in range(ROWS):
        n = PLACES if mask is None else int(mask[row].sum())
        for seen in (None, *(() if mask is None else (mask[row : row + 1, :n],))):
            alone = decoder.model(**_alone(ids[row : row + 1], states[row : row + 1, :n]), attention_mask=seen).logits[0, -1].float()
            off = ((logits[row, -1].float() - alone).norm() / alone.norm()).item()
            if not off <= TOLERANCES.get(states.dtype, 1e-1):
                return f"its logits are off by {off:.1%}"
    return ""


def _ids(model: Any, device: torch.device) -> Tensor:
    """Tokens [rows, tokens] of the decoder, none of them padding: there are models that count no position for that."""
    tables = [part.get_input_embeddings() for part in (model, model.get_decoder())]
    vocabulary = min(described(table).rows for table in tables)  # a decoder may have a table of its own
    ids = (torch.arange(ROWS * TOKENS, device=device).reshape(ROWS, TOKENS) * 31 + 7) % vocabulary
    padding = getattr(model.config, "pad_token_id", None)
    return ids if padding is None else torch.where(ids == padding, (padding + 1) % vocabulary, ids)
