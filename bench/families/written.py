"""Models of one file, written out: a GPT as people spell it, by a call of SDPA or in products and a softmax, and PyTorch's own encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .family import HIDDEN, VOCAB


class _Attention(nn.Module):
    """Causal self-attention of heads [H, D] out of one linear; `layout` says how its rows are q, k and v."""

    def __init__(self, width: int, heads: int, layout: str, spelled: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.size, self.layout, self.spelled = heads, width // heads, layout, spelled

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        if self.layout == "per head":  # [H, 3, D], as Megatron stores them
            q, k, v = self.qkv(x).view(b, s, self.heads, 3 * self.size).chunk(3, -1)
        else:  # [3, H, D]
            q, k, v = (part.view(b, s, self.heads, self.size) for part in self.qkv(x).split(width, 2))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.spelled:
            scores = q @ k.transpose(-2, -1) / self.size**0.5
            seen = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
            attended = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(b, s, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, layout: str, spelled: bool, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, layout, spelled)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(self.activation(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """A GPT as people write it in one file: ids [B, S] -> logits [B, S, V], the head tied to the embedding."""

    def __init__(self, layers: int, layout: str = "whole", spelled: bool = False, activation: Callable[[Tensor], Tensor] = F.gelu):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(_Block(HIDDEN, 4, layout, spelled, activation) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by tanh, spelled out as Megatron does."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))


def transformer_encoder(attention: str, layers: int) -> nn.Module:
    """nn.TransformerEncoder; `attention` is "pre-norm" or "post-norm"."""
    norm_first = attention == "pre-norm"
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 96, batch_first=True, norm_first=norm_first, activation="gelu")
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
