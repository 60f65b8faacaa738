"""Views, new values and writes in place, in sequences that no model has: one pass gives AOTAutograd's result, or leaves the graph to it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tracers import Tracers, meaning

VIEWS = [
    lambda v: v.t() if v.dim() == 2 else v.unsqueeze(0),
    lambda v: v.reshape(-1),
    lambda v: v[1:],
    lambda v: v[..., :2],
    lambda v: v.unsqueeze(-1),
    lambda v: v.detach(),
    lambda v: v.chunk(2)[0],
    lambda v: v.diagonal() if v.dim() == 2 else v,
    lambda v: v.view(v.shape),
    lambda v: v.permute(*reversed(range(v.dim()))),
    lambda v: v.unbind(0)[-1],
    lambda v: v.to(v.dtype),
]
VALUES = [
    lambda v: v * 2,
    lambda v: v.sum(0, keepdim=True),
    lambda v: torch.cat([v.reshape(-1), v.reshape(-1)]),
    lambda v: v.clone(),
    lambda v: torch.zeros_like(v),
    lambda v: v.flip(0),
    lambda v: v.reshape(-1, 1) @ v.reshape(1, -1),
]
WRITES = [
    lambda v, other: v.add_(1),
    lambda v, other: v.mul_(other.sum()),
    lambda v, other: v.zero_(),
    lambda v, other: v.copy_(other.sum()),
    lambda v, other: v.copy_(v),
    lambda v, other: v.__setitem__(0, other.sum()),
    lambda v, other: v.__setitem__(slice(1, None), 5.0),
    lambda v, other: v.index_fill_(0, torch.zeros(1, dtype=torch.long), 2.0),
]
STEPS = {"view": VIEWS, "value": VALUES, "write": WRITES}
SIZES = {"view": len(VIEWS), "value": len(VALUES), "write": len(WRITES)}


@st.composite
def programs(draw):
    """(steps, numbers of the returned values, whether they are made new). A step: its kind, which one, and the numbers of two values."""
    steps, count = [], 2
    for _ in range(draw(st.integers(2, 7))):
        kind = draw(st.sampled_from(["view", "view", "value", "write", "write"]))
        steps.append((kind, draw(st.integers(0, SIZES[kind] - 1)), draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))))
        count += kind != "write"
    return steps, draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)), draw(st.booleans())


def function(steps, returned, new):
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for kind, which, first, second in steps:
            if kind == "write":
                WRITES[which](values[first], values[second])
            else:
                values.append(STEPS[kind][which](values[first]))
        return tuple(values[i] * 2 if new else values[i] for i in returned)

    return run


def shared(tensors):
    """For each pair of tensors whether they show the same memory."""
    memories = [t.untyped_storage()._cdata for t in tensors]
    return [[a == b for b in memories] for a in memories]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(program=programs())
def test_a_sequence_means_the_same_and_gives_eagers_results(program):
    run = function(*program)
    inputs, own = ((torch.arange(12.0).reshape(3, 4) / 7 - 1, torch.arange(4.0) - 1) for _ in range(2))
    torch._dynamo.reset()
    tracers = Tracers()
    with torch.no_grad():
        try:
            expected = run(*own)
        except (IndexError, RuntimeError, ValueError):
            return  # no program
        got = torch.compile(run, backend=tracers, fullgraph=True)(*inputs)
    for mine, theirs in zip(tracers.own, tracers.theirs, strict=True):
        assert isinstance(mine, str) or (meaning(mine[0]) == meaning(theirs[0]) and mine[1] == theirs[1])
    for a, b in zip((*inputs, *got), (*own, *expected), strict=True):
        assert torch.equal(a, b)
    assert shared([*inputs, *got]) == shared([*own, *expected])
