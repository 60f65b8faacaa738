"""A mask of positions that one attention reads is computed within it; what several read, or what costs more, by a kernel of its own."""

from __future__ import annotations

import pytest
import torch
from fuse.graphs import HEAD, D, fused, kinds, labels, members, outer
from torch import Tensor

QUERIES, KEYS = 3, 11


def inputs(batch: int = 2) -> list[Tensor]:
    q, k, v = (torch.randn(batch, 2, tokens, HEAD) for tokens in (QUERIES, KEYS, KEYS))
    return [q, k, v]


def before(position: Tensor) -> Tensor:
    """Which keys each query may see: those up to its position."""
    return torch.arange(KEYS) <= position[:, None]


def windowed(position: Tensor) -> Tensor:
    """And of these the last four."""
    keys, last = torch.arange(KEYS), (position + 1)[:, None]
    return (keys < last) & (keys > last - 5)


@pytest.mark.parametrize("mask, count", [(before, 1), (windowed, 5)])
def test_what_hides_keys_by_their_positions_is_part_of_the_attention(mask, count):
    def f(q, k, v, position):
        return D.attention(q, k, v, mask(position)[None, None], scale=0.25)

    gm, ctx = fused(f, *inputs(), torch.tensor([4, 0, 9]))
    assert kinds(ctx) == ["attention"] and outer(gm) == []
    assert len([name for name in members(ctx.report.regions[0]) if name not in ("attention", "arange", "unsqueeze")]) == count


def test_the_number_of_queries_need_not_be_known():
    def f(q, k, v, start):
        return D.attention(q, k, v, before(start + torch.arange(q.shape[2]))[None, None], scale=0.25)

    gm, ctx = fused(f, *inputs(), torch.tensor([6]), symbolic={0: (2,)})
    assert kinds(ctx) == ["attention"] and outer(gm) == ["sym_size"]


@pytest.mark.parametrize("how", ["two attentions", "returned", "padding", "added", "as many as keys"])
def test_any_other_mask_is_a_kernel_of_its_own(how):
    def f(q, k, v, position, real):
        mask = before(position)[None, None]
        if how == "padding":  # a value a key is read
            mask = mask & real[:, None, None, :]
        if how == "as many as keys":
            mask = (real.to(torch.int64) + 1 > 1)[:, None, None, :]
        if how == "added":
            mask = torch.where(mask, 0.0, -1e4)
        out = D.attention(q, k, v, mask, scale=0.25)
        if how == "two attentions":
            out = D.attention(out, k, v, mask, scale=0.25)
        return (out, mask) if how == "returned" else out

    real = torch.ones(2, KEYS, dtype=torch.bool)
    real[1, :2] = False
    _, ctx = fused(f, *inputs(), torch.tensor([4, 3, 9]), real)
    assert kinds(ctx).count("row") == 1
    assert all(label.startswith("attention") for label, kind in zip(labels(ctx), kinds(ctx), strict=True) if kind == "attention")
