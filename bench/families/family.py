"""What a family is, and how one is made from transformers' configurations. Sizes are small, and odd where the architecture lets them be:
regions do not depend on the width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

VOCAB, HIDDEN, WINDOW = 199, 64, 8
TOKENS: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
ATTENTIONS = ("sdpa", "eager")
EAGER = ("eager",)  # what models have that transformers has not given sdpa


@dataclass(frozen=True)
class Family:
    """One architecture.

    `kind` says how it is called: "decoder" (ids, mask, positions, cache), "encoder" (ids and mask), "seq2seq" (encoder inputs, decoder
    ids), "vision" (pixels), "embedded" (vectors) or "plain" (ids alone). `make(attention, layers)` builds it; `attentions` are the
    implementations that it has.
    """

    kind: str
    make: Callable[[str, int], nn.Module]
    attentions: tuple[str, ...] = ATTENTIONS
    whole_mask: bool = False  # with a static cache it wants a mask for all of the cache
    window: bool = False  # some layer sees only the last WINDOW positions, counted in slots of the cache
    runs_in_float64: bool = True  # eager; else it is its own reference
    wrong_with_static_cache: bool = False  # eager itself computes otherwise with a StaticCache


def causal(name: str, attentions: tuple[str, ...] = ATTENTIONS, **own: Any) -> Family:
    """A decoder-only model of transformers."""
    return from_config("decoder", "AutoModelForCausalLM", name, own, attentions=attentions)


def from_config(
    kind: str,
    auto: str,
    name: str,
    own: dict[str, Any],
    depth: tuple[str, ...] = ("num_hidden_layers",),
    attentions: tuple[str, ...] = ATTENTIONS,
) -> Family:
    """The family of transformers' class `auto` and configuration `name`Config(**own), whose fields `depth` are the number of layers."""

    def make(attention: str, layers: int) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**own, **dict.fromkeys(depth, layers)})
        return getattr(transformers, auto).from_config(config, attn_implementation=attention)

    return Family(kind, make, attentions)


def encoder(name: str, attentions: tuple[str, ...] = ATTENTIONS, **own: Any) -> Family:
    """An encoder of transformers, without a head."""
    return from_config("encoder", "AutoModel", name, own, attentions=attentions)


SIZES: dict[str, Any] = dict(hidden_size=HIDDEN, num_attention_heads=4, vocab_size=VOCAB)
BASE: dict[str, Any] = dict(**SIZES, intermediate_size=96, max_position_embeddings=256, **TOKENS)
OPT: dict[str, Any] = dict(**SIZES, ffn_dim=96, max_position_embeddings=256, **TOKENS)
FALCON: dict[str, Any] = dict(**SIZES, **TOKENS)
