"""The kernel that follows a step's logits computes what the state says in torch, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import dsi.engine.generation
import pytest
import torch
from dsi.engine.generation import gpu_state
from dsi.engine.generation.feed import Feed
from dsi.engine.generation.gpu_state import GpuState
from dsi.engine.generation.sampling import recipe
from dsi.engine.generation.state import State

from ..codegen.interpret import Interpreter

SLOTS = 12
SOURCE = (Path(dsi.engine.generation.__file__).parent / "advance_kernel.py").read_text()
BUFFERS = ("ids", "token", "position", "finished", "board", "count", "made", "length")


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter() as worker:
        yield worker


def states(rows, ends):
    """Two states in the middle of the same generation."""
    made = []
    for kind in (State, GpuState):
        state = kind(rows, SLOTS, torch.tensor(4))
        state.begin(torch.arange(rows * 4).reshape(rows, 4), None, ends, 77, {})
        state.position.copy_(torch.arange(rows)[:, None] + 3)
        made.append(state)
    return made


def run(interpreter, state, logits, chosen, fed):
    """One launch, whose results are put back into the state."""
    grid, arguments, constants = state.launch(logits, chosen, fed)
    after = interpreter.run(SOURCE, "advance", grid, arguments, constants)
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    kept = {id(tensor): tensor for tensor in tensors}
    assert len(tensors) == len(after)
    names = [
        "scores",
        "chosen",
        "best",
        "arrived",
        "ids",
        "token",
        "position",
        "finished",
        "ends",
        "pad",
        "board",
        "count",
        "made",
        "length",
    ]
    for name, before, value in zip(names, tensors, after, strict=False):
        if name in (*BUFFERS, "best", "arrived"):
            kept[id(before)].copy_(value)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_steps(interpreter, monkeypatch, rows, dtype):
    monkeypatch.setattr(gpu_state, "PART", 16)  # several programs a row
    g = torch.Generator().manual_seed(rows)
    ends = torch.tensor([5, 30])
    reference, ours = states(rows, ends)
    plain, one = recipe([], sample=False), torch.tensor(1)
    for step in range(5):
        logits = torch.randn(rows, 41, generator=g).to(dtype)
        if step == 1:
            logits[:, 7] = logits[:, 23] = logits.max() + 1  # the first of equal ones
        if step == 2:
            logits[0] = -logits[0].abs() - 1
            logits[0, 30] = 0.0  # the end of the first row; a zero of either sign is one number
            logits[0, 35] = -0.0
        if step == 3:
            logits[-1, 39] = float("inf")
        fed = one if step else torch.tensor(3)
        reference.follow(plain, logits, fed)
        run(interpreter, ours, logits, None, fed)
        for name in BUFFERS:
            assert torch.equal(getattr(ours, name), getattr(reference, name)), f"{name} after step {step}"
        assert ours.arrived.item() == 0 and (ours.best == -(2**63)).all()
    assert reference.finished[0] and reference.token[0] == 77


@pytest.mark.parametrize("ends", [None, torch.tensor([9])])
def test_chosen_tokens(interpreter, ends):
    reference, ours = states(3, ends)
    one = torch.tensor(1)
    for chosen in ([9, 1, 2], [3, 9, 4], [5, 6, 9], [1, 2, 3]):
        token = torch.tensor(chosen)
        reference.advance(token, one)
        run(interpreter, ours, None, token, one)
        for name in BUFFERS:
            assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    assert bool(reference.board[2, 3]) == (ends is not None), "the board says when all rows are at their end"


def test_all_infinities_and_no_numbers(interpreter):
    for value in (-float("inf"), float("nan")):
        reference, ours = states(2, None)
        logits = torch.full((2, 40), value)
        reference.follow(recipe([], sample=False), logits, torch.tensor(1))
        run(interpreter, ours, logits, None, torch.tensor(1))
        assert torch.equal(ours.token, reference.token)


def held(state):
    return {name: getattr(state, name).clone() for name in ("ids", "mask", "count", "made", "finished", "pad", "ends")}


def test_a_state_holds_what_it_began_with_whatever_came_before():
    """What is there already is not copied again."""
    hides, ends, others = torch.tensor([[0, 1, 1]]), torch.tensor([5, 6]), torch.tensor([7, 8])
    begins = [
        (torch.arange(3)[None], None, ends, torch.tensor(3)),
        (torch.arange(3)[None], hides, ends, 0),
        (torch.arange(4)[None], None, others, 0),
        (torch.arange(2)[None], hides[:, :2], torch.tensor([4]), torch.tensor(9)),
        (torch.arange(2)[None], None, ends, 1),
        (torch.arange(2)[None], None, others, 1),
    ]
    used = State(1, SLOTS, torch.tensor(0))
    for ids, mask, ends, pad in begins * 2:
        fresh = State(1, SLOTS, torch.tensor(0))
        for state in (used, fresh):
            state.begin(ids, mask, ends, pad, {})
        expected = held(fresh)
        assert all(torch.equal(value, expected[name]) for name, value in held(used).items())
        used.advance(torch.tensor([5]), torch.tensor(1))


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_beginning_sets_counters_and_copies_what_comes_with_it(rows):
    """Whatever the last generation has left in them."""
    state, positions = State(rows, SLOTS, torch.tensor(7)), torch.zeros(rows, 1, dtype=torch.int64)
    for n, numbers, held in ((4, {"least": 6}, 0), (3, {}, 5), (4, {"least": 8, "begin": 2}, 0)):
        ids, placed = torch.randint(1, 9, (rows, n)), torch.arange(n)[None].expand(1 if held else rows, n)
        state.begin(ids, None, None, 0, numbers, held=held, looks_behind=False, besides=[(positions, placed[:, -1:])])
        assert torch.equal(state.ids[:, :n], ids) and (positions == n - 1).all()
        assert (int(state.count), int(state.made), int(state.length)) == (n, 0, held)
        assert {name: int(state.number(name)) for name in numbers} == numbers
        assert state.finished.shape == (rows,) and not state.finished.any()
        for counter in (state.count, state.made, state.number("least"), state.finished):
            assert counter.storage_offset() * counter.itemsize % 16 == 0, "as what the kernel was made for"
        state.finished.fill_(True)
        state.advance(torch.full((rows,), 5), torch.tensor(1))
        assert (int(state.count), int(state.made), int(state.length)) == (n + 1, 1, held + 1)
        assert state.ids[:, n].tolist() == [5] * rows


@pytest.mark.parametrize("at_end", [False, True])
def test_a_feed_holds_what_it_was_filled_with_whatever_came_before(at_end):
    positions = {n: torch.arange(n)[None] for n in (2, 3, 4)}
    prompts = [
        (3, positions[3]),
        (3, positions[3]),
        (2, positions[2]),
        (4, positions[4]),
        (4, positions[4] + 1),
        (4, None),
        (4, positions[4]),
    ]
    used = Feed(1, 4, torch.device("cpu"), at_end)
    for n, placed in prompts * 2:
        fresh = Feed(1, 4, torch.device("cpu"), at_end)
        ids = torch.randint(1, 9, (1, n))
        for feed in (used, fresh):
            feed.fill(ids, placed)
        for name in ("ids", "positions", "last", "length"):
            assert torch.equal(getattr(used, name), getattr(fresh, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_on_a_gpu(rows, dtype):
    """A vocabulary of several programs a row, a thousand times: programs that arrive in any order leave the same state."""
    device = torch.device("cuda")
    reference, ours = (kind(rows, 1100, torch.tensor(4, device=device)) for kind in (State, GpuState))
    for state in (reference, ours):
        ids = torch.arange(rows * 4, device=device).reshape(rows, 4)
        state.begin(ids, None, torch.tensor([5, 30], device=device), 77, {})
    plain, one = recipe([], sample=False), torch.tensor(1, device=device)
    for step in range(1000):
        logits = torch.randn(rows, 50257, device=device).to(dtype)
        if step == 500:
            logits[0, 30] = torch.inf
        reference.follow(plain, logits, one)
        ours.follow(plain, logits, one)
    for name in BUFFERS:
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    assert reference.finished[0]
