"""Views of kernels' outputs: one step made of the output itself, with the numbers and the memory that the operators give."""

from __future__ import annotations

import pytest
import torch
from dsi.runtime.program import build, no_kernels, reference_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_graphs import D, Outer

aten = torch.ops.aten


def projection(dynamic=()):
    """The outer graph of y = x w^T, [3, 4, 24], and its inputs."""
    outer = Outer(dynamic)
    given = [torch.randn(3, 4, 16), torch.randn(24, 16)]
    nodes = [outer.input(name, tensor) for name, tensor in zip("xw", given, strict=True)]
    (y,) = outer.region("project", lambda x, w: (D.linear(x, w),), *nodes)
    return outer, y, given


def steps(program):
    return [step.text for step in program.steps if "region" not in step.text and "project" not in step.text]


STEPS = {
    "view": lambda x, n: (aten.view.default, [x.shape[0], -1]),
    "permute": lambda x, n: (aten.permute.default, [*range(1, x.dim()), 0]),
    "transpose": lambda x, n: (aten.transpose.int, 0, -1),
    "slice": lambda x, n: (aten.slice.Tensor, n % x.dim(), min(n, x.shape[n % x.dim()] - 1), x.shape[n % x.dim()]),
    "select": lambda x, n: (aten.select.int, n % x.dim(), x.shape[n % x.dim()] - 1),
    "unsqueeze": lambda x, n: (aten.unsqueeze.default, n % x.dim()),
    "expand": lambda x, n: (aten.expand.default, [2, *x.shape]),
}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_chain_of_views_is_one_step_with_the_same_result(chain):
    outer, y, tensors = projection()
    node, value = y, torch.nn.functional.linear(*tensors)
    for name, number in chain:
        target, *rest = STEPS[name](value, number)
        try:
            value = target(value, *rest)
        except (RuntimeError, IndexError):
            continue
        if value.dim() == 0:
            return
        node = outer.call(target, node, *rest)
    program = build(outer.finish(node), outer.fakes, reference_kernels)
    (result,) = program(list(tensors))
    torch.testing.assert_close(result, value)
    assert (result.stride(), result.storage_offset()) == (value.stride(), value.storage_offset())
    assert len(steps(program)) == (node is not y)


def test_all_that_is_read_of_a_chain_is_there_and_shares_memory():
    outer, y, tensors = projection()
    heads = outer.call(aten.view.default, y, [3, 4, 2, 12])
    turned = outer.call(aten.permute.default, heads, [0, 2, 1, 3])
    program = build(outer.finish(y, heads, turned, outer.call(aten.neg.default, turned)), outer.fakes, reference_kernels)
    one, two, three, four = program(list(tensors))
    expected = torch.nn.functional.linear(*tensors)
    torch.testing.assert_close(one, expected)
    assert torch.equal(two, one.view(3, 4, 2, 12)) and torch.equal(three, two.permute(0, 2, 1, 3)) and torch.equal(four, -three)
    assert one.data_ptr() == two.data_ptr() == three.data_ptr()
    assert all(step.launches == 0 for step in program.steps if "as_strided" in step.text)
    assert [text.split("= ")[1].split("(")[0] for text in steps(program)] == ["as_strided", "as_strided", "aten.neg.default"]


@pytest.mark.parametrize("kernels, dynamic", [(no_kernels, ()), (reference_kernels, (3,))])
def test_what_may_lie_otherwise_or_has_symbolic_sizes_is_left_to_the_operators(kernels, dynamic):
    outer, y, tensors = projection(dynamic)
    program = build(outer.finish(outer.call(aten.permute.default, y, [1, 0, 2])), outer.fakes, kernels)
    assert "aten.permute.default" in str(program) and "as_strided" not in str(program)
    torch.testing.assert_close(program(list(tensors))[0], torch.nn.functional.linear(*tensors).permute(1, 0, 2))


def test_views_of_inputs_and_of_what_is_written_in_place_are_left_to_the_operators():
    outer = Outer()
    given = {"cache": torch.zeros(2, 8, 4), "pos": torch.tensor([3]), "new": torch.randn(2, 1, 4)}
    nodes = [outer.input(name, tensor) for name, tensor in given.items()]
    (written,) = outer.region("write", lambda c, p, n: (D.kv_write(c, p, n, dim=1),), *nodes, in_place={0: 0})
    views = [outer.call(aten.permute.default, node, [1, 0, 2]) for node in (nodes[2], written)]
    assert "as_strided" not in str(build(outer.finish(*views), outer.fakes, reference_kernels))


def test_an_operator_that_is_no_view_ends_a_chain():
    outer, y, tensors = projection()
    cast = outer.call(aten.view.dtype, outer.call(aten.unsqueeze.default, y, 0), torch.int32)
    program = build(outer.finish(cast, outer.call(aten.clone.default, y)), outer.fakes, reference_kernels)
    first, second = program(list(tensors))
    assert first.dtype == torch.int32 and torch.equal(first.view(torch.float32)[0], second)
    assert any("aten.view.dtype" in text for text in steps(program))


def test_a_view_between_two_copies_is_not_lost():
    """Copies at the end are one step as long as nothing lies between them."""
    outer = Outer()
    counters = [outer.input(name, torch.tensor([number])) for number, name in enumerate("ab")]
    results = outer.region("count", lambda *given: tuple(each + 1 for each in given), *counters, kind="row")
    outer.call(aten.copy_.default, counters[0], results[0])
    seen = outer.call(aten.unsqueeze.default, results[0], 0)
    outer.call(aten.copy_.default, counters[1], results[1])
    program = build(outer.finish(seen), outer.fakes, reference_kernels)
    tensors = [torch.tensor([7]), torch.tensor([5])]
    (result,) = program(list(tensors))
    assert result.tolist() == [[8]] and [t.item() for t in tensors] == [8, 6]
