"""The families that dsi covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .family import ATTENTIONS, BASE, EAGER, FALCON, HIDDEN, OPT, SIZES, TOKENS, VOCAB, WINDOW, Family, causal, encoder, from_config
from .written import PlainGPT, tanh_gelu, transformer_encoder


def _gpt_neo(attention: str, layers: int) -> nn.Module:
    import transformers as T

    kinds = (["global", "local"] * layers)[:layers]
    sizes = dict(num_layers=layers, num_heads=4, window_size=WINDOW, attention_types=[[kinds, 1]], max_position_embeddings=256)
    config = T.GPTNeoConfig(**TOKENS, vocab_size=VOCAB, hidden_size=HIDDEN, **sizes)
    return T.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _bloom(width: int, heads: int) -> Family:
    sizes = dict(**TOKENS, vocab_size=VOCAB, hidden_size=width, n_head=heads)
    return replace(from_config("decoder", "AutoModelForCausalLM", "Bloom", sizes, ("n_layer",), EAGER), whole_mask=True)


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
    "GPT-2": from_config(
        "decoder",
        "AutoModelForCausalLM",
        "GPT2",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, n_positions=256),
        ("n_layer",),
    ),
    "GPT-Neo": Family("decoder", _gpt_neo, EAGER, window=True, wrong_with_static_cache=True),
    "GPT-NeoX": causal("GPTNeoX", **BASE, rotary_pct=0.25),
    "GPT-NeoX sequential": causal("GPTNeoX", **BASE, rotary_pct=0.25, use_parallel_residual=False),
    "GPT-J": from_config(
        "decoder",
        "AutoModelForCausalLM",
        "GPTJ",
        dict(**TOKENS, vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, rotary_dim=8, n_positions=256),
        ("n_layer",),
    ),
    "Megatron GPT": Family("plain", lambda attention, layers: PlainGPT(layers, "per head", attention == "eager", tanh_gelu), ATTENTIONS),
    "BLOOM": _bloom(HIDDEN, 4),
    "BLOOM 6 heads": _bloom(96, 6),
    "OPT": causal("OPT", **OPT, word_embed_proj_dim=HIDDEN),
    "OPT post-norm": causal("OPT", **OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "CLIP text": Family("encoder", _clip("text")),
    "CLIP vision": Family("vision", _clip("vision")),
    "DistilBERT": from_config(
        "encoder", "AutoModel", "DistilBert", dict(vocab_size=VOCAB, dim=HIDDEN, hidden_dim=96, n_heads=4), ("n_layers",)
    ),
    "BERT": encoder("Bert", **SIZES, intermediate_size=96),
    "RoBERTa": encoder("Roberta", **SIZES, intermediate_size=96, pad_token_id=1, max_position_embeddings=260),
    "LLaMA": causal("Llama", **BASE),
    "LLaMA-2 GQA": causal("Llama", **BASE, num_key_value_heads=2),
    "LLaMA tied": causal("Llama", **BASE, num_key_value_heads=2, tie_word_embeddings=True),
    "InternLM": causal("Llama", **BASE, num_key_value_heads=4, attention_bias=True),
    "Mistral": replace(causal("Mistral", **BASE, num_key_value_heads=2, sliding_window=WINDOW), window=True),
    "Qwen2": causal("Qwen2", **BASE, num_key_value_heads=2),
    "Qwen3": causal("Qwen3", **BASE, num_key_value_heads=2, head_dim=16),
    "Phi": causal("Phi", **BASE, partial_rotary_factor=0.5),
    "Falcon MQA": causal("Falcon", **FALCON, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "Falcon GQA": causal("Falcon", **FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "Gemma": causal("Gemma", **BASE, num_key_value_heads=1, head_dim=16),
    "Gemma 2": replace(
        causal(
            "Gemma2",
            EAGER,
            **BASE,
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
    "TransformerEncoder": Family("embedded", transformer_encoder, ("post-norm", "pre-norm")),
    "nanoGPT": Family("plain", lambda attention, layers: PlainGPT(layers), ("sdpa",)),
    "GPT spelled out": Family("plain", lambda attention, layers: PlainGPT(layers, spelled=True), EAGER),
}
