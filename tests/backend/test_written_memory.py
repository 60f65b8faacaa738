"""Writes that tracing loses: what shares memory in eager mode shares it compiled, too, or the graph runs as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler.observe import collecting

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def residual(x, y):
    h = F.dropout(x, 0.1, training=False)
    h += y
    return F.linear(h, W) + x


def residual_of_a_product(x, y):
    x = F.linear(x, W)
    h = F.dropout(F.dropout(x, 0.0, True), 0.1, training=False)
    h[1:] = y[1:]
    return h, x + 1


def source_written(x, y):
    h = torch.dropout(x, 0.5, False)
    x.mul_(y)
    return h * 2


def written_as_the_output_of_another(x, y):
    h = F.dropout(x, 0.1, training=False)
    torch.add(h, y, out=h)
    return h, x * 2


def written_by_position(x, y):
    h = F.dropout(x - y, 0.1, training=False)
    z = h.view(-1)
    F.relu(z, True)
    return h + 1


def out_of_place(x, y):
    return F.linear(F.dropout(x, 0.1, training=False), W) + y.mul_(2)


WRITING = [residual, residual_of_a_product, source_written, written_as_the_output_of_another, written_by_position]


@pytest.mark.parametrize("tracer", ["auto", "aot"])
@pytest.mark.parametrize("function", [*WRITING, out_of_place])
def test_dropout_that_is_off_shares_its_memory(function, tracer):
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    mine, theirs = [x.clone(), y.clone()], [x.clone(), y.clone()]
    with torch.no_grad():
        wanted = function(*theirs)
        got = torch.compile(function, backend="dsi", options={"executor": "reference", "tracer": tracer})(*mine)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine, theirs)


def test_a_dropout_that_nobody_writes_around_stays_where_it_is():
    """Its removal later counts as any rewrite does."""
    with torch.no_grad(), collecting() as contexts:
        torch.compile(out_of_place, backend="dsi", options={"executor": "reference"})(torch.randn(3, 8), torch.randn(3, 8))
    (context,) = contexts
    assert context.report.hits["no_op_copy"] + context.report.hits["no_op_dropout"] == 1


def foreach(x):
    torch._foreach_add_([x[:2], x[1:]], 1)
    return x * 1


def addressed(x):
    x.add_(1)
    return x.as_strided((2,), (1,), 0) * 2


@pytest.mark.parametrize(
    ("function", "make", "reason"),
    [
        (foreach, lambda: torch.ones(3), "tensors that share memory are written to in one call"),
        (addressed, lambda: torch.arange(1.0, 7)[2:], "memory is addressed from its beginning"),
    ],
)
def test_what_tracing_does_not_keep_runs_as_it_is(function, make, reason):
    x, y = make(), make()
    with torch.no_grad(), collecting() as contexts, pytest.warns(UserWarning, match="stepped aside"):
        got = torch.compile(function, backend="dsi")(x)
    assert any(reason in note for context in contexts for note in context.report.notes)
    torch.testing.assert_close(got, function(y))
    torch.testing.assert_close(x, y)
