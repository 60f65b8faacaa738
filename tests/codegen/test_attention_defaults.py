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


@pytest.mark.parametrize("keys", [130, 600], ids=["fewer", "more"])
def test_every_entry_makes_a_kernel_that_is_right(interpreter, keys):
    """With fewer keys than were measured, of which some parts have none, and with more, of which a part has several blocks."""
    shown = torch.rand(1, 1, 1, keys, generator=torch.Generator().manual_seed(3)) < 0.6
    shown[..., : keys // 4] = False
    for entry in attention_defaults.table()["H200"]:
        heads = min(entry.heads, 2)
        case = plans.attention(BF16, 1, heads * entry.group, heads, 1, keys, entry.size, mask=shown)
        assert case.expected[0].any()
        choice = attention_defaults.Choice(**{"max_rows": None, **entry.choice})
        (kernel,) = generate(case.spec, choice)
        check(case, interpreter, kernel)
