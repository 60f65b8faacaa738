"""Greedy generation with a static cache: the loop that the demo and the tests run eager, compiled and otherwise, step by step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]  # a causal LM or its compiled form


@dataclass
class Generation:
    """What one run made: token ids, the logits [V] that each was picked from (fp32, on the CPU), and the wall time of each decode step."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """By the median decode step."""
        return 1 / sorted(self.seconds)[len(self.seconds) // 2]


def cache_argument(model: nn.Module) -> str:
    """The name under which this version of transformers takes a cache: `cache`, or before 5.20 or so `past_key_values`."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def static_cache(model: Any, length: int, batch: int = 1) -> Any:
    """An empty StaticCache for `length` tokens, its memory allocated at once: what runs the prompt then writes into it, compiled or not."""
    from transformers import StaticCache

    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(batch, heads, size, model.dtype, model.device)
    return cache


def greedy(
    model: Any, prompt: Tensor, *, new_tokens: int, cache_length: int, prefill: Forward | None = None, decode: Forward | None = None
) -> Generation:
    """Continue `prompt` (int64 [1, S], on the model's device) by up to `new_tokens` tokens, to the end-of-sequence token at the latest.

    `prefill` and `decode` are what is called on the prompt and on each further token: the model itself where left out.
    """
    prefill = model if prefill is None else prefill
    decode = model if decode is None else decode
    argument = {cache_argument(model): static_cache(model, cache_length)}
    made = Generation()
    with torch.no_grad():
        logits = prefill(input_ids=prompt, **argument).logits[0, -1]
        while True:
            made.logits.append(logits.float().cpu())
            token = logits.argmax().reshape(1, 1)
            made.tokens.append(int(token))
            if len(made.tokens) == new_tokens or made.tokens[-1] == model.config.eos_token_id:
                return made
            began = time.perf_counter()
            logits = decode(input_ids=token, **argument).logits[0, -1]
            if logits.is_cuda:
                torch.cuda.synchronize()
            made.seconds.append(time.perf_counter() - began)


def largest_error(made: Generation, reference: Generation) -> float:
    """The largest relative error (norm of the difference over the norm) of a step's logits, up to the first different token."""
    worst = 0.0
    for ours, theirs, mine, other in zip(made.logits, reference.logits, made.tokens, reference.tokens, strict=False):
        worst = max(worst, float((ours.double() - theirs.double()).norm() / theirs.double().norm()))
        if mine != other:
            break
    return worst
