"""Merging equal operators of an expanded graph: what may be merged, and what may not."""

from __future__ import annotations

import torch
from dsi.runtime.deduplicate import deduplicate
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def traced(function, *inputs):
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value) for value in inputs]
    with mode:
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)


def merged(function, *inputs):
    """How many operators were merged, having checked that the numbers and what is written to the inputs stayed the same."""
    gm = traced(function, *inputs)
    gone = deduplicate(gm)
    gm.graph.lint()
    for _ in range(2):
        fresh = [torch.randn_like(value) if value.is_floating_point() else value for value in inputs]
        mine, theirs = [value.clone() for value in fresh], [value.clone() for value in fresh]
        got, expected = gm(*mine), function(*theirs)
        assert all(torch.equal(a, b) for a, b in zip((*got, *mine), (*expected, *theirs), strict=True))
    return gone


def test_equal_operators_are_computed_once():
    assert merged(lambda x: (torch.where(x > 0, x, 0.5) + torch.where(x > 0, x, 0.5),), torch.randn(3, 5)) >= 2


def test_other_arguments_and_literals_of_other_types_are_not_equal():
    assert merged(lambda x, y: (x * 2.0, y * 2.0, x * 3.0), torch.randn(3), torch.randn(3)) == 0
    aten = torch.ops.aten
    assert merged(lambda i: (aten.mul.Scalar(i, 1), aten.mul.Scalar(i, 1.0)), torch.arange(3)) == 0


def test_what_reads_written_memory_stays():
    def reads_twice(x):
        before = x + 1.0
        x.mul_(3.0)
        return before, x + 1.0

    def through_a_view(x):
        before = x[1:] + 1.0
        x[:2].zero_()
        return before, x[1:] + 1.0

    assert merged(reads_twice, torch.randn(4)) == 0
    assert merged(through_a_view, torch.randn(4)) == 0


def test_fresh_tensors_that_are_written_stay_apart():
    def two(x):
        a, b = torch.zeros(4), torch.zeros(4)
        a.add_(x)
        return a, b + x

    def both(x):
        a, b = torch.zeros(4), torch.zeros(4)
        a.add_(x)
        b.add_(x * 2)
        return a, b

    assert merged(two, torch.randn(4)) == 0
    assert merged(both, torch.randn(4)) == 0


def test_random_numbers_are_drawn_as_often_as_before():
    gm = traced(lambda x: (torch.rand_like(x), torch.rand_like(x)), torch.randn(3))
    assert deduplicate(gm) == 0


def test_results_that_a_caller_may_write_to_stay_apart():
    gm = traced(lambda x: (x + 1.0, x + 1.0, (x * 2.0)[:2], (x * 2.0)[1:]), torch.randn(3))
    deduplicate(gm)
    results = gm(torch.randn(3))
    assert len({result.untyped_storage().data_ptr() for result in results}) == 4
