"""int8 linears on a CPU at sizes that torch's own integer kernels do not take: one entry a row, rows that are no whole vectors."""

from __future__ import annotations

import pytest
import torch
from dsi.ir.quantised_ops import linear_int8_reference
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.runtime import cpu_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("k", [1, 2, 7, 33, 48, 64])
def test_any_number_of_entries_a_row(k, rows, dtype, monkeypatch):
    monkeypatch.setattr(cpu_int8, "has_integer_products", lambda: True)
    generator = torch.Generator().manual_seed(k)
    x, weight = (torch.randn(n, k, generator=generator).to(dtype) for n in (rows, 5))
    packed = quantise(weight, Format(Grouping()), name="w")
    got = cpu_int8.linear_int8(x, packed.weight, packed.scales)
    wanted = linear_int8_reference(x.float(), packed.weight, packed.scales).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_compiled():
    linear = torch.nn.Linear(33, 5).bfloat16()
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        got, wanted = (torch.compile(linear, backend="dsi", options={"dtype": "int8", "executor": e})(x) for e in ("auto", "reference"))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
