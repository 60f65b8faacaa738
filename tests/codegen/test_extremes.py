"""Shapes at the edge of what a program can own still get a kernel, and the right numbers."""

from __future__ import annotations

import pytest
import torch

from tests.ir.bodies import dsi

from .test_bodies import assert_kernel_computes, randoms


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("size", [320, 512])
def test_norm_of_very_wide_heads(interpreter, rows, size):
    def heads(x, w, g):
        return dsi.rms_norm(dsi.linear(x, w).view(rows, 2, size), g, eps=1e-5)

    assert_kernel_computes(heads, randoms(torch.float32, (rows, 16), (2 * size, 16), (size,)), interpreter)


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_many_windows_in_one_epilogue(interpreter, rows):
    def total(x, *weights):
        parts = [dsi.linear(x, w) for w in weights]
        while len(parts) > 1:
            parts = [a * b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    assert_kernel_computes(total, randoms(torch.float32, (rows, 40), *[(20, 40)] * 32), interpreter)
