"""Lanes beyond a tensor's size never count, also where a tensor repeats one value along the padded axis, so that no load is masked."""

from __future__ import annotations

import pytest
import torch

from tests.ir.bodies import dsi

from .test_bodies import assert_kernel_computes, randoms


@pytest.mark.parametrize("size", [100, 2100], ids=["one block", "several steps"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_statistics_of_a_repeated_value(interpreter, norm, size):
    def repeated(x, g, b):
        y = x.expand(3, size)
        return dsi.rms_norm(y, g, eps=1e-5) + b if norm == "rms" else dsi.layer_norm(y, g, b, eps=1e-5)

    assert_kernel_computes(repeated, [torch.tensor([[1.5], [-3.0], [40.0]]), *randoms(torch.float32, (size,), (size,))], interpreter)


def test_statistics_of_a_repeated_value_before_a_linear(interpreter):
    def project(x, g, w):
        return dsi.linear(dsi.rms_norm(x.expand(3, 100), g, eps=1e-5), w)

    assert_kernel_computes(project, [torch.tensor([[1.5], [-3.0], [40.0]]), *randoms(torch.float32, (100,), (21, 100))], interpreter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_channels_that_repeat_one_value(interpreter, dtype):
    def attend(q, k, v):
        return dsi.attention(q.expand(2, 3, 5, 20), k.expand(2, 3, 7, 20), v, scale=0.3)

    assert_kernel_computes(attend, randoms(dtype, (2, 3, 5, 1), (2, 3, 7, 1), (2, 3, 7, 20)), interpreter)
