"""Architectures beyond the list: these must be right, and whatever is not fused must be said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import BASE, EAGER, HIDDEN, SIZES, TOKENS, VOCAB, WINDOW, Family, causal, encoder, from_config


def _seq2seq(name: str, **own: Any) -> Family:
    heads: dict[str, Any] = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, d_model=HIDDEN, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64)
    return from_config("seq2seq", "AutoModelForSeq2SeqLM", name, {**sizes, **heads, **own}, ("encoder_layers", "decoder_layers"))


OTHERS: dict[str, Family] = {
    "StableLM": causal("StableLm", **BASE, num_key_value_heads=2, partial_rotary_factor=0.5, use_qkv_bias=True),
    "StableLM parallel": causal("StableLm", **BASE, num_key_value_heads=4, use_parallel_residual=True, qk_layernorm=True),
    "Cohere": causal("Cohere", **BASE, num_key_value_heads=2, use_qk_norm=True),
    "Cohere 2": causal("Cohere2", **BASE, num_key_value_heads=2, sliding_window=WINDOW),
    "OLMo": causal("Olmo", **BASE, clip_qkv=1.5),
    "OLMo 2": causal("Olmo2", **BASE, num_key_value_heads=2),
    "Granite": causal("Granite", **BASE, num_key_value_heads=2, residual_multiplier=0.22, logits_scaling=3.0, attention_multiplier=0.1),
    "StarCoder 2": causal("Starcoder2", **BASE, num_key_value_heads=2, sliding_window=None, use_bias=True),
    "GPT-BigCode": from_config(
        "decoder",
        "AutoModelForCausalLM",
        "GPTBigCode",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, n_positions=256, multi_query=True),
        ("n_layer",),
    ),
    "MPT": from_config(
        "decoder", "AutoModelForCausalLM", "Mpt", dict(vocab_size=VOCAB, d_model=HIDDEN, n_heads=4, max_seq_len=256), ("n_layers",), EAGER
    ),
    "CodeGen": from_config(
        "decoder",
        "AutoModelForCausalLM",
        "CodeGen",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, rotary_dim=8, n_positions=256, n_ctx=256),
        ("n_layer",),
    ),
    "Phi-3": causal("Phi3", **BASE, num_key_value_heads=2),
    "Gemma 3": causal("Gemma3Text", **BASE, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW),
    "GLM": causal("Glm", **BASE, num_key_value_heads=2, head_dim=16),
    "Nemotron": causal("Nemotron", **BASE, num_key_value_heads=2),
    "Persimmon": causal("Persimmon", **BASE),
    "BioGPT": causal("BioGpt", **BASE),
    "XGLM": from_config(
        "decoder",
        "AutoModelForCausalLM",
        "XGLM",
        dict(**TOKENS, vocab_size=VOCAB, d_model=HIDDEN, ffn_dim=96, attention_heads=4, max_position_embeddings=256),
        ("num_layers",),
        EAGER,
    ),
    "Granite sinks": causal("GraniteSWA", EAGER, **BASE, num_key_value_heads=2, sliding_window=WINDOW),
    "Mixtral": causal("Mixtral", **BASE, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    "Qwen2-MoE": causal(
        "Qwen2Moe",
        **BASE,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
    "Mamba": from_config(
        "decoder", "AutoModelForCausalLM", "Mamba", dict(vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, **TOKENS), attentions=EAGER
    ),
    "ELECTRA": encoder("Electra", **SIZES, intermediate_size=96, embedding_size=32),
    "ALBERT": encoder("Albert", **SIZES, intermediate_size=96, embedding_size=32),
    "MPNet": encoder("MPNet", EAGER, **SIZES, intermediate_size=96),
    "DeBERTa 2": encoder(
        "DebertaV2", EAGER, **SIZES, intermediate_size=96, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "XLNet": from_config(
        "encoder", "AutoModel", "XLNet", dict(vocab_size=VOCAB, d_model=HIDDEN, n_head=4, d_inner=96), ("n_layer",), EAGER
    ),
    "Funnel": from_config(
        "encoder",
        "AutoModelForMaskedLM",
        "Funnel",
        dict(vocab_size=VOCAB, d_model=HIDDEN, n_head=4, d_head=16, d_inner=96, block_sizes=[1, 1], num_decoder_layers=1),
        (),
        EAGER,
    ),
    "ModernBERT": encoder("ModernBert", **BASE, local_attention=WINDOW, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    "ViT": from_config(
        "vision", "AutoModel", "ViT", dict(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=96, image_size=24, patch_size=8)
    ),
    "SigLIP vision": from_config(
        "vision",
        "AutoModel",
        "SiglipVision",
        dict(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=96, image_size=24, patch_size=8),
    ),
    "DINOv2": from_config("vision", "AutoModel", "Dinov2", dict(hidden_size=HIDDEN, num_attention_heads=4, image_size=24, patch_size=8)),
    "Swin v2": from_config(
        "vision",
        "AutoModel",
        "Swinv2",
        dict(image_size=24, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=3),
        (),
        EAGER,
    ),
    "BART": _seq2seq("Bart", **TOKENS),
    "Pegasus": _seq2seq("Pegasus", **TOKENS),
    "Marian": _seq2seq("Marian", **TOKENS, decoder_start_token_id=0),
}


for _name in ("XGLM", "Mixtral", "Qwen2-MoE"):
    OTHERS[_name] = replace(OTHERS[_name], runs_in_float64=False)
