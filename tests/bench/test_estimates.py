"""What a run is expected to take: no less than what was measured, and so that all sides of a row of `all` run within the row's budget."""

import time

import pytest
import torch

from bench import comparators, estimates, everything, rows, timing
from bench.comparators import Outcome, Workload, compare
from bench.estimates import REGION, Size
from bench.report import Report, Settings
from bench.sides import SIDES

MAX = "max-autotune-no-cudagraphs"
# Seconds on an H200 on 2026-11-30: layers, rows, the side that had compiled the same kernels before, the side, what it took.
MEASURED = [
    (24, 128, "", "dsi", 9.1),
    (24, 128, "dsi", "dsi-reduce-overhead", 4.6),
    (24, 128, "", "reduce-overhead", 17.5),
    (24, 128, "", MAX, 103),
    (16, 1, "", "dsi", 7.2),
    (16, 1, "dsi", "dsi-reduce-overhead", 3.1),
    (16, 1, "", "reduce-overhead", 19.6),
    (48, 1, "", "dsi", 14.1),
    (4, 512, "", "dsi", 6.3),
    (4, 512, "", MAX, 77),
    (12, 1, "", "dsi", 5.1),
    (12, 1, "dsi-laid-out", "dsi-laid-out-reduce-overhead", 2.0),
    (12, 1, "", "reduce-overhead", 10.1),
    (12, 1, "", MAX, 41),
    (4, 1, "", "dsi", 3.1),
    (4, 1, "dsi", "dsi-reduce-overhead", 1.2),
    (4, 1, "dsi", "dsi-int8", 4.1),
    (4, 1, "", MAX, 52),
]


@pytest.mark.parametrize(("layers", "count", "before", "side", "took"), MEASURED)
def test_no_less_than_what_was_measured_and_not_much_more(layers, count, before, side, took):
    seconds = SIDES[side].seconds(Size(layers, count), [SIDES[before]] if before else [])
    assert took <= seconds <= 1.6 * took + 2


def test_layers_cost_what_is_done_for_each_and_kernels_are_compiled_once():
    def more(side):
        return SIDES[side].seconds(Size(48)) / SIDES[side].seconds(Size(4))

    assert more(MAX) < 2 < more("dsi") < more("reduce-overhead")
    for side, before, halved in (
        ("dsi-reduce-overhead", "dsi", True),
        ("dsi-reduce-overhead", "dsi-int8", False),
        ("dsi-reduce-overhead", "dsi-laid-out", False),
        ("reduce-overhead", "dsi", False),
        (MAX, "reduce-overhead", False),
    ):
        first, second = (SIDES[side].seconds(Size(4), sides) for sides in ([], [SIDES["eager"], SIDES[before]]))
        assert (second < first) == halved, (side, before)
    assert SIDES[MAX].seconds(REGION) < SIDES[MAX].seconds(Size(1)) / 3


class Clock(timing.Budget):
    """A budget whose time passes where the test says so."""

    now = 0.0

    @property
    def spent(self):
        return self.now


@pytest.fixture
def report_of(monkeypatch):
    """A report of a row's command with so many seconds, in which every side compiles for `pace` of what is expected of it."""

    def make(row, seconds, pace):
        budget = Clock(seconds)
        budget.now = pace * row.seconds

        def ready(workload, side, *rest):
            budget.now += pace * side.seconds(workload.size, rest[-1])
            return Outcome(side, compile_seconds=1.0)

        monkeypatch.setattr(comparators, "_ready", ready)
        monkeypatch.setattr(comparators, "reset", timing.nothing)  # there is nothing to forget
        return Report("test", Settings(tuple(row.sides.split(",")), 1, budget=budget))

    comparators._measured.clear()
    return make


@pytest.mark.parametrize("row", [row for row in rows.ROWS if row.sizes], ids=lambda row: row.name)
@pytest.mark.parametrize("late", [False, True])
def test_all_sides_of_a_row_run_within_its_budget(report_of, capsys, row, late):
    """Where all of its time is left and everything takes what is expected, and where so little is left that it is just begun."""
    given, pace = (
        (everything.LEAST * row.expected(), estimates.LIKELY) if late else (everything.PATIENCE * row.expected() - everything.SPARE, 1.0)
    )
    report = report_of(row, given, pace)
    ones = torch.ones(2)
    for size in row.sizes:
        report.settings.budget.now += pace * estimates.REFERENCE
        compare(Workload("ones", {}, torch.float32, lambda side: [lambda: ones * 1], lambda: ones.double()[None], size=size), report)
        report.settings.budget.now += pace * estimates.timing(len(report.settings.against))
    assert not report.skipped and len(report.rows) == len(row.sizes)
    assert all(set(found["sides"]) == set(row.sides.split(",")) for found in report.rows)
    assert report.settings.budget.spent <= report.settings.budget.seconds


def test_a_side_that_takes_more_than_is_left_is_broken_off_and_the_others_are_timed(monkeypatch):
    monkeypatch.setattr(comparators, "_measured", {"eager": 0.0, "default": 0.0})  # so that both are begun
    report = Report("test", Settings(("eager", "default"), 1, budget=Clock(estimates.timing(2) + 2.0)))
    ones = torch.ones(2)

    def compile_for(side):
        return [lambda: time.sleep(60) if side.name == "default" else ones * 1]

    compare(Workload("ones", {}, torch.float32, compile_for, lambda: ones.double()[None], size=Size(0)), report)
    sides = report.rows[0]["sides"]
    assert sides["eager"]["wall"] > 0 and sides["default"]["problem"].startswith("Expired")
