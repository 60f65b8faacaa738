"""Kernels at the sizes of real models compile for sm_80 and sm_90, without a GPU: no spills, and shared memory that the device has."""

from __future__ import annotations

import pytest
import torch
from dsi.codegen import generate
from dsi.codegen.devices import A100, H200

from . import plans
from .support import resources

DEVICES = {80: A100, 90: H200}
LLAMA_8B = dict(heads=32, kv_heads=8, d=128, hidden=4096, cache=1024)
SMOLLM2 = dict(heads=9, kv_heads=3, d=64, hidden=576, cache=512)
GPTJ = dict(heads=16, kv_heads=16, d=256, hidden=4096, cache=512)
SYMBOLIC = dict(symbolic=True)

# name -> case by dtype. Symbolic rows: one kernel a bucket.
CASES = {
    "llama_8b_qkv": lambda dtype: plans.llama_qkv(dtype, 1, 1, **LLAMA_8B, **SYMBOLIC),
    "smollm2_qkv": lambda dtype: plans.llama_qkv(dtype, 1, 1, **SMOLLM2, **SYMBOLIC),
    "qwen3_qkv": lambda dtype: plans.llama_qkv(dtype, 1, 1, qk_norm=True, **LLAMA_8B, **SYMBOLIC),
    "gptj_qkv": lambda dtype: plans.llama_qkv(dtype, 1, 1, style="interleaved", **GPTJ, **SYMBOLIC),
    "gpt2_qkv": lambda dtype: plans.gpt2_qkv(dtype, 1, 1, 12, 64, **SYMBOLIC),
    "neox_qkv": lambda dtype: plans.neox_qkv(dtype, 1, 1, 32, 80, 20, 2560, **SYMBOLIC),
    "gate_up": lambda dtype: plans.gate_up(dtype, 1, 4096, 14336, **SYMBOLIC),
    "ff2": lambda dtype: plans.projection(dtype, 1, 3072, 768, kind="gelu_erf", **SYMBOLIC),
    "head": lambda dtype: plans.projection(dtype, 1, 768, 50257, **SYMBOLIC),
    "conv1d": lambda dtype: plans.projection(dtype, 1, 3072, 768, kind="gelu_tanh", kn=True, **SYMBOLIC),
    **{
        f"attention_{d}": lambda dtype, d=d: plans.attention(dtype, 1, 8, 2, 1, 1, d, mask="bool", **SYMBOLIC)
        for d in (64, 80, 96, 128, 152, 256)
    },
    "attention_window": lambda dtype: plans.attention(dtype, 1, 32, 8, 512, 512, 128, causal=True, window=128, softcap=30.0),
    "attention_bias": lambda dtype: plans.attention(dtype, 1, 12, 12, 512, 512, 64, mask="additive", bias=True),
    "post_norm": lambda dtype: plans.post_norm(dtype, 1, 1024, **SYMBOLIC),
    "post_norm_wide": lambda dtype: plans.post_norm(dtype, 1, 12288, **SYMBOLIC),
    "causal_mask": lambda dtype: plans.causal_mask(1, 1, 1, **SYMBOLIC),
    "embedding": lambda dtype: plans.embedding(dtype, 1, 1, 50257, 768, **SYMBOLIC),
}
# One of every schedule and epilogue in every run; the rest with the slow tests.
QUICK = (
    *(("llama_8b_qkv", 1), ("smollm2_qkv", 4), ("smollm2_qkv", None), ("qwen3_qkv", 16), ("neox_qkv", 16), ("gate_up", None), ("ff2", 1)),
    *(("conv1d", 4), ("conv1d", 16), ("head", None), ("attention_80", None), ("attention_152", 1), ("attention_bias", None)),
    *(("post_norm", None), ("post_norm_wide", None), ("embedding", None)),
)


def kernels_of(name: str, dtype: torch.dtype, capability: int):
    with torch.device("meta"):
        case = CASES[name](dtype)
    return case, generate(case.spec, device=DEVICES[capability])


def check(name: str, dtype: torch.dtype, capability: int, wanted=lambda kernel: True) -> None:
    case, kernels = kernels_of(name, dtype, capability)
    for kernel in filter(wanted, kernels):
        used = resources(case, kernel, capability)
        label = f"{name} {dtype}, {kernel.schedule} for {kernel.max_rows} rows, sm_{capability}: {used} with {kernel.launches[0].constants}"
        assert used["STACK"] == used["LOCAL"] == 0, label
        assert used["SHARED"] <= DEVICES[capability].shared, label


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("name, rows", QUICK)
def test_no_spills(name, rows, capability):
    check(name, torch.bfloat16, capability, lambda kernel: kernel.max_rows == rows)


@pytest.mark.parametrize("name", ["llama_8b_qkv", "neox_qkv", "attention_80", "embedding", "causal_mask"])
def test_sizes_of_one_are_constants_to_triton(name):
    """A decoding step has one row: sizes that are 1 arrive as compile-time constants, which have no methods."""
    case, kernels = kernels_of(name, torch.bfloat16, 90)
    assert resources(case, kernels[0], 90, ones=True)["STACK"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_no_spills_in_any_variant(name, dtype, capability):
    check(name, dtype, capability)
