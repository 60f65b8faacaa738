"""Whatever chain of views and pointwise operations a region holds: its plan computes the same, or there is none."""

from __future__ import annotations

import torch
from dsi.ir.analysis import plan_region
from dsi.ir.errors import Refused
from dsi.ir.tile import LinearPlan, RowPlan
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from .bodies import assert_means, body_of, dsi
from .chains import programs, run

SETTINGS = settings(max_examples=1200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False, database=None)


def strided(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor whose memory order is the reverse of its dimensions', with gaps."""
    wide = torch.randn([n + 1 for n in reversed(shape)], generator=generator)
    return wide.permute(list(reversed(range(len(shape)))))[tuple(slice(0, n) for n in shape)]


@SETTINGS
@given(st.data(), st.sampled_from([(3, 8), (2, 3, 6), (5, 1, 4), (12,), (2, 3, 4, 5)]), st.integers(0, 99))
def test_a_chain_on_an_input_always_has_a_plan(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    steps, further = data.draw(programs(shape))
    generator = torch.Generator().manual_seed(seed)
    inputs = [strided(s, generator) for s in (shape, *further)]

    def function(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return run(steps, x, list(more)).clone(memory_format=torch.contiguous_format)

    body = body_of(function, inputs)
    plan = plan_region(body)
    assert isinstance(plan, RowPlan)
    assert_means(body, plan, function, inputs)


@SETTINGS
@given(st.data(), st.sampled_from([(2, 3), (3, 5), (1, 7)]), st.sampled_from([12, 16, 30]), st.integers(0, 99), st.booleans())
def test_a_chain_on_a_linear_is_right_or_refused(data: st.DataObject, lead: tuple[int, ...], columns: int, seed: int, kn: bool) -> None:
    steps, further = data.draw(programs((*lead, columns), longest=5))
    before, before_further = data.draw(programs((*lead, 8), longest=2))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((*lead, 8), generator=generator)
    inner = run(before, x, [torch.zeros(s) for s in before_further])
    assume(inner.dim() > 1 and inner.shape[:-1].numel() == lead[0] * lead[1])
    k = inner.shape[-1]
    weight = torch.randn((k, columns) if kn else (columns, k), generator=generator)
    inputs = [strided(s, generator) for s in ((*lead, 8), *before_further)]
    count = len(inputs)
    inputs += [weight, *(strided(s, generator) for s in further)]

    def function(*given: torch.Tensor) -> torch.Tensor:
        h = run(before, given[0], list(given[1:count]))
        y = dsi.linear(h, given[count], kn=kn).reshape(*lead, columns)
        return run(steps, y, list(given[count + 1 :])).clone(memory_format=torch.contiguous_format)

    body = body_of(function, inputs)
    try:
        plan = plan_region(body)
    except Refused as refused:
        event(f"refused by {refused.refusal.rule}")
        return
    event("planned")
    assert isinstance(plan, LinearPlan)
    assert_means(body, plan, function, inputs, 1e-4)


@SETTINGS
@given(st.data(), st.integers(0, 99))
def test_a_chain_around_attention_is_right_or_refused(data: st.DataObject, seed: int) -> None:
    batch, heads, queries, keys, size = 2, 4, 3, 5, 6
    before, before_further = data.draw(programs((batch, heads, queries, size), longest=3))
    after, after_further = data.draw(programs((batch, heads, queries, size), longest=4))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, queries, size, generator=generator)
    assume(run(before, x, [torch.zeros(s) for s in before_further]).shape == x.shape)
    shapes = ((batch, heads, queries, size), (batch, 2, keys, size), (batch, 2, keys, size), *before_further, *after_further)
    inputs = [strided(s, generator) for s in shapes]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        q = run(before, q, list(more[: len(before_further)]))
        y = dsi.attention(q, k, v, None, None, scale=0.4)
        return run(after, y, list(more[len(before_further) :])).clone(memory_format=torch.contiguous_format)

    body = body_of(function, inputs)
    try:
        plan = plan_region(body)
    except Refused as refused:
        event(f"refused by {refused.refusal.rule}")
        return
    event("planned")
    assert_means(body, plan, function, inputs, 1e-4)


@settings(SETTINGS, max_examples=500)
@given(st.data(), st.sampled_from([7, 17]), st.sampled_from([11, 19]), st.integers(0, 99))
def test_symbolic_leading_sizes_change_nothing(data: st.DataObject, batch: int, length: int, seed: int) -> None:
    """The same chains on the columns, with a symbolic batch and length: one plan, right for other sizes too."""
    steps, further = data.draw(programs((4, 6), longest=4))
    generator = torch.Generator().manual_seed(seed)

    def function(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return run(steps, x, list(more), lead=2).clone(memory_format=torch.contiguous_format)

    more = [torch.randn(s, generator=generator) for s in further]
    inputs = [torch.randn(batch, length, 4, 6, generator=generator), *more]
    body = body_of(function, inputs, dynamic={batch, length})
    plan = plan_region(body)
    assert plan.rows.free_symbols or plan.columns.free_symbols
    for b, n in ((batch, length), (1, 13), (2, 1)):
        assert_means(body, plan, function, [torch.randn(b, n, 4, 6, generator=generator), *more])
