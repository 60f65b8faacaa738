"""Tiny random-weight models of the architectures that people deploy, small enough for a CPU test.

Hugging Face's default initialisation hides bugs (biases are 0, norm weights 1, every matrix has std .02), so `hot` re-randomises every
parameter. Use both: a wrong epsilon shows only with the default one. The vocabulary (199) is prime on purpose.
"""

from __future__ import annotations

import torch
import transformers as T
from torch import Tensor, nn

from bench.models import hot

__all__ = ["HIDDEN", "VOCAB", "decoder", "decoder_configs", "encoder", "encoder_configs", "hot", "padded_batch", "relative_error"]

VOCAB, HIDDEN = 199, 64
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def decoder_configs() -> dict[str, T.PretrainedConfig]:
    """name -> config of a 2-layer causal LM."""
    base = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        **TOKENS,
    )
    opt = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, max_position_embeddings=256, **TOKENS
    )
    falcon = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, **TOKENS)
    return {
        "gpt2": T.GPT2Config(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=256),
        "gpt_neo": T.GPTNeoConfig(
            **TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=2,
            num_heads=4,
            window_size=8,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=256,
        ),
        "gptj": T.GPTJConfig(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, rotary_dim=8, n_positions=256),
        "gpt_neox": T.GPTNeoXConfig(**base, rotary_pct=0.25),
        "gpt_neox_sequential": T.GPTNeoXConfig(**base, rotary_pct=0.25, use_parallel_residual=False),
        "bloom": T.BloomConfig(**TOKENS, vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2, n_head=4),
        "bloom_6_heads": T.BloomConfig(**TOKENS, vocab_size=VOCAB, hidden_size=96, n_layer=2, n_head=6),
        "opt": T.OPTConfig(**opt, word_embed_proj_dim=HIDDEN),
        "opt_post_norm": T.OPTConfig(**opt, word_embed_proj_dim=32, do_layer_norm_before=False),
        "falcon_mqa": T.FalconConfig(**falcon, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
        "falcon_gqa": T.FalconConfig(**falcon, num_kv_heads=2, new_decoder_architecture=True),
        "llama": T.LlamaConfig(**base, num_key_value_heads=2),
        "llama_tied": T.LlamaConfig(**base, num_key_value_heads=2, tie_word_embeddings=True),
        "llama_bias": T.LlamaConfig(**base, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
        "mistral_window": T.MistralConfig(**base, num_key_value_heads=2, sliding_window=8),
        "qwen2": T.Qwen2Config(**base, num_key_value_heads=2),
        "qwen3": T.Qwen3Config(**base, num_key_value_heads=2, head_dim=16),
        "phi": T.PhiConfig(**base, partial_rotary_factor=0.5),
        "gemma": T.GemmaConfig(**base, num_key_value_heads=1, head_dim=16),
        "gemma2": T.Gemma2Config(
            **base,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=8,
            sliding_window=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    }


def encoder_configs() -> dict[str, T.PretrainedConfig]:
    """name -> config of a 2-layer encoder."""
    base = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    return {
        "bert": T.BertConfig(**base),
        "roberta": T.RobertaConfig(**base, pad_token_id=1, max_position_embeddings=260),
        "distilbert": T.DistilBertConfig(vocab_size=VOCAB, dim=HIDDEN, hidden_dim=96, n_layers=2, n_heads=4),
    }


def decoder(name: str, dtype: torch.dtype = torch.float32, attn: str | None = None, seed: int = 0, hot_init: bool = True) -> nn.Module:
    """An eval-mode causal LM.

    `attn`: transformers' attention implementation, None for its default (GPT-Neo, BLOOM and Gemma2 have only eager or default to it).
    """
    torch.manual_seed(seed)
    model = T.AutoModelForCausalLM.from_config(decoder_configs()[name], attn_implementation=attn).eval()
    if hot_init:
        hot(model, seed)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return model.to(dtype)


def encoder(name: str, dtype: torch.dtype = torch.float32, attn: str | None = None, seed: int = 0, hot_init: bool = True) -> nn.Module:
    """An eval-mode encoder without a head."""
    torch.manual_seed(seed)
    model = T.AutoModel.from_config(encoder_configs()[name], attn_implementation=attn).eval()
    if hot_init:
        hot(model, seed)
    return model.to(dtype)


def padded_batch(batch: int = 3, length: int = 24, pads: tuple[int, ...] = (0, 5, 11), seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Left-padded ids, attention mask and position ids, each [batch, length] int64.

    Models with learned or rotary positions must be given the position ids (those whose forward takes them), or a padded row differs from
    the row alone in eager PyTorch too.
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=g)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, pad in enumerate(pads[:batch]):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def relative_error(a: Tensor, b: Tensor) -> float:
    """The norm of a - b over the norm of b, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
