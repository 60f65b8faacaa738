"""Attention starts from the nearest measured choice, and from the model's where nothing is near."""

from __future__ import annotations

import pytest
import torch
from dsi.codegen import attention_defaults, defaults, generate

from . import plans
from .support import check

BF16 = torch.bfloat16


def spec(batch=1, keys=512, **more):
    with torch.device("meta"):
        return plans.attention(BF16, batch, 32, 8, 1, keys, 128, **{"mask": "bool", **more}).spec


def test_the_nearest_measured_choice():
    one, many = (defaults.lookup(spec(batch), 1, "NVIDIA H200") for batch in (1, 16))
    assert one.split > 1 and many.split == 1
    assert defaults.lookup(spec(12), 1, "NVIDIA H200") == many  # within a factor of two
    assert defaults.lookup(spec(1, 1024), 1, "NVIDIA H200") == one


@pytest.mark.parametrize("other", [spec(1, 8192), spec(64), spec(mask="additive"), spec(bias=True), spec(softcap=30.0)])
def test_nothing_near(other):
    assert defaults.lookup(other, 1, "NVIDIA H200") is None


def prompt(queries, keys, heads=8, symbolic=False, **more):
    with torch.device("meta"):
        return plans.attention(BF16, 1, 4 * heads, heads, queries, keys, 128, symbolic=symbolic, **{"mask": "bool", **more}).spec


@pytest.fixture
def measured(monkeypatch):
    """A prompt of 512 tokens as the only one that was measured."""
    choice = {"schedule": "attention", "block_m": 128, "block_n": 64, "block_s": 256, "num_warps": 8, "num_stages": 3}
    found = attention_defaults.entry(prompt(512, 512), choice, 19.6)
    monkeypatch.setattr(attention_defaults, "table", lambda: {"H200": (found,)})
    return attention_defaults.Choice(**{"max_rows": None, **choice})


def test_prompts_take_the_choice_of_prompts_farther_apart(measured):
    for queries, keys, heads in ((512, 512, 8), (300, 512, 8), (2048, 2048, 8), (128, 128, 8), (512, 512, 64)):
        assert defaults.lookup(prompt(queries, keys, heads), None, "NVIDIA H200") == measured, (queries, keys, heads)
    assert defaults.lookup(prompt(70, 70, symbolic=True), None, "NVIDIA H200") == measured  # of any length


def test_a_prompt_is_no_decode_step_nor_of_another_kind(measured):
    assert attention_defaults.entry(prompt(512, 512), {}, 1.0).key != attention_defaults.entry(prompt(512, 512, mask=None), {}, 1.0).key
    for other in (
        prompt(1, 512),
        prompt(16, 512),
        prompt(8192, 8192),
        prompt(512, 512, mask=None),
        prompt(512, 512, mask=None, causal=True),
    ):
        assert defaults.lookup(other, None, "NVIDIA H200") is None
    assert defaults.lookup(prompt(70, 512, symbolic=True), 1, "NVIDIA H200") is None
    assert defaults.lookup(prompt(70, 512, symbolic=True), 16, "NVIDIA H200") is None


@pytest.mark.parametrize("keys", [130, 600], ids=["fewer", "more"])
def test_every_entry_makes_a_kernel_that_is_right(interpreter, keys):
    """With fewer keys than were measured, of which some parts have none, and with more, of which a part has several blocks."""
    shown = torch.rand(1, 1, 1, keys, generator=torch.Generator().manual_seed(3)) < 0.6
    shown[..., : keys // 4] = False
    for entry in attention_defaults.table()["H200"]:
        heads = min(entry.heads, 2)
        queries = 1 if entry.queries == 1 else 70
        case = plans.attention(BF16, 1, heads * entry.group, heads, queries, keys, entry.size, mask=shown.expand(1, 1, queries, keys))
        assert case.expected[0].any()
        choice = attention_defaults.Choice(**{"max_rows": None, **entry.choice})
        (kernel,) = generate(case.spec, choice)
        check(case, interpreter, kernel)
