"""`python -m bench timeline`: what each kernel of a step costs, from a trace."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from bench.timeline import Slot, folded, slots_of


def step(start: float) -> list[dict]:
    """Three kernels; the second starts while the first still runs, the third after a gap."""
    return [
        {"name": "linear", "ts": start, "dur": 4.0},
        {"name": "attention", "ts": start + 3.0, "dur": 2.0},
        {"name": "linear", "ts": start + 6.0, "dur": 1.0},
    ]


def test_a_kernel_costs_the_time_until_the_next_one_starts():
    slots = slots_of([event for start in (0.0, 10.0, 20.0, 30.0) for event in step(start)], 4)
    assert slots == [Slot("linear", 3.0, 4.0), Slot("attention", 3.0, 2.0), Slot("linear", 4.0, 1.0)]
    assert sum(slot.step for slot in slots) == 10.0  # the step, gap before the next one included
    assert folded(slots) == [("linear", 2, 7.0, 5.0), ("attention", 1, 3.0, 2.0)]


@pytest.mark.parametrize(
    "spoil", [lambda events: events[:-1], lambda events: [*events[:-1], {**events[-1], "name": "other"}], lambda events: []]
)
def test_steps_that_differ_are_refused(spoil):
    with pytest.raises(ValueError, match="3 times the same step"):
        slots_of(spoil([event for start in (0.0, 10.0, 20.0) for event in step(start)]), 3)


def test_without_a_device_the_command_says_so():
    done = CliRunner().invoke(app, ["timeline", "--small", "--sides", "dsi-laid-out"])
    assert done.exit_code == 0 and "no CUDA device, no timeline" in done.output
