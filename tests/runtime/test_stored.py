"""Results that a kernel stores where a `copy_` would put them: exactly where nobody can tell."""

from __future__ import annotations

import pytest
import torch
from dsi.ir import ops
from dsi.passes.lower import lower
from dsi.runtime.program import build, no_kernels, reference_kernels
from lowered_graphs import Outer

COPY = torch.ops.aten.copy_.default
KERNELS = {"by members": no_kernels, "by kernels": reference_kernels}


def lowered(outer, *results):
    gm = outer.finish(*results)
    outer.plan()
    lower(gm, outer.context())
    return gm


def written(text):
    """Steps of a program that copy."""
    return [line for line in str(text).splitlines() if "copy" in line]


def counters(count, function, kind="row", shape=()):
    outer = Outer()
    given = [torch.arange(torch.Size(shape).numel()).reshape(shape) + number for number in range(count)]
    inputs = [outer.input(f"n{number}", value) for number, value in enumerate(given)]
    return outer, given, inputs, outer.region("add", function, *inputs, kind=kind)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_lengths_of_all_layers_are_stored_by_the_kernel_that_adds_to_them(shape, kernels):
    outer, given, inputs, results = counters(3, lambda *n: tuple(value + 1 for value in n), shape=shape)
    read = outer.call(torch.ops.aten.mul.Tensor, inputs[0], 2)
    results[0].args[0].prepend(read)
    copies = [outer.call(COPY, *pair) for pair in zip(inputs, results, strict=True)]
    program = build(lowered(outer, read, copies[1]), outer.fakes, kernels)
    assert len(written(program)) == (0 if kernels is reference_kernels else 1)
    wanted, twice = [value + 1 for value in given], given[0] * 2
    doubled, found = program(list(given))
    assert found is given[1] and torch.equal(doubled, twice)
    assert all(map(torch.equal, given, wanted))


def test_a_value_that_comes_from_elsewhere_is_stored_too():
    outer = Outer()
    state, new = outer.input("state", torch.zeros(2, 6)), outer.input("new", torch.randn(2, 6))
    (result,) = outer.region("twice", lambda new: (new * 2,), new, kind="row")
    outer.call(COPY, state, result)
    program = build(lowered(outer, new), outer.fakes, reference_kernels)
    given = [torch.zeros(2, 6), torch.randn(2, 6)]
    program(list(given))
    assert not written(program) and torch.equal(given[0], given[1] * 2)


REGIONS = {
    "another output reads it": lambda a, b: (a + 1, a * b),
    "at another point": lambda a, b: (a.flip(-1) + 1, b + 1),
    "through its own view": lambda a, b: (a + a.transpose(0, 1), b + 1),
    "statistics of its row": lambda a, b: (ops.rms_norm(a, None, eps=1e-6), b + 1),
}


@pytest.mark.parametrize("function", REGIONS.values(), ids=REGIONS)
def test_a_kernel_that_looks_at_the_input_otherwise_stores_elsewhere(function):
    outer = Outer()
    inputs = [outer.input(name, torch.randn(4, 4)) for name in "ab"]
    results = outer.region("row", function, *inputs, kind="row")
    outer.call(COPY, inputs[0], results[0])
    program = build(lowered(outer, results[1]), outer.fakes, reference_kernels)
    assert len(written(program)) == 1
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    wanted = function(a.clone(), b)
    (other,) = program([a, b])
    assert torch.equal(a, wanted[0]) and torch.equal(other, wanted[1])


@pytest.mark.parametrize("how", ["read later", "read later as a view", "returned by itself", "written twice", "copied twice"])
def test_a_value_that_others_see_is_copied_at_the_end(how):
    outer = Outer()
    a, b = (outer.input(name, torch.randn(4, 4)) for name in "ab")
    shown = outer.call(torch.ops.aten.t.default, a) if how == "read later as a view" else a
    one, two = outer.region("row", lambda a, b: (a + 1, b + 1), a, b, kind="row")
    more = []
    if how.startswith("read later"):
        more = [outer.call(torch.ops.aten.mul.Tensor, shown, 3)]  # the old value
    outer.call(COPY, a, one)
    if how == "written twice":
        outer.call(COPY, a, two)
    if how == "copied twice":
        outer.call(COPY, b, one)
    results = [*more, *([one] if how == "returned by itself" else [])]
    program = build(lowered(outer, *results, two), outer.fakes, reference_kernels)
    assert written(program)
    given = [torch.randn(4, 4), torch.randn(4, 4)]
    old = [value.clone() for value in given]
    *found, last = program(list(given))
    assert torch.equal(last, old[1] + 1)
    assert torch.equal(given[0], old[1] + 1 if how == "written twice" else old[0] + 1)
    if how == "copied twice":
        assert torch.equal(given[1], old[0] + 1)
    if how == "returned by itself":
        assert torch.equal(found[0], old[0] + 1) and found[0] is not given[0]
    if how == "read later":
        assert torch.equal(found[0], old[0] * 3)
    if how == "read later as a view":
        assert torch.equal(found[0], old[0].t() * 3)


def test_an_input_with_gaps_is_copied_to():
    outer = Outer()
    a = outer.input("a", torch.randn(4, 8)[:, ::2])
    (one,) = outer.region("row", lambda a: (a + 1,), a, kind="row")
    outer.call(COPY, a, one)
    program = build(lowered(outer), outer.fakes, reference_kernels)
    assert len(written(program)) == 1
    whole = torch.randn(4, 8)
    wanted = whole.clone()
    wanted[:, ::2] += 1
    program([whole[:, ::2]])
    assert torch.equal(whole, wanted)


def test_what_only_the_epilogue_copies_is_computed_behind_what_reads_the_old_value():
    outer, given, inputs, results = counters(2, lambda *n: tuple(value + 1 for value in n))
    read = outer.call(torch.ops.aten.mul.Tensor, inputs[1], 2)
    for pair in zip(inputs, results, strict=True):
        outer.call(COPY, *pair)
    program = build(lowered(outer, read), outer.fakes, reference_kernels)
    old = [value.clone() for value in given]
    (doubled,) = program(list(given))
    assert not written(program) and torch.equal(doubled, old[1] * 2)
    assert all(torch.equal(new, before + 1) for new, before in zip(given, old, strict=True))


def test_a_region_that_reads_what_another_copy_replaces_stays_where_it_is():
    outer = Outer()
    a, b = (outer.input(name, torch.randn(4)) for name in "ab")
    (one,) = outer.region("one", lambda b: (b * 2,), b, kind="row")
    (two,) = outer.region("two", lambda a, b: (a + b,), a, b, kind="row")
    outer.call(COPY, b, one)
    outer.call(COPY, a, two)
    program = build(lowered(outer), outer.fakes, reference_kernels)
    given = [torch.randn(4), torch.randn(4)]
    old = [value.clone() for value in given]
    program(list(given))
    assert torch.equal(given[0], old[0] + old[1]) and torch.equal(given[1], old[1] * 2)
