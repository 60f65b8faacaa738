"""What a decoder reads of its encoder: states, keys and values of every layer's cross-attention, in memory that stays where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticLayer

from .buckets import SMALLEST_CACHE, power_of_two, prompt_bucket
from .cache import LayerShape, hand_over


@dataclass(frozen=True)
class SourceShape:
    """What one place of a source is to a decoder: encoder states of `width` numbers, and what each layer keeps of them.

    `masked`: whether a mask hides places from the decoder, so that a source may be padded; a mask changes nothing otherwise.
    """

    width: int
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    masked: bool


class CrossLayer(StaticLayer):
    """Keys and values [rows, heads, places, size] of one layer's cross-attention."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values = keys, values
        self.device, self.batch_size, self.num_heads = keys.device, *keys.shape[:2]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the whole source [rows, heads, n, size], n places at most; returns those: all that its states have."""
        places = torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Places, those of padding included."""
        return int(self.keys.shape[2])


class Joint(EncoderDecoderCache):
    """transformers' pair of caches, made where it is used: a model notes in it that it has `written` the cross-attention's part."""

    def __init__(self, own: Cache, cross: Cache, written: bool) -> None:
        # Not the base's: that looks at lengths on the host.
        self.self_attention_cache, self.cross_attention_cache = own, cross
        self.is_updated = dict.fromkeys(range(len(cross.layers)), written)


@dataclass
class Behind:
    """The engine's cache as a decoder behind an encoder needs it: `own` tokens' keys and values, and what is read of the source.

    `states` [rows, places, width] and `mask` [rows, places], or None, are the encoder's. Where the keys and values in `cross` are
    `written`, only the number of places is read of `states`.
    """

    own: Cache
    cross: Cache
    states: Tensor
    mask: Tensor | None
    written: bool

    def handed_over(self, tokens: int, places: int) -> EncoderDecoderCache:
        """Copies of the first `tokens` tokens and `places` places, as transformers keeps them."""
        return EncoderDecoderCache(hand_over(self.own, DynamicCache(), 0, tokens), hand_over(self.cross, DynamicCache(), 0, places))


class SourceStore:
    """The memory for sources. It grows with the rows and the places that are asked for, and is used again by every call.

    A source that can be masked is padded: for the prompt's step to a bucket, for decode steps to all places, so that one graph each
    serves all lengths. Any other has exactly as many places as it needs.
    """

    def __init__(self, shape: SourceShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.rows = self.places = 0
        self.grown = 0  # how often the memory has moved
        self._written = 0  # places that calls may have written to since then
        self._states: Any = None  # a tensor [rows, places, width] once there was a source
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, Tensor] = {}
        self._crosses: dict[int, Cache] = {}

    def hold(self, own: Cache, states: Tensor, mask: Tensor | None) -> tuple[Behind, Behind]:
        """Take encoder states [rows, n, width] and their mask [rows, n], None where nothing is hidden. Returns what the prompt's step runs
        with, beside the cache `own`, and what each decode step does."""
        rows, n, _ = states.shape
        masked = self.shape.masked
        # What is not masked has no padding, and no room for more.
        if rows > self.rows or (n > self.places if masked else n != self.places):
            self._make_room(rows, n)
        bucket = prompt_bucket(max(n, 2), self.places) if masked else n  # one place would be a graph of its own
        fed, hides = self._part(rows, bucket)
        fed[:, :n].copy_(states)
        fed[:, n:].zero_()
        if self._written > bucket:  # hidden places have weight 0, and 0 times what an overflow may have left there is not 0
            torch._foreach_zero_([tensor[:, :, bucket : self._written] for pair in self._memory for tensor in pair])
        self._written = bucket
        cross = self._cross(rows)
        every = self._states.view(-1)[: rows * self.places * self.shape.width].view(rows, self.places, self.shape.width)
        if not masked:
            return Behind(own, cross, fed, None, False), Behind(own, cross, every, None, True)
        seen = self._mask(rows)
        for kept in (hides, seen):
            kept.zero_()
            kept[:, :n] = 1 if mask is None else mask != 0
        return Behind(own, cross, fed, hides, False), Behind(own, cross, every, seen, True)

    def _part(self, rows: int, places: int) -> tuple[Tensor, Tensor]:
        """States [rows, places, width] and a mask [rows, places] for a prompt's step: of one memory for all sizes."""
        if (rows, places) not in self._parts:
            width = self.shape.width
            states = self._states.view(-1)[: rows * places * width].view(rows, places, width)
            mask = torch.zeros(rows, places, dtype=torch.int64, device=self.device)
            if self.shape.masked:  # one graph for all lengths
                torch._dynamo.maybe_mark_dynamic(states, 1)
                torch._dynamo.maybe_mark_dynamic(mask, 1)
            self._parts[rows, places] = states, mask
        return self._parts[rows, places]

    def _mask(self, rows: int) -> Tensor:
        """Which of all places are seen, for decode steps: int64 [rows, places]."""
        if rows not in self._masks:
            self._masks[rows] = torch.zeros(rows, self.places, dtype=torch.int64, device=self.device)
        return self._masks[rows]

    def _cross(self, rows: int) -> Cache:
        if rows not in self._crosses:
            self._crosses[rows] = Cache(layers=[CrossLayer(keys[:rows], values[:rows]) for keys, values in self._memory])
        return self._crosses[rows]

    def _make_room(self, rows: int, n: int) -> None:
        """Grow, so that calls with as many rows, or as long sources, as there have been fit as well, if the memory is there."""
        least = max(power_of_two(n), SMALLEST_CACHE) if self.shape.masked else n
        most = max(least, self.places) if self.shape.masked else n
        reason = ""
        for size in ((max(rows, self.rows), most), (rows, least)):
            try:
                return self._grow(*size)
            except RuntimeError as error:  # what running out of memory is, on every device
                reason = str(error)
        self._memory, self._states = [], None
        raise RuntimeError(f"dsi: {self.device} has no memory to keep a source of {rows} rows of {n} places: give fewer rows ({reason})")

    def _grow(self, rows: int, places: int) -> None:
        # Given back before the larger one is asked for.
        self._memory, self._parts, self._masks, self._crosses, self._states = [], {}, {}, {}, None
        self.rows = self.places = self._written = 0
        self._states = torch.zeros(rows, places, self.shape.width, dtype=self.shape.dtype, device=self.device)
        for layer in self.shape.layers:
            keys = torch.zeros(rows, layer.heads, places, layer.key_size, dtype=layer.key_dtype, device=self.device)
            values = torch.zeros(rows, layer.heads, places, layer.value_size, dtype=layer.value_dtype, device=self.device)
            self._memory.append((keys, values))
        self.rows, self.places = rows, places
        self.grown += 1
