"""What kernels look like: whole files, to be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dsi.codegen import Choice, generate

from . import plans
from .quantised import constant, quantised

FOLDER = Path(__file__).with_name("golden")
BF16 = torch.bfloat16

CASES = {
    "llama_qkv_decode": lambda: plans.llama_qkv(BF16, 1, 1, 32, 8, 64, 2048, 1024),
    "gpt2_qkv_prefill": lambda: plans.gpt2_qkv(BF16, 1, 128, 12, 64),
    "neox_qkv_decode": lambda: plans.neox_qkv(torch.float16, 2, 1, 8, 64, 16, 512),
    "qwen3_qkv_prefill": lambda: plans.llama_qkv(BF16, 1, 200, 16, 8, 128, 1024, 1024, qk_norm=True),
    "gate_up_any_rows": lambda: plans.gate_up(BF16, 1, 2048, 8192, symbolic=True),
    "projection_residual": lambda: plans.projection(torch.float32, 7, 768, 768, "gelu_erf", strided=False, kn=True),
    "attention_decode": lambda: plans.attention(BF16, 1, 32, 8, 1, 1024, 64, mask="bool"),
    "attention_decode_long": lambda: plans.attention(BF16, 4, 32, 8, 1, 4096, 128, mask="bool"),
    "attention_decode_vector": lambda: plans.attention(torch.float16, 1, 28, 28, 1, 1024, 152, mask="bool"),
    "attention_prompt_masked": lambda: plans.attention(BF16, 1, 32, 8, 512, 1024, 128, mask="bool"),
    "attention_prefill": lambda: plans.attention(BF16, 1, 12, 12, 1, 1, 80, causal=True, window=128, softcap=30.0, symbolic=True),
    "post_norm": lambda: plans.post_norm(BF16, 1, 768, symbolic=True),
    "embedding": lambda: plans.embedding(BF16, 1, 1, 50257, 768, symbolic=True),
    "gate_up_int8_decode": lambda: quantised(lambda: plans.gate_up(BF16, 1, 4096, 14336)),
    "qkv_peeled": lambda: constant(plans.llama_qkv(BF16, 1, 8, 32, 8, 128, 4096, 1024)),
    "neox_qkv_deferred": lambda: constant(plans.neox_qkv(torch.float16, 1, 1, 12, 64, 64, 768)),
    "gate_up_int8_peeled": lambda: constant(quantised(lambda: plans.gate_up(BF16, 8, 4096, 14336), 128)),
    "causal_mask": lambda: plans.causal_mask(1, 1, 1, symbolic=True),
}
CHOICES = {
    "neox_qkv_deferred": Choice("gemv", None, 1, 4, 256, 1024, 4, deferred=True),
    "qkv_peeled": Choice("skinny", 8, 8, 32, 128, 256, 4, 3, 5, peel="last"),
    "gate_up_int8_peeled": Choice("skinny", 8, 8, 128, 128, 256, 4, 3, digits=2, peel="first"),
}


@pytest.mark.parametrize("name", CASES)
def test_source(name, golden):
    with torch.device("meta"):
        spec = CASES[name]().spec
    golden(FOLDER / f"{name}.txt", generate(spec, CHOICES.get(name))[-1].source)


def test_sources_are_the_same_in_every_run():
    with torch.device("meta"):
        first, second = (generate(CASES["qwen3_qkv_prefill"]().spec) for _ in range(2))
    assert [k.digest for k in first] == [k.digest for k in second]
