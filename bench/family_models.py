"""Toys of every architecture that dsi covers, as transformers or plain PyTorch spells it: configurations, and four models written out here.

Sizes are small, and odd where the architecture lets them be: regions do not depend on the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import hot

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


# ------------------------------------------------------------------------------------------------------- models written out


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


def _transformer_encoder(attention: str, layers: int) -> nn.Module:
    norm_first = attention == "pre-norm"
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 96, batch_first=True, norm_first=norm_first, activation="gelu")
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# ---------------------------------------------------------------------------------------------------------- transformers' own


def _causal(name: str, attentions: tuple[str, ...] = ATTENTIONS, **own: Any) -> Family:
    return _of("decoder", "AutoModelForCausalLM", name, own, attentions=attentions)


def _of(
    kind: str,
    auto: str,
    name: str,
    own: dict[str, Any],
    depth: tuple[str, ...] = ("num_hidden_layers",),
    attentions: tuple[str, ...] = ATTENTIONS,
) -> Family:
    def make(attention: str, layers: int) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**own, **dict.fromkeys(depth, layers)})
        return getattr(transformers, auto).from_config(config, attn_implementation=attention)

    return Family(kind, make, attentions)


def _encoder(name: str, attentions: tuple[str, ...] = ATTENTIONS, **own: Any) -> Family:
    return _of("encoder", "AutoModel", name, own, attentions=attentions)


_SIZES: dict[str, Any] = dict(hidden_size=HIDDEN, num_attention_heads=4, vocab_size=VOCAB)
_BASE: dict[str, Any] = dict(**_SIZES, intermediate_size=96, max_position_embeddings=256, **TOKENS)
_OPT: dict[str, Any] = dict(**_SIZES, ffn_dim=96, max_position_embeddings=256, **TOKENS)
_FALCON: dict[str, Any] = dict(**_SIZES, **TOKENS)


def _gpt_neo(attention: str, layers: int) -> nn.Module:
    import transformers as T

    kinds = (["global", "local"] * layers)[:layers]
    sizes = dict(num_layers=layers, num_heads=4, window_size=WINDOW, attention_types=[[kinds, 1]], max_position_embeddings=256)
    config = T.GPTNeoConfig(**TOKENS, vocab_size=VOCAB, hidden_size=HIDDEN, **sizes)
    return T.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _bloom(width: int, heads: int) -> Family:
    sizes = dict(**TOKENS, vocab_size=VOCAB, hidden_size=width, n_head=heads)
    return replace(_of("decoder", "AutoModelForCausalLM", "Bloom", sizes, ("n_layer",), EAGER), whole_mask=True)


def _clip(part: str) -> Callable[[str, int], nn.Module]:
    def make(attention: str, layers: int) -> nn.Module:
        import transformers as T

        sizes: dict[str, Any] = dict(hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=4, num_hidden_layers=layers)
        if part == "text":
            config = T.CLIPTextConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes, **TOKENS)
            return T.CLIPTextModel._from_config(config, attn_implementation=attention)
        config = T.CLIPVisionConfig(image_size=24, patch_size=8, **sizes)
        return T.CLIPVisionModel._from_config(config, attn_implementation=attention)

    return make


def _t5(gated: bool) -> Callable[[str, int], nn.Module]:
    def make(attention: str, layers: int) -> nn.Module:
        import transformers as T

        sizes: dict[str, Any] = dict(d_model=HIDDEN, d_kv=16, d_ff=96, num_heads=4, num_layers=layers, num_decoder_layers=layers)
        kind: dict[str, Any] = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False) if gated else {}
        config = T.T5Config(vocab_size=VOCAB, **sizes, **kind, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
        return T.T5ForConditionalGeneration._from_config(config, attn_implementation=attention)

    return make


def _whisper(attention: str, layers: int) -> nn.Module:
    import transformers as T

    sizes: dict[str, Any] = dict(
        d_model=HIDDEN, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4, decoder_attention_heads=4
    )
    more: dict[str, Any] = dict(encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=12, max_target_positions=64)
    config = T.WhisperConfig(vocab_size=VOCAB, **sizes, **more, **TOKENS, decoder_start_token_id=1)
    return T.WhisperForConditionalGeneration._from_config(config, attn_implementation=attention)


FAMILIES: dict[str, Family] = {
    "GPT-2": _of(
        "decoder",
        "AutoModelForCausalLM",
        "GPT2",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, n_positions=256),
        ("n_layer",),
    ),
    "GPT-Neo": Family("decoder", _gpt_neo, EAGER, window=True, wrong_with_static_cache=True),
    "GPT-NeoX": _causal("GPTNeoX", **_BASE, rotary_pct=0.25),
    "GPT-NeoX sequential": _causal("GPTNeoX", **_BASE, rotary_pct=0.25, use_parallel_residual=False),
    "GPT-J": _of(
        "decoder",
        "AutoModelForCausalLM",
        "GPTJ",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, rotary_dim=8, n_positions=256),
        ("n_layer",),
    ),
    "Megatron GPT": Family("plain", lambda attention, layers: PlainGPT(layers, "per head", attention == "eager", tanh_gelu), ATTENTIONS),
    "BLOOM": _bloom(HIDDEN, 4),
    "BLOOM 6 heads": _bloom(96, 6),
    "OPT": _causal("OPT", **_OPT, word_embed_proj_dim=HIDDEN),
    "OPT post-norm": _causal("OPT", **_OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "CLIP text": Family("encoder", _clip("text")),
    "CLIP vision": Family("vision", _clip("vision")),
    "DistilBERT": _of("encoder", "AutoModel", "DistilBert", dict(vocab_size=VOCAB, dim=HIDDEN, hidden_dim=96, n_heads=4), ("n_layers",)),
    "BERT": _encoder("Bert", **_SIZES, intermediate_size=96),
    "RoBERTa": _encoder("Roberta", **_SIZES, intermediate_size=96, pad_token_id=1, max_position_embeddings=260),
    "LLaMA": _causal("Llama", **_BASE),
    "LLaMA-2 GQA": _causal("Llama", **_BASE, num_key_value_heads=2),
    "LLaMA tied": _causal("Llama", **_BASE, num_key_value_heads=2, tie_word_embeddings=True),
    "InternLM": _causal("Llama", **_BASE, num_key_value_heads=4, attention_bias=True),
    "Mistral": replace(_causal("Mistral", **_BASE, num_key_value_heads=2, sliding_window=WINDOW), window=True),
    "Qwen2": _causal("Qwen2", **_BASE, num_key_value_heads=2),
    "Qwen3": _causal("Qwen3", **_BASE, num_key_value_heads=2, head_dim=16),
    "Phi": _causal("Phi", **_BASE, partial_rotary_factor=0.5),
    "Falcon MQA": _causal("Falcon", **_FALCON, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "Falcon GQA": _causal("Falcon", **_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "Gemma": _causal("Gemma", **_BASE, num_key_value_heads=1, head_dim=16),
    "Gemma 2": replace(
        _causal(
            "Gemma2",
            EAGER,
            **_BASE,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        window=True,
    ),
    "T5": Family("seq2seq", _t5(False)),
    "T5 gated": Family("seq2seq", _t5(True)),
    "Whisper": Family("seq2seq", _whisper),
    "TransformerEncoder": Family("embedded", _transformer_encoder, ("post-norm", "pre-norm")),
    "nanoGPT": Family("plain", lambda attention, layers: PlainGPT(layers), ("sdpa",)),
    "GPT spelled out": Family("plain", lambda attention, layers: PlainGPT(layers, spelled=True), EAGER),
}

# Beyond the list: these must be right, and whatever is not fused must be said.
OTHERS: dict[str, Family] = {
    "StableLM": _causal("StableLm", **_BASE, num_key_value_heads=2, partial_rotary_factor=0.5, use_qkv_bias=True),
    "StableLM parallel": _causal("StableLm", **_BASE, num_key_value_heads=4, use_parallel_residual=True, qk_layernorm=True),
    "Cohere": _causal("Cohere", **_BASE, num_key_value_heads=2, use_qk_norm=True),
    "Cohere 2": _causal("Cohere2", **_BASE, num_key_value_heads=2, sliding_window=WINDOW),
    "OLMo": _causal("Olmo", **_BASE, clip_qkv=1.5),
    "OLMo 2": _causal("Olmo2", **_BASE, num_key_value_heads=2),
    "Granite": _causal("Granite", **_BASE, num_key_value_heads=2, residual_multiplier=0.22, logits_scaling=3.0, attention_multiplier=0.1),
    "StarCoder 2": _causal("Starcoder2", **_BASE, num_key_value_heads=2, sliding_window=None, use_bias=True),
    "GPT-BigCode": _of(
        "decoder",
        "AutoModelForCausalLM",
        "GPTBigCode",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, n_positions=256, multi_query=True),
        ("n_layer",),
    ),
    "MPT": _of(
        "decoder", "AutoModelForCausalLM", "Mpt", dict(vocab_size=VOCAB, d_model=HIDDEN, n_heads=4, max_seq_len=256), ("n_layers",), EAGER
    ),
    "CodeGen": _of(
        "decoder",
        "AutoModelForCausalLM",
        "CodeGen",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, rotary_dim=8, n_positions=256, n_ctx=256),
        ("n_layer",),
    ),
    "Phi-3": _causal("Phi3", **_BASE, num_key_value_heads=2),
    "Gemma 3": _causal("Gemma3Text", **_BASE, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW),
    "GLM": _causal("Glm", **_BASE, num_key_value_heads=2, head_dim=16),
    "Nemotron": _causal("Nemotron", **_BASE, num_key_value_heads=2),
    "Persimmon": _causal("Persimmon", **_BASE),
    "BioGPT": _causal("BioGpt", **_BASE),
    "XGLM": _of(
        "decoder",
        "AutoModelForCausalLM",
        "XGLM",
        dict(**TOKENS, vocab_size=VOCAB, d_model=HIDDEN, ffn_dim=96, attention_heads=4, max_position_embeddings=256),
        ("num_layers",),
        EAGER,
    ),
    "Mixtral": _causal("Mixtral", **_BASE, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    "Qwen2-MoE": _causal(
        "Qwen2Moe",
        **_BASE,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
    "Mamba": _of(
        "decoder", "AutoModelForCausalLM", "Mamba", dict(vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, **TOKENS), attentions=EAGER
    ),
    "ELECTRA": _encoder("Electra", **_SIZES, intermediate_size=96, embedding_size=32),
    "ALBERT": _encoder("Albert", **_SIZES, intermediate_size=96, embedding_size=32),
    "MPNet": _encoder("MPNet", EAGER, **_SIZES, intermediate_size=96),
    "DeBERTa 2": _encoder(
        "DebertaV2", EAGER, **_SIZES, intermediate_size=96, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "ModernBERT": _encoder("ModernBert", **_BASE, local_attention=WINDOW, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    "ViT": _of(
        "vision", "AutoModel", "ViT", dict(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=96, image_size=24, patch_size=8)
    ),
    "SigLIP vision": _of(
        "vision",
        "AutoModel",
        "SiglipVision",
        dict(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=96, image_size=24, patch_size=8),
    ),
    "DINOv2": _of("vision", "AutoModel", "Dinov2", dict(hidden_size=HIDDEN, num_attention_heads=4, image_size=24, patch_size=8)),
    "BART": _of(
        "seq2seq",
        "AutoModelForSeq2SeqLM",
        "Bart",
        dict(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=64,
            **TOKENS,
        ),
        ("encoder_layers", "decoder_layers"),
    ),
    "Pegasus": _of(
        "seq2seq",
        "AutoModelForSeq2SeqLM",
        "Pegasus",
        dict(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=64,
            **TOKENS,
        ),
        ("encoder_layers", "decoder_layers"),
    ),
    "Marian": _of(
        "seq2seq",
        "AutoModelForSeq2SeqLM",
        "Marian",
        dict(
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=64,
            **{**TOKENS, "pad_token_id": 0},
            decoder_start_token_id=0,
        ),
        ("encoder_layers", "decoder_layers"),
    ),
}


for _name in ("XGLM", "Mixtral", "Qwen2-MoE"):
    OTHERS[_name] = replace(OTHERS[_name], runs_in_float64=False)


def build(name: str, attention: str, *, layers: int = 2, dtype: torch.dtype = torch.float32, hot_init: bool = True) -> nn.Module:
    """A toy in eval mode with fresh random weights, the same ones each time."""
    torch.manual_seed(0)
    model = (FAMILIES.get(name) or OTHERS[name]).make(attention, layers).eval()
    if hot_init:
        hot(model)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        model.tie_weights()
    return model.to(dtype)
