"""Nested compile regions: their calls are compiled like any other code."""

from __future__ import annotations

import pytest
import torch
from dsi.compiler import observe
from torch import nn

import dsi

nested = torch.compiler.nested_compile_region


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.offset = torch.arange(8.0)

    @nested
    def first(self, x):
        return nn.functional.gelu(self.up(self.norm(x))), x + self.offset

    @nested
    def forward(self, x):
        up, x = self.first(x)
        return x + self.down(up)


def test_rules_see_what_is_in_nested_regions():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(2))).eval(), torch.randn(3, 8)
    report = dsi.explain(model, x)
    assert not report.unfused and len(report.regions) == 4
    compiled = torch.compile(model, backend="dsi", options={"executor": "reference"}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_random_numbers_in_a_nested_region_are_drawn_as_in_eager_mode(monkeypatch):
    monkeypatch.setattr(observe, "_said", set())  # each kind of reason is said once a process
    drop, x = nested(lambda x: nn.functional.dropout(x, 0.5)), torch.ones(64)
    compiled = torch.compile(lambda x: drop(x) + 2 * drop(x), backend="dsi")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        expected = drop(x) + 2 * drop(x)
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="an operator is random"):
            assert torch.equal(compiled(x), expected)
