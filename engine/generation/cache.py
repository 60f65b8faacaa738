"""The engine's KV cache: keys and values of every layer in memory that stays where it is, under one length for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

LAUNCH_BYTES = {"cpu": 1 << 15, "cuda": 1 << 25}  # what is cleared in the time that one more launch takes, about


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: heads, the sizes of a key and of a value, and their dtypes."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype


class Layer(StaticLayer):
    """Keys and values [rows, heads, slots, size] of one layer.

    What is new is written behind the `length` tokens (int64, no dimensions) that all layers hold. Nothing here advances it: whoever runs
    the model does, once for all layers, and may run more rows of a prompt than count.

    Layers with a sliding window are no exception: masks count slots, and here every slot has its place.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, length
        self.device, self.batch_size, self.num_heads = keys.device, *keys.shape[:2]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens [rows, heads, new, size]; returns all slots, those behind the new ones included."""
        places = torch.arange(key_states.shape[2], device=key_states.device) + self.cumulative_length
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(slots, the first slot): masks are made for all of them."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Tensor:
        """Tokens held before the call of the model that is under way."""
        return self.cumulative_length


class KeyValueStore:
    """The memory of the engine's caches. It grows with the batch and with the tokens that are asked for, and is used again by every call.

    `length` counts the tokens of every row, on the device. `bytes_a_token`: of one row, in all layers.
    """

    def __init__(self, shapes: Sequence[LayerShape], device: torch.device) -> None:
        self.shapes = tuple(shapes)
        self.device = device
        self.rows = self.slots = 0
        self.grown = 0  # how often the memory has moved
        self.written = 0  # slots of a row that calls may have written to since then
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.bytes_a_token = sum(
            shape.heads * (shape.key_size * shape.key_dtype.itemsize + shape.value_size * shape.value_dtype.itemsize)
            for shape in self.shapes
        )
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._caches: dict[int, tuple[Cache, list[Tensor]]] = {}
        self._dirty: tuple[tuple[int, int], list[Tensor]] = (0, 0), []  # (rows, slots), and these parts of all tensors

    def cache(self, rows: int, slots: int) -> Cache:
        """A cache of `rows` rows with room for at least `slots` tokens each, emptied. It may have moved if it had to grow."""
        cache = self.cleaned(rows, slots)
        self.length.zero_()
        return cache

    def cleaned(self, rows: int, slots: int) -> Cache:
        """The same, with its length left for the caller to set."""
        if rows > self.rows or slots > self.slots:
            self._grow(max(rows, self.rows), max(slots, self.slots))
        if rows not in self._caches:
            made = Cache(layers=[Layer(keys[:rows], values[:rows], self.length) for keys, values in self._memory])
            self._caches[rows] = made, [tensor for layer in made.layers for tensor in (layer.keys, layer.values)]
        cache, tensors = self._caches[rows]
        if self.written:
            self._clean(rows, tensors)
        return cache

    def _clean(self, rows: int, tensors: list[Tensor]) -> None:
        """Slots that no query sees have weight 0, and 0 times what an overflow may have left there is not 0."""
        spared = self.bytes_a_token * rows * (self.slots - self.written) / len(tensors)  # of each, by leaving out what is clean
        if spared >= LAUNCH_BYTES["cuda" if self.device.type == "cuda" else "cpu"]:  # otherwise one launch for all is less
            if self._dirty[0] != (rows, self.written):
                self._dirty = (rows, self.written), [tensor[:, :, : self.written] for tensor in tensors]
            tensors = self._dirty[1]
        torch._foreach_zero_(tensors)

    def _grow(self, rows: int, slots: int) -> None:
        self._memory, self._caches, self._dirty = [], {}, ((0, 0), [])  # given back before the larger one is asked for
        self.rows = self.slots = self.written = 0
        for shape in self.shapes:
            keys = torch.zeros(rows, shape.heads, slots, shape.key_size, dtype=shape.key_dtype, device=self.device)
            values = torch.zeros(rows, shape.heads, slots, shape.value_size, dtype=shape.value_dtype, device=self.device)
            self._memory.append((keys, values))
        self.rows, self.slots = rows, slots
        self.grown += 1


def take_over(cache: Cache, theirs: Cache, tokens: int, place: int = 0) -> None:
    """Copy the `tokens` tokens of a caller's cache into the engine's, the first one to slot `place`. What a sliding window has let go of
    stays empty: no query sees it."""
    for ours, layer in zip(cache.layers, theirs.layers, strict=True):
        first = place + tokens - layer.keys.shape[2]
        ours.keys[:, :, first : place + tokens].copy_(layer.keys)
        ours.values[:, :, first : place + tokens].copy_(layer.values)


def hand_over(cache: Cache, theirs: Cache, first: int, end: int, place: int = 0) -> Cache:
    """Append tokens `first` to `end` - 1 of the engine's cache, whose token 0 is in slot `place`, to a caller's; returns the latter."""
    for number, layer in enumerate(cache.layers):
        keys, values = (states[:, :, place + first : place + end].clone() for states in (layer.keys, layer.values))
        theirs.update(keys, values, number)
    return theirs


def is_growing(cache: Any) -> bool:
    """Whether `cache` is transformers' own growing cache, which can be taken over and added to."""
    return type(cache) is DynamicCache and not cache.offloading and all(type(layer) in _GROWING for layer in cache.layers)


_GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
