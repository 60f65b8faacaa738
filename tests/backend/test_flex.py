"""Flex attention: an operator that calls graphs, whose result lies in memory as its query does."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def test_what_is_around_flex_attention_is_compiled(recwarn):
    torch.manual_seed(0)
    project, angles = nn.Linear(64, 64), torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1] * 8)
    seen = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)

    def attend(x):
        q = project(x).view(2, 16, 4, 16).transpose(1, 2)
        turned = q * angles.cos() + torch.cat([-q[..., 8:], q[..., :8]], -1) * angles.sin()
        return project(flex_attention(turned, q, q, block_mask=seen).transpose(1, 2).view(2, 16, 64))

    x = torch.randn(2, 16, 64)
    with torch.no_grad():
        got = torch.compile(attend, backend="dsi")(x)
        torch.testing.assert_close(got, attend(x), rtol=1e-4, atol=1e-4)
    assert not any("slowly" in str(warning.message) or "aside" in str(warning.message) for warning in recwarn)
