"""From what transformers' `generate` has prepared to a request for the engine's loop, or a sentence why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from .cache import is_growing
from .decoder import Decoder, NotOurs
from .sampling import Recipe, recipe
from .seq2seq import Seq2Seq, states_of

CACHE_NAMES = ("cache", "past_key_values")
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_NAMES}
KNOWN_BEHIND = {"attention_mask", "decoder_attention_mask", "encoder_outputs", "use_cache", "logits_to_keep", *CACHE_NAMES}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class Request:
    """One call of `generate`, prepared.

    `ids` [rows, n]: the sequence so far, of which the last `fed` tokens are not in the cache yet. `mask` [rows, past + fed]: 0 where a
    token is padding; None where none is. `positions` [rows or 1, fed], or None. `limit`: new tokens at most. `ends`: end-of-sequence
    tokens, or None. `past`: a caller's cache with `held` tokens. `criteria`: looked at after every token; (ids, None) -> [rows] bool.
    `source`: behind an encoder, its states [rows, n, width] and their mask [rows, n], None where it hides nothing.
    """

    ids: Tensor
    fed: int
    limit: int
    recipe: Recipe
    mask: Tensor | None = None
    positions: Tensor | None = None
    ends: Tensor | None = None
    pad: Tensor | int = 0
    past: Cache | None = None
    held: int = 0
    criteria: Callable[[Tensor, None], Tensor] | None = None
    streamer: Any = None
    source: tuple[Tensor, Tensor | None] | None = None

    @property
    def total(self) -> int:
        """Tokens of a row at most: those in the cache, those fed, and the new ones."""
        return self.held + self.fed + self.limit


def request_of(
    decoder: Decoder,
    device: torch.device,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **given: Any,
) -> Request:
    """The request for the arguments of transformers' `_sample`. Raises `NotOurs` where the loop would do something else, ValueError for a
    cache that does not fit the prompt."""
    config = generation_config
    _refuse_options(config, synced_gpus, device)
    input_ids = input_ids.to(torch.int64) if input_ids.dtype in (torch.int32, torch.int16) else input_ids
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.shape[1] == 0:
        raise NotOurs("the prompt holds no token ids")
    source = None
    for name, value in given.items():
        if value is not None and name not in (KNOWN_BEHIND if isinstance(decoder, Seq2Seq) else KNOWN):
            raise NotOurs(f"the model is given {name!r}")
    if isinstance(decoder, Seq2Seq):
        source = _source(given, decoder, device, input_ids)
        given = {}  # the rest is about the source
    past, held = _past(given, config, decoder, input_ids.shape[0])
    fed = _fed(input_ids, given.get("attention_mask"), config, held)
    limit, ends, others = _stops(stopping_criteria, input_ids.shape[1])
    _refuse_preparations(decoder, held, fed, limit)
    pad = config._pad_token_tensor
    return Request(
        ids=input_ids.to(device),
        fed=fed,
        limit=limit,
        recipe=recipe(logits_processor, config.do_sample),
        mask=_mask(given.get("attention_mask"), device, input_ids.shape[0], held + fed),
        positions=_positions(given.get("position_ids"), device, fed) if decoder.positions else None,
        ends=None if ends is None else ends.to(device, copy=True),  # copies: a request's tensors are its own
        pad=0 if pad is None else pad.to(device, copy=True),
        past=past,
        held=held,
        criteria=others or None,
        streamer=streamer,
        source=source,
    )


def _refuse_options(config: Any, synced_gpus: bool, device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        raise NotOurs("autocast is on")
    if synced_gpus:
        raise NotOurs("GPUs generate in step")
    if not config.use_cache:
        raise NotOurs("use_cache is off")
    if config.return_dict_in_generate and (asked := [name for name in OUTPUTS if getattr(config, name, None)]):
        raise NotOurs(f"{asked[0]} is on")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise NotOurs("prefill_chunk_size is given")
    if getattr(config, "is_assistant", False):
        raise NotOurs("the model assists another one")
    if config.cache_implementation not in (None, "dynamic", "static"):
        raise NotOurs(f"cache_implementation is {config.cache_implementation!r}")


def _refuse_preparations(decoder: Decoder, held: int, fed: int, limit: int) -> None:
    if not decoder.prepares.own:
        return
    for past, new in ((held, fed), *((held + fed + step, 1) for step in range(limit - 1))):
        if difference := decoder.prepares.differs(past, new):
            raise NotOurs(difference)


def _past(given: dict[str, Any], config: Any, decoder: Decoder, rows: int) -> tuple[Any, int]:
    """(the cache that transformers has made or the caller gave, or None; tokens in it)."""
    cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    if cache is None or (config.cache_implementation == "static" and not getattr(cache, "_is_user_defined", False)):
        return None, 0
    if not is_growing(cache):
        raise NotOurs(f"the cache is the caller's own {type(cache).__name__}")
    held = int(cache.get_seq_length())
    if held and len(cache.layers) != len(decoder.layers):
        raise NotOurs("the caller's cache is of another model")
    if held and (others := {layer.keys.shape[0] for layer in cache.layers} - {rows}):
        raise ValueError(f"dsi: the cache holds {others.pop()} rows, and the prompt has {rows}: give the cache of these rows, or none")
    return cache, held


def _source(given: dict[str, Any], decoder: Seq2Seq, device: torch.device, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """(the encoder's states, their mask or None)."""
    if any(getattr(given.get(name), "_is_user_defined", False) for name in CACHE_NAMES):
        raise NotOurs("the cache is the caller's own, behind an encoder")
    own = given.get("decoder_attention_mask")
    if own is not None and (own.shape != ids.shape or not bool((own == 1).all())):
        raise NotOurs("a mask hides tokens of the decoder")
    states, shape = states_of(given.get("encoder_outputs")), decoder.source
    assert shape is not None
    if (states.shape[0], states.shape[2], states.dtype) != (ids.shape[0], shape.width, shape.dtype):
        expected = f"[{ids.shape[0]}, places, {shape.width}] in {shape.dtype}"
        raise NotOurs(f"the encoder's states are {list(states.shape)} in {states.dtype}, not {expected}")
    mask = given.get("attention_mask") if shape.masked else None
    if mask is not None and mask.shape != states.shape[:2]:
        raise NotOurs(f"the attention mask is {tuple(mask.shape)}, and the encoder's states {tuple(states.shape)}")
    if mask is not None and not bool((mask != 0).any(1).all()):  # what it reads then is a matter of how attention is computed
        raise NotOurs("there is a row whose source is hidden as a whole")
    return states.to(device), None if mask is None else mask.to(device)


def _fed(ids: Tensor, mask: Tensor | None, config: Any, held: int) -> int:
    """How many tokens at the end of `ids` the cache does not hold: all, or those behind it where `ids` starts with what it holds.

    The mask's length tells, as it does for transformers.
    """
    n = ids.shape[1]
    covered = mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)
    fed = n - held if held and covered == n else n
    if fed < 1:
        raise ValueError(
            f"dsi: {n} tokens are given, and the cache holds {held}: give the whole text, with at least one token behind what is held"
        )
    return fed


def _mask(mask: Tensor | None, device: torch.device, rows: int, tokens: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() != 2 or tuple(mask.shape) != (rows, tokens):
        raise NotOurs(f"the attention mask is {tuple(mask.shape)}, not {(rows, tokens)}")
    seen = mask.to(device) != 0  # as transformers reads it, whatever its dtype
    return None if rows == 1 and bool(seen.all()) else seen


def _positions(positions: Tensor | None, device: torch.device, fed: int) -> Tensor:
    if positions is None or positions.dim() != 2 or positions.shape[1] < fed:
        raise NotOurs("positions are not [rows, tokens]")
    return positions[:, -fed:].to(device)


def _stops(criteria: Any, n: int) -> tuple[int, Tensor | None, Any]:
    """(new tokens at most, end-of-sequence tokens or None, all other criteria)."""
    limit, ends, others = None, None, StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limit = max(1, criterion.max_length - n)
        elif type(criterion) is EosTokenCriteria:
            ends = criterion.eos_token_id.reshape(-1)
        elif hasattr(criterion, "eos_token_id"):
            raise NotOurs(f"{type(criterion).__name__} has end-of-sequence tokens of its own")
        else:
            others.append(criterion)
    if limit is None:
        raise NotOurs("no length is the longest")
    return limit, ends, others
