"""Reads, writes and results that share memory, of the kinds in which compilers are reported to be wrong: each is as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsi.compiler.observe import collecting
from torch import Tensor
from torch.utils import _pytree as pytree


def read_as_another_dtype(x):
    y = x.view(torch.int32) * 2
    x[:, 2:5] = 2
    return y.view(torch.int64)


def copied_before_its_source_is_written(to, source):
    to[0:] = source[0:]
    source.add_(1)
    return source


def shifted(x):
    x[1:] = x[:-1].clone()
    return x


def written_with_its_own_mirror(x):
    torch._foreach_add_([x], [x.flip(0)])
    return x


def exchanged(a, b):
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return a - b


def returned_in_several_ways(x):
    y = x * 2
    x.sin_()
    return x, x.view(-1), y, x


def with_tensors_of_zeros_and_ones(x):
    y = x.sin()
    return x + torch.zeros(3, 4), x * torch.ones(1), (x.t() - torch.zeros(4, 3)).t(), y, y + torch.zeros_like(y)


def zeroed_and_added(x, y):
    z = y.sin()
    x.zero_()
    return z, x + z


INTEGERS = torch.arange(-6, 6).view(3, 4)
CASES: list[tuple[Callable[..., Any], list[Tensor]]] = [
    (read_as_another_dtype, [torch.arange(-12, 12).view(4, 6)]),
    (copied_before_its_source_is_written, [torch.zeros(3, 4), INTEGERS / 7]),
    (lambda source, to: copied_before_its_source_is_written(to, source), [INTEGERS / 7, torch.zeros(3, 4)]),
    (shifted, [INTEGERS / 7]),
    (written_with_its_own_mirror, [INTEGERS / 7]),
    (exchanged, [INTEGERS / 7, INTEGERS * 2.0]),
    (returned_in_several_ways, [INTEGERS / 7]),
    (with_tensors_of_zeros_and_ones, [INTEGERS / 7]),
    (zeroed_and_added, [INTEGERS / 7, INTEGERS * 2.0]),
]


def sharing(*values: Any) -> list[list[bool]]:
    """Which of the tensors in `values` share memory."""
    places = [value.untyped_storage()._cdata for value in pytree.tree_leaves(values)]
    return [[one == other for other in places] for one in places]


@pytest.mark.parametrize("executor", ["reference", "auto"])
@pytest.mark.parametrize("function, inputs", CASES)
def test_memory_is_read_written_and_shared_as_in_eager_mode(function, inputs, executor):
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    with torch.no_grad():
        got = torch.compile(function, backend="dsi", options={"executor": executor})(*mine)
        wanted = function(*theirs)
    torch.testing.assert_close((got, mine), (wanted, theirs))
    assert sharing(mine, got) == sharing(theirs, wanted)


def filled(x):
    x.expand(3, -1).fill_(2.0)
    return x * 1


def one_row_written(x):
    rows = x.expand(3, -1)
    rows[1].mul_(2)
    return x + 1, rows


def windows(x):
    y = x + x
    return y.unfold(0, 3, 2).abs_(), y


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [filled, one_row_written, windows])
def test_writes_to_what_shows_a_place_several_times_run_as_they_are(function, dynamic):
    """Made functional, such a write adds up what it writes to each of them."""
    x = torch.arange(-3.0, 4.0)
    mine = x.clone()
    with torch.no_grad(), collecting() as contexts:
        got = torch.compile(function, backend="dsi", dynamic=dynamic, options={"executor": "reference"})(mine)
    torch.testing.assert_close((got, mine), (function(x), x))
    assert "several times" in contexts[0].report.notes[0]


def windows_apart(x):
    x.unfold(0, 2, 4).mul_(3)
    return x + 1


def windows_short_of_the_end(x):
    y = x * 2
    y.unfold(0, 3, 3).fill_(5)
    return y


def windows_that_cover(x):
    y = x[:6] * 2
    y.unfold(0, 3, 3).mul_(5)
    return y


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function, aside", [(windows_apart, True), (windows_short_of_the_end, True), (windows_that_cover, False)])
def test_what_windows_leave_out_is_kept_when_they_are_written_to(function, aside, dynamic):
    """Made functional, a tensor of which windows are written to is made anew of these, with zeros between."""
    x = torch.arange(-3.0, 4.0)
    mine = x.clone()
    with torch.no_grad(), collecting() as contexts:
        got = torch.compile(function, backend="dsi", dynamic=dynamic, options={"executor": "reference"})(mine)
    torch.testing.assert_close((got, mine), (function(x), x))
    assert any("leave some of it out" in note for note in contexts[0].report.notes) == aside


@pytest.mark.parametrize("view", [lambda part: part[0], lambda part: part.view(-1), lambda part: part.t()])
def test_views_of_inputs_that_share_what_is_written(view):
    """AOTAutograd makes such a view anew of the whole memory, whatever it was a view of."""

    def function(whole, part):
        whole.add_(100)
        return view(part), whole * 2

    mine, theirs = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    with torch.no_grad():
        got = torch.compile(function, backend="dsi", options={"executor": "reference"})(mine, mine[1:])
        wanted = function(theirs, theirs[1:])
    torch.testing.assert_close((got, mine), (wanted, theirs))
    assert sharing(mine, got) == sharing(theirs, wanted)


def resized(x):
    y = x + 1
    z = y.view(y.shape)
    z.resize_(1)  # Dynamo leaves that to Python
    return y, z


def with_a_dimension_more(x):
    y = x + 1
    z = y.view(y.shape)
    return y, z, z


def test_two_tensors_of_one_memory_are_two():
    x = torch.randn(4, 3)
    with torch.no_grad():
        y, z = torch.compile(resized, backend="dsi")(x)
        assert torch.equal(y, x + 1) and torch.equal(z, (x + 1).view(-1)[:1])
        y, z, again = torch.compile(with_a_dimension_more, backend="dsi")(x)
    z.unsqueeze_(0)
    assert y.shape == (4, 3) and z.shape == (1, 4, 3) and again is z


@pytest.mark.parametrize("dynamic", [None, True])
def test_writes_around_what_shows_a_place_several_times_are_compiled(dynamic):
    def function(x, y):
        y.add_(x.expand(3, -1))
        y[:, ::2].mul_(2)
        return y.t() + 1

    inputs = [torch.arange(4.0), torch.zeros(3, 4)]
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    with torch.no_grad(), collecting() as contexts:
        got = torch.compile(function, backend="dsi", dynamic=dynamic, options={"executor": "reference"})(*mine)
    torch.testing.assert_close((got, mine), (function(*theirs), theirs))
    assert not contexts[0].report.notes


def part_addressed(x):
    return (x + 1)[1:].as_strided((2,), (1,), 0)


def rolled_and_addressed(x):
    return x.roll(-1, 0).as_strided((3, 4), (4, 1), 0)


def overlapping_chunks(x):
    y = x.transpose(0, 1).reshape(3, 4)
    return y.as_strided((5, 4), (2, 1)) + 1


def written_and_copied_by_address(x):
    y = (x * 2)[:, ::2]
    y.add_(1)
    return torch.as_strided_copy(y, (3,), (2,))


@pytest.mark.parametrize(
    "function, x, aside",
    [
        (part_addressed, INTEGERS / 7, True),
        (rolled_and_addressed, (INTEGERS / 7).view(4, 3).t(), True),
        (overlapping_chunks, INTEGERS.view(4, 3) / 7, False),
        (written_and_copied_by_address, INTEGERS / 7, True),
    ],
)
def test_memory_that_is_addressed_is_what_it_is_in_eager_mode(function, x, aside):
    with torch.no_grad(), collecting() as contexts:
        got = torch.compile(function, backend="dsi")(x)
    torch.testing.assert_close(got, function(x))
    assert bool(contexts[0].report.notes) == aside
