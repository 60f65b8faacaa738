"""Skinny kernels whose weights go from memory straight into the matrix units' registers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice

from . import plans
from .quantised import constant
from .support import check

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DIRECT = Choice("skinny", 16, 16, 16, 64, 32, 2, 1, direct=True)
CASES = {
    "llama_qkv": lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20),
    "llama_qkv_norms": lambda dtype, rows, k: plans.llama_qkv(dtype, 1, rows, hidden=k, cache=20, qk_norm=True),
    "neox_qkv": lambda dtype, rows, k: plans.neox_qkv(dtype, 1, rows, hidden=k),
    "gate_up": lambda dtype, rows, k: plans.gate_up(dtype, rows, k),
    "symbolic": lambda dtype, rows, k: plans.gate_up(dtype, rows, k, symbolic=True),
    "projection": lambda dtype, rows, k: plans.projection(dtype, rows, k, columns=33),
}


def drawn(seed: int):
    """A few odd sizes: rows, contracted elements, and a choice that has one step or several."""
    source = random.Random(seed)
    warps = source.choice((1, 2, 4))
    rows, k = source.choice((2, 3, 5, 8, 13, 16)), source.choice((64, 96, 132, 204, 256, 300))
    block_k = 32 * warps * source.choice((1, 1, 2))
    choice = replace(DIRECT, block_k=block_k, num_warps=warps, block_m=16 if rows > 8 else source.choice((8, 16)))
    choice = replace(choice, block_n=source.choice((16, 32)), split=source.choice((1, 1, 2, 3)), apart=source.random() < 0.2)
    return rows, k, replace(choice, max_rows=choice.block_m) if choice.split > 1 else choice


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_direct(interpreter, name, dtype, seed):
    rows, k, choice = drawn(hash((sorted(CASES).index(name), dtype == BF16, seed)))
    case = CASES[name](dtype, rows, k)
    check(constant(case) if seed % 2 else case, interpreter, choice=choice)
