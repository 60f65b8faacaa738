"""What is looked at in every call of a recorded graph: the addresses of pinned inputs, and which others must not be copied."""

from __future__ import annotations

import pytest
import torch
from dsi.runtime import addresses
from dsi.runtime.addresses import Addresses, Memory, Others, extent
from hypothesis import given
from hypothesis import strategies as st


def equal_at(tensors, places, numbers):
    """As torch's own function, which only builds for CUDA have."""
    return all(tensors[number].data_ptr() == places[number] for number in numbers)


@pytest.mark.parametrize("function", [None, equal_at, addresses._equal_at])
@pytest.mark.parametrize("numbers", [[], [1], [0, 1, 3]])
def test_a_tensor_that_lies_elsewhere_is_noticed(monkeypatch, numbers, function):
    monkeypatch.setattr(addresses, "_equal_at", function)
    inputs = [torch.nn.Parameter(torch.randn(3)), torch.randn(4), 5, torch.randn(2)]
    stay = Addresses(numbers).stay(inputs)
    assert stay(list(inputs))
    inputs[1].add_(1)  # what is written where it lies
    assert stay(list(inputs))
    inputs[0].data = torch.randn(3)  # the same Parameter, with other memory
    assert stay(list(inputs)) == (0 not in numbers)
    inputs[1] = inputs[1].clone()
    assert stay(list(inputs)) == (not numbers)


RANGE = st.tuples(st.integers(0, 40), st.integers(0, 12))


@given(st.lists(RANGE, max_size=5), RANGE)
def test_memory_meets_what_shares_a_byte_with_it(ranges, asked):
    base = torch.empty(64, dtype=torch.uint8)
    memory = Memory([base[start : start + size] for start, size in ranges])
    covered = {byte for start, size in ranges for byte in range(start, start + size)}
    start, size = asked
    assert memory.meets(base.data_ptr() + start, size) == bool(covered & set(range(start, start + size)))


@pytest.mark.parametrize(
    "tensor, elements", [(torch.zeros(3, 4), 12), (torch.zeros(3, 4).t(), 12), (torch.zeros(9, 4)[::3, 1:3], 26), (torch.zeros(0, 4), 0)]
)
def test_the_extent_of_a_tensor(tensor, elements):
    assert extent(tensor) == 4 * elements


def test_what_lies_in_a_cache_or_overlaps_itself_is_not_copied():
    cache = torch.zeros(4, 8)
    inputs = [torch.zeros(3), cache[1, 2:4], torch.zeros(1).expand(5), cache, torch.zeros(2, 2)]
    others = Others(inputs, [0, 1, 2, 4])
    assert others.among(inputs, Memory([cache])) == (1, 2)
    assert others.among([inputs[0], torch.zeros(2), *inputs[2:]], Memory([cache])) == (2,)


def test_sizes_of_what_is_symbolic_tell_calls_apart():
    from lowered_graphs import Outer

    outer = Outer(dynamic=(7,))
    outer.input("x", torch.randn(7, 3))
    outer.input("w", torch.randn(3, 3))
    others = Others(outer.fakes, [0, 1])
    weight = torch.randn(3, 3)
    assert others.sizes([torch.randn(7, 3), weight]) == others.sizes([torch.randn(7, 3), weight.clone()])
    assert others.sizes([torch.randn(7, 3), weight]) != others.sizes([torch.randn(8, 3), weight])
    assert others.sizes([torch.randn(7, 3), weight]) != others.sizes([torch.randn(3, 7).t(), weight])
