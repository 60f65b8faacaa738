"""Small models and tools for the tests of generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from zoo import hot

VOCABULARY = 199
REFERENCE = {"executor": "reference"}


def small_llama(layers: int = 1, seed: int = 0, **more: Any) -> Any:
    """A Llama of one layer with hot random weights."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = transformers.LlamaConfig(**{**sizes, **tokens, "num_hidden_layers": layers, "max_position_embeddings": 512, **more})
    return hot(transformers.LlamaForCausalLM(config).eval(), seed)


def prompt(*size: int, seed: int = 1) -> Tensor:
    """Random ids without special tokens."""
    return torch.randint(3, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))


def left_padded(*rows: Tensor) -> dict[str, Tensor]:
    """Prompts [n] of several lengths as one batch, with its mask."""
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def eager(model: Any, ids: Tensor, **how: Any) -> Tensor:
    """What transformers makes of it, without a cache."""
    made: Tensor = model.generate(ids, use_cache=False, **how)
    return made


@contextlib.contextmanager
def eager_calls(kind: type[nn.Module]) -> Iterator[list[str]]:
    """Within: a list that grows whenever the forward of a module of `kind` runs uncompiled on numbers (not on fakes, which have none)."""
    forward = kind.forward
    seen: list[str] = []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not isinstance(args[0], FakeTensor):
            seen.append(kind.__name__)
        return forward(self, *args, **kwargs)

    kind.forward = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        kind.forward = forward  # type: ignore[method-assign]


class Stand:
    """Records a step by remembering it; a launch runs it. Nothing is executed while recording."""

    def __init__(self) -> None:
        self.recorded, self.allowed, self.error = 0, True, None

    def place(self):
        return 0

    def may_record(self):
        return self.allowed

    def record(self, run, place):
        if self.error:
            raise self.error
        self.recorded += 1
        return run, run


class Late:
    """Gives a step's tokens when `lag` more steps have been queued, and no earlier."""

    lag = 2

    def begin(self, board):
        self.board, self.queued = board, -1

    def queue(self, step):
        self.queued = step

    def read(self, step):
        assert step <= self.queued
        return self.board[step].clone().numpy()
