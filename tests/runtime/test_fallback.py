"""A kernel that the device cannot hold gives way to the references, once and for all, and the report says so."""

from __future__ import annotations

import torch
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.runtime import fallback
from dsi.runtime.fallback import FallingBack
from triton.runtime.errors import OutOfResources


class TooLarge:
    calls = 0

    def allocate(self, size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    def __call__(self, inputs, outputs, sizes):
        self.calls += 1
        raise OutOfResources(300_000, 232_448, "shared memory")

    def describe(self):
        return "too large"


class Named:
    name = "region_7"


def test_references_take_over(monkeypatch, caplog):
    ran = []

    class Reference:
        def __init__(self, region):
            self.region = region

        def __call__(self, inputs, outputs, sizes):
            ran.append(self.region.name)
            outputs[0].copy_(inputs[0] + 1)

        def describe(self):
            return "by references"

    monkeypatch.setattr(fallback, "ReferenceKernel", Reference)
    context, kernel = Context(Options()), TooLarge()
    guarded = FallingBack(kernel, Named(), context)
    assert guarded.describe() == "too large"
    x, out = torch.ones(3), torch.empty(3)
    for _ in range(2):
        guarded([x], [out], ())
    assert ran == ["region_7"] * 2 and kernel.calls == 1 and torch.equal(out, x + 1)
    (refusal,) = context.report.unfused
    assert "shared memory" in refusal.reason and refusal.node == "region_7" and "region_7" in caplog.text
    assert guarded.describe() == "by references"
