"""Writes to inputs that are made results, and those that have to stay where they are."""

from __future__ import annotations

import pytest
import torch
from dsi.runtime.results import take_writes
from torch import fx

ATEN = torch.ops.aten


@pytest.mark.parametrize("read", ["nothing", "input", "view"])
def test_a_write_waits_only_for_what_nobody_reads_after_it(read):
    graph = fx.Graph()
    into, value = (graph.placeholder(name) for name in ("into", "value"))
    view = graph.call_function(ATEN.view.default, (into, [4]))
    twice = graph.call_function(ATEN.mul.Tensor, (view, 2))
    graph.call_function(ATEN.copy_.default, (into, value))
    after = {"nothing": twice, "input": into, "view": view}[read]
    result = twice if read == "nothing" else graph.call_function(ATEN.add.Tensor, (after, 1))
    graph.output((result,))
    gm = fx.GraphModule({}, graph)
    assert take_writes(gm) == ([0] if read == "nothing" else [])
    held, new = torch.zeros(2, 2), torch.ones(2, 2)
    first, *written = gm(held, new)
    if read == "nothing":
        assert not first.any() and not held.any() and torch.equal(written[0], new)
    else:
        assert torch.equal(first.flatten(), torch.full((4,), 2.0)) and torch.equal(held, new)
