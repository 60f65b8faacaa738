"""Encoders and decoders behind them in transformers' loops: one graph for all lengths of source and text, from the first call on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import ModelOutput


def for_all_lengths(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, compiled, for which one graph serves token ids and masks [rows, tokens] of all lengths."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*map(_marked, args), **of_any_length(kwargs))

    return call


def of_any_length(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward with what has a length marked as of any: token ids, masks, an encoder's states, and growing caches."""
    return {name: _marked(value) for name, value in given.items()}


def _marked(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dim() != 2 or value.is_floating_point():
            return value
        return _mark(value.detach(), 1)  # the caller's own stays as it is
    if isinstance(value, ModelOutput) and isinstance(states := value.get("last_hidden_state"), Tensor) and states.dim() == 3:
        _mark(states, 1)
    elif isinstance(value, EncoderDecoderCache):
        for layer in (*value.self_attention_cache.layers, *value.cross_attention_cache.layers):
            for part in (layer.keys, layer.values):
                if isinstance(part, Tensor) and part.dim() == 4 and not layer.is_compileable:
                    _mark(part, 2)
    return value


def _mark(value: Tensor, dimension: int) -> Tensor:
    if value.shape[dimension] > 1:  # one is a size of its own to Dynamo
        torch._dynamo.maybe_mark_dynamic(value, dimension)
    return value
