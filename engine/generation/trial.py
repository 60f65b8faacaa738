"""Calls of a model that find out what its layers keep of a token, and whether they are right with the engine's cache."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from .cache import KeyValueStore, LayerShape
from .decoder import Decoder, NotOurs
from .tables import described

ROWS, NEW, SLOTS = 2, 3, 5  # of the trial call: all different from each other and from 1


class _Looking(StaticLayer):
    """Notes what a layer is given, and keeps nothing."""

    def __init__(self, length: Tensor) -> None:
        super().__init__(max_cache_len=SLOTS)
        self.cumulative_length = length
        self.is_initialized = True
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _note(self.seen, key_states, value_states)


class _LookingGrowing(DynamicLayer):
    """The same, as a layer of a cache that grows from SLOTS - NEW to SLOTS tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _note(self.seen, key_states, value_states)

    def get_seq_length(self) -> int:
        return SLOTS if self.seen else SLOTS - NEW


def _note(seen: list[tuple[Tensor, Tensor]], key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
    seen.append((key_states, value_states))
    sizes = [(ROWS, states.shape[1], SLOTS, states.shape[3]) for states in (key_states, value_states)]
    return key_states.new_empty(sizes[0]), value_states.new_empty(sizes[1])


def trial(decoder: Decoder, number: int) -> tuple[LayerShape, ...]:
    """What each of the `number` layers keeps, from one call on tensors without contents. Nothing is computed, and the model is not
    touched: its code runs on a copy that shares the weights. Raises `NotOurs`, and whatever the model's code does."""
    tensors = [*decoder.model.parameters(), *decoder.model.buffers()]
    twin = copy.deepcopy(decoder.model, {id(tensor): tensor for tensor in tensors})
    _experts_without_contents(twin)
    device = tensors[0].device if tensors else torch.device("cpu")
    with torch.no_grad(), torch.inference_mode(False), _without_contents():
        ids = torch.zeros(ROWS, NEW, dtype=torch.int64, device=device)
        mask = torch.ones(ROWS, SLOTS, dtype=torch.int64, device=device) if decoder.always_masked else None
        layers: list[Any]
        if decoder.rolls:
            cache: Cache = DynamicCache()
            cache.layers = layers = [_LookingGrowing() for _ in range(number)]
        else:
            layers = [_Looking(torch.zeros((), dtype=torch.int64, device=device)) for _ in range(number)]
            cache = Cache(layers=layers)
        twin(**decoder.arguments(ids, ids, mask, cache, None))
    return tuple(_shape(layer.seen, place, device) for place, layer in enumerate(layers))


def _experts_without_contents(model: Any) -> None:
    """Have experts computed in a way that needs no numbers, as `torch.compile` will: the grouped product of torch refuses float32 where it
    is tried without contents, and transformers puts another in its place when it is compiled."""
    if "grouped_mm" in getattr(model, "get_experts_implementation", dict)().values():
        model.set_experts_implementation("batched_mm")


@contextlib.contextmanager
def _without_contents() -> Iterator[None]:
    """Within: tensors have no contents. What a model compiles by itself runs uncompiled, as a kernel would read memory that is not there,
    and torch does not log operators that fail: what fails here is no news."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        log.disabled = before


def _shape(seen: list[tuple[Tensor, Tensor]], number: int, device: torch.device) -> LayerShape:
    if len(seen) != 1:
        raise NotOurs(f"layer {number} writes to its cache {len(seen)} times in a call")
    keys, values = seen[0]
    for states in (keys, values):
        if states.dim() != 4 or (states.shape[0], states.shape[2]) != (ROWS, NEW):
            raise NotOurs(f"layer {number} keeps {tuple(states.shape)} of {ROWS} rows of {NEW} tokens, no [rows, heads, tokens, size]")
    if keys.device != device:
        raise NotOurs(f"layer {number} is on {keys.device}, and the model starts on {device}")
    if keys.shape[1] != values.shape[1]:
        raise NotOurs(f"layer {number} has {keys.shape[1]} heads of keys and {values.shape[1]} of values")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)


# ------------------------------------------------------------------------------------------------------------------- on numbers

TOKENS, PADDING = 6, 2  # of the two rows that are compared; the second one is padded in front
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of a row's logits, relative


@torch.no_grad()
def compare_with_no_cache(decoder: Decoder) -> None:
    """Run the model itself on a few tokens, with the engine's cache and without one. Raises `NotOurs` where the logits differ.

    Two rows of six tokens: what is true of the model's positions and masks at any length shows in them.
    """
    model = decoder.model
    embeddings = described(model.get_input_embeddings())  # type: ignore[operator]
    device = embeddings.device
    ids = (torch.arange(ROWS * TOKENS, device=device).reshape(ROWS, TOKENS) * 31 + 7) % embeddings.rows
    mask = torch.ones(ROWS, TOKENS + 3, dtype=torch.int64, device=device)
    mask[1, :PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KeyValueStore(decoder.layers, device).cache(ROWS, TOKENS + 3)
    length = cache.layers[0].cumulative_length
    for first, end in ((0, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)):
        fed = torch.tensor(end - first, device=device)
        keep = torch.tensor([end - first - 1], device=device)
        logits = decoder.logits(ids[:, first:end], positions[:, first:end], mask, cache, fed, keep)
        length.add_(fed)
    for row, skipped in enumerate((0, PADDING)):
        alone: Tensor = model(input_ids=ids[row : row + 1, skipped:], use_cache=False).logits[0, -1].float()
        difference = ((logits[row, -1].float() - alone).norm() / alone.norm()).item()
        if not difference <= TOLERANCES.get(embeddings.dtype, 1e-1):
            what = "a batch padded in front" if skipped else "a cache whose sizes do not change"
            raise NotOurs(f"{type(model).__name__} computes something else with {what} (its logits are off by {difference:.1%})")


def first_line(error: BaseException) -> str:
    """The first line of what an error says, "" where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else ""
