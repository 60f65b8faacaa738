"""Ids that a table does not have: no kernel reads memory beside it, and what it gives instead of a row is seen."""

from __future__ import annotations

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.ir.analysis import kernel_spec, plan_region
from torch import Tensor

from tests.ir.bodies import body_of, dsi

from .support import execute


def embedded_and_normed(table: Tensor, ids: Tensor) -> Tensor:
    return dsi.layer_norm(dsi.embedding(table, ids) * 2, None, None, eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [lambda table, ids: dsi.embedding(table, ids) * 2, embedded_and_normed])
def test_a_row_that_is_not_there_is_no_number(function, dtype, interpreter):
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids, allowed = torch.tensor([3, 7, -1, 6]), torch.tensor([3, 0, 0, 6])
    body = body_of(function, (table, ids))
    (kernel,) = generate(kernel_spec("embedded", body, plan_region(body)))
    (got,) = execute(kernel, [table, ids], [torch.empty(4, 5, dtype=dtype)], int, interpreter)
    there = ids == allowed
    torch.testing.assert_close(got[there], function(table, allowed)[there])
    assert bool(got[~there].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["gemv", "skinny", "tiled"])
def test_nor_is_what_is_multiplied_with_it(schedule, dtype, interpreter):
    """Where rows go to the matrix units as they lie in the table, too."""
    generator = torch.Generator().manual_seed(0)
    table, weight = (torch.randn(size, 32, generator=generator).to(dtype) for size in (7, 16))
    ids, allowed = torch.tensor([3, 7, -1, 6]), torch.tensor([3, 0, 0, 6])
    body = body_of(lambda table, ids, weight: dsi.linear(dsi.embedding(table, ids), weight, None), (table, ids, weight))
    choice = Choice(schedule, None, 4 if schedule == "gemv" else 16, 8, 16, 16, 4, 1)
    (kernel,) = generate(kernel_spec("multiplied", body, plan_region(body)), choice)
    (got,) = execute(kernel, [table, ids, weight], [torch.empty(4, 16, dtype=dtype)], int, interpreter)
    there = ids == allowed
    torch.testing.assert_close(got[there], torch.nn.functional.linear(table[allowed], weight)[there], atol=0.05, rtol=0.02)
    assert bool(got[~there].isnan().all())
