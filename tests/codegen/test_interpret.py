"""The interpreter as tests use it: bf16 conversions and products, and scalar masks, agree with torch."""

from __future__ import annotations

import pytest
import torch

SOURCE = """\
import triton
import triton.language as tl


@triton.jit
def convert(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float32).to(y_ptr.dtype.element_ty))


@triton.jit
def product(x_ptr, w_ptr, y_ptr, K: tl.constexpr):
    m, k = tl.arange(0, 16), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :])
    w = tl.load(w_ptr + m[None, :] * K + k[:, None])
    tl.store(y_ptr + m[:, None] * 16 + m[None, :], tl.dot(x, w))


@triton.jit
def guarded(at_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.load(at_ptr)
    tl.store(y_ptr + i, 7.0, mask=(at >= 0) & (at < 4))
"""


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_conversions_round_as_torch(interpreter, source, target):
    values = torch.randn(1024) * torch.logspace(-6, 4, 1024)
    values[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1.00390625, 1.01171875])  # two ties of bf16
    x = values.nan_to_num(0, 0, 0).to(source) if source == torch.int32 else values.to(source)
    _, y = interpreter.run(SOURCE, "convert", (1,), [x, torch.zeros(1024, dtype=target)], {"N": 1024})
    assert torch.equal(y, x.float().to(target))


def test_nan_stays_nan_in_bfloat16(interpreter):
    x = torch.full((16,), float("nan"))
    _, y = interpreter.run(SOURCE, "convert", (1,), [x, torch.zeros(16, dtype=torch.bfloat16)], {"N": 16})
    assert y.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_narrow_floats(interpreter, dtype):
    x, w = torch.randn(16, 64).to(dtype), torch.randn(16, 64).to(dtype)
    *_, y = interpreter.run(SOURCE, "product", (1,), [x, w, torch.zeros(16, 16)], {"K": 64})
    torch.testing.assert_close(y, (x.double() @ w.double().T).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at, written", [(0, True), (3, True), (4, False), (-1, False)])
def test_scalar_masks(interpreter, at, written):
    _, y = interpreter.run(SOURCE, "guarded", (1,), [torch.tensor(at), torch.zeros(8)], {"N": 8})
    assert bool((y == 7).all()) == written and bool((y == 0).all()) != written


def test_a_failing_kernel_says_why(interpreter):
    with pytest.raises(RuntimeError, match="no_such_name"):
        interpreter.run(SOURCE.replace("tl.dot(x, w)", "no_such_name"), "product", (1,), [torch.zeros(16, 16)] * 3, {"K": 16})
