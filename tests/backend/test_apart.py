"""Inputs that share memory in some calls and not in others: each call writes what eager writes."""

from __future__ import annotations

import pytest
import torch
from dsi.compiler.apart import inputs_that_lie_apart
from dsi.compiler.observe import collecting


def doubled_and_added(x, y):
    x.mul_(2)
    return x + y, y * 3


def whole(x, y):
    return y.copy_(x + 1)


def lying(apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.arange(8.0)
    return (memory[:4].clone(), memory[2:6].clone()) if apart else (memory[:4], memory[2:6])


@pytest.mark.parametrize("tracer", ["auto", "aot"])
@pytest.mark.parametrize("first", [True, False], ids=["apart first", "together first"])
@pytest.mark.parametrize("function", [doubled_and_added, whole])
def test_inputs_apart_and_together_in_turn(function, first, tracer):
    run = torch.compile(function, backend="dsi", options={"executor": "reference", "tracer": tracer})
    with torch.no_grad():
        for apart in (first, not first, first, not first):
            mine, theirs = lying(apart), lying(apart)
            got, wanted = run(*mine), function(*theirs)
            torch.testing.assert_close((got, mine), (wanted, theirs))


def test_parts_of_one_memory_that_do_not_overlap_are_compiled():
    """Keys and values in one allocation."""
    memory, other = torch.zeros(2, 4), torch.zeros(2, 4)
    with torch.no_grad(), collecting() as contexts:
        run = torch.compile(doubled_and_added, backend="dsi", options={"executor": "reference"})
        torch.testing.assert_close(run(*memory.add_(1)), doubled_and_added(*other.add_(1)))
    torch.testing.assert_close(memory, other)
    assert not contexts[0].report.notes


@pytest.mark.parametrize("written, stays, asked", [(True, False, True), (False, False, False), (True, True, False)])
def test_only_what_is_written_and_may_move_is_asked_about(written, stays, asked):
    found = []

    def look(gm, inputs):
        found.append(inputs_that_lie_apart(gm))
        return gm.forward

    def function(x, y):
        return (x.add_(y) if written else x + y) * 2

    x = torch.zeros(4)
    if stays:
        torch._dynamo.mark_static_address(x)
    with torch.no_grad():
        torch.compile(function, backend=look)(x, torch.ones(4))
    assert (found[0] is not None) == asked


def test_sizes_that_change_are_looked_at_anew():
    run = torch.compile(doubled_and_added, backend="dsi", dynamic=True, options={"executor": "reference"})
    mine, theirs = torch.arange(12.0), torch.arange(12.0)
    with torch.no_grad():
        for length in (3, 5, 8, 4):  # from the same place on; the second one begins behind it, or within
            got, wanted = run(mine[:length], mine[4 : 4 + length]), doubled_and_added(theirs[:length], theirs[4 : 4 + length])
            torch.testing.assert_close((got, mine), (wanted, theirs))
