"""What the engine's loop has to know of a model, found out from the model: its arguments, and what its layers keep of a token."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.utils import GenerationMixin

from .cache import LayerShape

ROWS, NEW, SLOTS = 2, 3, 5  # of the trial call: all different from each other and from 1

# Where a class has one of these of its own, generating with it is more than calling its forward on ids, positions and a mask.
HOOKS = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class NotOurs(Exception):
    """The engine's loop does not do this; transformers' loop does. Says why, in a sentence."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only model as the loop calls it.

    `cache_name`: the argument that takes a cache (`cache`, or `past_key_values` before transformers 5.20 or so). `positions`, `keeps`:
    whether forward takes position_ids and logits_to_keep. `always_masked`: whether it must be given a mask where nothing is padded.
    """

    model: nn.Module
    layers: tuple[LayerShape, ...]
    cache_name: str
    positions: bool
    keeps: bool
    always_masked: bool

    def arguments(self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Cache, keep: Tensor | None) -> dict[str, Any]:
        """Arguments of the model's forward for ids [rows, new]; positions [rows, new] and mask [rows, slots] where it takes them."""
        given: dict[str, Any] = {"input_ids": ids, self.cache_name: cache, "use_cache": True}
        if self.positions:
            given["position_ids"] = positions
        if mask is not None:
            given["attention_mask"] = mask
        if self.keeps and keep is not None:
            given["logits_to_keep"] = keep
        return given


def examine(model: Any) -> Decoder:
    """The model as the loop calls it. Raises `NotOurs` for one that the loop cannot run."""
    name = type(model).__name__
    if not isinstance(model, GenerationMixin):
        raise NotOurs(f"{name} is no transformers model that generates")
    if model.config.is_encoder_decoder:
        raise NotOurs(f"{name} has an encoder and a decoder")
    if getattr(model, "_is_stateful", False):
        raise NotOurs(f"{name} keeps a state that is no KV cache")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise NotOurs(f"transformers says of {name} that it is not right with a cache of fixed size")
    for hook in HOOKS:
        if getattr(type(model), hook, None) is not getattr(GenerationMixin, hook, None):
            raise NotOurs(f"{name} has a {hook} of its own")
    number = _layers(model.config.get_text_config(decoder=True))
    accepted = inspect.signature(model.forward).parameters
    cache_name = next((argument for argument in ("cache", "past_key_values") if argument in accepted), None)
    if cache_name is None or "attention_mask" not in accepted:
        raise NotOurs(f"the forward of {name} takes no cache, or no attention mask")
    problem: Exception | None = None
    for masked in (False, True):
        draft = Decoder(model, (), cache_name, "position_ids" in accepted, "logits_to_keep" in accepted, masked)
        try:
            return dataclasses.replace(draft, layers=_trial(draft, number))
        except NotOurs:
            raise
        except Exception as error:  # whatever the model's code raises where it looks at numbers that a compiled graph does not have
            problem = error
    first = str(problem).strip().splitlines()[0] if str(problem).strip() else ""
    raise NotOurs(f"a trial call of {name} with a cache of fixed size failed: {type(problem).__name__}: {first}")


def position_limit(model: Any, config: Any) -> int | None:
    """How many positions a table of the model has; None where positions are computed (rotary ones, slopes).

    A table is an embedding other than the input's, or a buffer, as long as the configuration says that positions are: a few rows longer
    where some are reserved.
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    lengths = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding) and part is not inputs]
    lengths += [size for buffer in model.buffers() for size in buffer.shape if buffer.dim() >= 2]
    return most if any(most <= length <= most + 8 for length in lengths) else None


def _layers(config: Any) -> int:
    """The number of layers, all of which must keep keys and values and nothing else."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise NotOurs(f"some layers are of the kind {', '.join(sorted(other))}")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotOurs("attention is in chunks")
    layers = StaticCache(config=config, max_cache_len=SLOTS).layers
    for number, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise NotOurs(f"layer {number} keeps more than keys and values ({type(layer).__name__})")
    return len(layers)


class _Looking(StaticLayer):
    """Notes what a layer is given, and keeps nothing."""

    def __init__(self, length: Tensor) -> None:
        super().__init__(max_cache_len=SLOTS)
        self.cumulative_length = length
        self.is_initialized = True
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen.append((key_states, value_states))
        sizes = [(ROWS, states.shape[1], SLOTS, states.shape[3]) for states in (key_states, value_states)]
        return key_states.new_empty(sizes[0]), value_states.new_empty(sizes[1])


def _trial(decoder: Decoder, number: int) -> tuple[LayerShape, ...]:
    """What each layer keeps, from one call on tensors without contents. Nothing is computed, and the model is not touched: its code runs
    on a copy that shares the weights."""
    tensors = [*decoder.model.parameters(), *decoder.model.buffers()]
    twin = copy.deepcopy(decoder.model, {id(tensor): tensor for tensor in tensors})
    device = tensors[0].device if tensors else torch.device("cpu")
    with _quiet(), torch.no_grad(), torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(ROWS, NEW, dtype=torch.int64, device=device)
        mask = torch.ones(ROWS, SLOTS, dtype=torch.int64, device=device) if decoder.always_masked else None
        cache = Cache(layers=[_Looking(torch.zeros((), dtype=torch.int64, device=device)) for _ in range(number)])
        twin(**decoder.arguments(ids, ids, mask, cache, None))
    return tuple(_shape(layer, place) for place, layer in enumerate(cache.layers))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within: torch does not log operators that fail on tensors without contents. What fails here is no news."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _shape(layer: _Looking, number: int) -> LayerShape:
    if len(layer.seen) != 1:
        raise NotOurs(f"layer {number} writes to its cache {len(layer.seen)} times in a call")
    keys, values = layer.seen[0]
    for states in (keys, values):
        if states.dim() != 4 or (states.shape[0], states.shape[2]) != (ROWS, NEW):
            raise NotOurs(f"layer {number} keeps {tuple(states.shape)} of {ROWS} rows of {NEW} tokens, no [rows, heads, tokens, size]")
    if keys.device != layer.cumulative_length.device:
        raise NotOurs(f"layer {number} is on {keys.device}, and the model starts on {layer.cumulative_length.device}")
    if keys.shape[1] != values.shape[1]:
        raise NotOurs(f"layer {number} has {keys.shape[1]} heads of keys and {values.shape[1]} of values")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
