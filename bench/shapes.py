"""Shapes of models that people deploy, made with hot random weights on the device, and what one call of them must read and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench import models


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `timed` layers are benchmarked where nothing else is asked for: comparators that compile for minutes need few."""

    family: str  # "gpt2", "llama" or "bert"
    layers: int
    width: int
    heads: int
    inner: int
    vocab: int
    dtype: str
    kv_heads: int = 0  # 0: as many as heads
    tied: bool = False
    timed: int = 0  # 0: all

    @property
    def timed_layers(self) -> int:
        """Layers that are benchmarked where nothing else is asked for."""
        return self.timed or self.layers

    def parameters(self, layers: int | None = None) -> int:
        """Entries of all matrices of a model of so many layers (left out: those that are timed)."""
        kv = self.width // self.heads * (self.kv_heads or self.heads)
        llama = self.family == "llama"
        layer = 2 * self.width * (self.width + kv) + (3 if llama else 2) * self.width * self.inner
        return (layers or self.timed_layers) * layer + (2 if llama and not self.tied else 1) * self.vocab * self.width

    def config(self, layers: int, positions: int) -> Any:
        """The configuration for transformers."""
        import transformers as T

        base: dict[str, Any] = {"vocab_size": self.vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        if self.family == "gpt2":
            sizes = {"n_embd": self.width, "n_head": self.heads, "n_inner": self.inner, "n_layer": layers}
            return T.GPT2Config(**base, **sizes, n_positions=max(positions, 1024))
        sizes = {"hidden_size": self.width, "num_attention_heads": self.heads, "intermediate_size": self.inner, "num_hidden_layers": layers}
        sizes["max_position_embeddings"] = max(positions, 512)
        if self.family == "bert":
            return T.BertConfig(**{key: value for key, value in base.items() if key == "vocab_size"}, **sizes)
        return T.LlamaConfig(**base, **sizes, num_key_value_heads=self.kv_heads or self.heads, tie_word_embeddings=self.tied)

    def small(self) -> Shape:
        """The same kind of model at a toy's size."""
        shared = 2 if self.kv_heads and self.kv_heads < self.heads else 0
        return Shape(self.family, 2, 64, 4, 96, 199, "fp32", shared, self.tied)


SHAPES = {
    "gpt2": Shape("gpt2", 12, 768, 12, 3072, 50257, "fp16"),
    "gpt2-xl": Shape("gpt2", 48, 1600, 25, 6400, 50257, "fp16"),
    "smollm2-135m": Shape("llama", 30, 576, 9, 1536, 49152, "bf16", 3, True),
    "llama-3.2-1b": Shape("llama", 16, 2048, 32, 8192, 128256, "bf16", 8, True),
    "llama-7b": Shape("llama", 32, 4096, 32, 11008, 32000, "fp16", timed=8),
    "llama-3-8b": Shape("llama", 32, 4096, 32, 14336, 128256, "bf16", 8, timed=8),
    "bert-large": Shape("bert", 24, 1024, 16, 4096, 30522, "fp16"),
}


def build(shape: Shape, layers: int, positions: int, dtype: torch.dtype, device: str, hot: bool = True) -> Any:
    """A model of a shape in eval mode, its weights random; `hot`: large enough that every term of the arithmetic counts."""
    import transformers as T

    torch.manual_seed(0)
    kind = T.AutoModel if shape.family == "bert" else T.AutoModelForCausalLM
    extra = {"add_pooling_layer": False} if shape.family == "bert" else {}
    with torch.device(device):
        model: nn.Module = kind.from_config(shape.config(layers, positions), attn_implementation="sdpa", dtype=dtype, **extra)
    model = model.to(device).eval()  # not to the dtype: the frequencies of rotary embeddings stay fp32
    return models.hot(model) if hot else model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a call reads whole: each once, without tables of which it gathers rows."""
    return sum(p.numel() * p.element_size() for p in _streamed(model))


def int8_bytes(model: nn.Module) -> int:
    """`weight_bytes` where the weights of linears are int8 with an fp32 scale a row."""
    linears = {id(module.weight): module.weight.shape[0] for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(p.numel() + 4 * linears[id(p)] if id(p) in linears else p.numel() * p.element_size() for p in _streamed(model))


def weight_flops(model: nn.Module, rows: int, head_rows: int) -> float:
    """Operations of all linears for `rows` tokens, the output head's for `head_rows`, a multiply-add counted twice."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = head.weight if head is not None else None
    return float(sum(2 * p.numel() * (head_rows if p is kept else rows) for p in _streamed(model) if p.dim() == 2))


def _streamed(model: nn.Module) -> list[nn.Parameter]:
    gathered = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    used = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return [p for p in dict.fromkeys(model.parameters()) if id(p) not in gathered - used]


def cache_bytes(model: Any, batch: int, live: int) -> int:
    """Bytes of keys and values of `live` tokens in every layer."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * batch * heads * size * live * model.dtype.itemsize


def attention_flops(config: Any, batch: int, queries: int, keys: int, causal: bool) -> float:
    """Operations of both products of attention in every layer; half of the square where it is causal."""
    return 4.0 * config.num_hidden_layers * batch * config.hidden_size * queries * keys * (0.5 if causal and queries == keys else 1.0)
