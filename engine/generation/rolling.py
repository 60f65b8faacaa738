"""A cache whose newest token lies in its last slot: what transformers' growing cache looks like when its shape may not change.

A model may count keys from the end of what its cache returns (GPT-Neo's local attention does), take its positions from how many there are,
or decide by that number on the host. With a cache that has free slots behind the newest token, each of these goes wrong. Here the model is
handed transformers' own growing cache, with as many tokens in it as leave room for the new ones; the oldest of them are padding, as in a
batch of prompts that are padded in front. So sizes never change, and whatever is right for such a batch is right.

The price is that keys and values move by one slot a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


def opened(cache: Cache, new: int) -> DynamicCache:
    """transformers' growing cache over the slots of `cache` that stay when `new` tokens come."""
    made = DynamicCache()
    made.layers = [_holding(layer.keys[:, :, new:], layer.values[:, :, new:]) for layer in cache.layers]
    return made


def close(cache: Cache, grown: DynamicCache) -> None:
    """Take what a call of the model has left in `grown` into `cache`."""
    for ours, layer in zip(cache.layers, grown.layers, strict=True):
        ours.keys.copy_(layer.keys)
        ours.values.copy_(layer.values)


def mask_of_slots(mask: Tensor, total: Tensor) -> Tensor:
    """The mask [rows, slots] of slots, of which the last holds token number `total` - 1; mask [rows, slots]: that of tokens."""
    slots = mask.shape[1]
    token = torch.arange(slots, device=mask.device) - (slots - total)
    return torch.where(token >= 0, mask.index_select(1, token.clamp(min=0)), 0)


def _holding(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer
