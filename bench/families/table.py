"""The table: a family a row, its regions, what is left unfused, and its errors."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch

from .axes import CACHES, PADDINGS, Case
from .beyond import OTHERS
from .harness import family_of, run, spoken
from .listed import FAMILIES
from .trial import Outcome

COLUMNS = ("family", "attention", "regions prefill", "regions decode", "unfused", "other ATen", "error prefill", "error decode", "s")


def main(words: list[str] | None = None) -> int:
    """Print the table; 0 where nothing of the listed families is left unfused and every number is right."""
    arguments = _parse(words)
    torch.set_num_threads(1)
    names = arguments.families.split(",") if arguments.families else [*FAMILIES, *(OTHERS if arguments.others else ())]
    if unknown := [name for name in names if name not in FAMILIES and name not in OTHERS]:
        raise SystemExit(f"unknown family {', '.join(unknown)}; known: {', '.join([*FAMILIES, *OTHERS])}")
    print_row(COLUMNS)
    print("|" + " --- |" * len(COLUMNS), flush=True)
    good = True
    for name in names:
        for attention in family_of(name).attentions:
            if arguments.attention in (None, attention):
                case = Case(name, attention, arguments.cache, getattr(torch, arguments.dtype), padding=arguments.padding)
                good = _one(case, arguments) and good
    return 0 if good else 1


def _one(case: Case, arguments: argparse.Namespace) -> bool:
    try:
        outcome = run(case)
    except Exception as error:
        print_row((case.family, case.attention, f"{type(error).__name__}: {str(error)[:300]!r}", *[""] * 6))
        return False
    print_row(row_of(case, outcome))
    reports = [report for reports in outcome.reports.values() for report in reports]
    if arguments.left:
        for reason, count in Counter(str(refusal.reason) for report in reports for refusal in report.unfused).items():
            print("      ", count, reason, flush=True)
        for note in {note for report in reports for note in report.notes}:
            print("       note:", note, flush=True)
    if arguments.misses:
        for report in reports:
            for rule, miss in report.misses.items():
                print("       miss", rule, miss)
    return not (outcome.unfused() and case.family in FAMILIES)


def row_of(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """The cells of a case, in the order of `COLUMNS`."""
    return (
        case.family,
        case.attention,
        *(spoken(outcome.reports.get(phase, [])) for phase in ("prefill", "decode")),
        " ".join(f"{count} {kind}" for kind, count in outcome.unfused().items()) or "0",
        str(sum(len(report.unfused) for reports in outcome.reports.values() for report in reports)),
        *(_errors(outcome.errors.get(phase)) for phase in ("prefill", "decode")),
        f"{outcome.seconds:.1f}",
    )


def _errors(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.1e} ({pair[1]:.1e})"


def print_row(cells: Any) -> None:
    """One line of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description="What dsi makes of every architecture that it covers.")
    parser.add_argument("--families", help="by commas; left out: all that are covered")
    parser.add_argument("--others", action="store_true", help="architectures beyond those that are covered, too")
    parser.add_argument("--attention", help="sdpa or eager; left out: both")
    parser.add_argument("--cache", default="static", choices=CACHES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--padding", default="none", choices=PADDINGS)
    parser.add_argument("--left", action="store_true", help="each operator that is left alone, and why")
    parser.add_argument("--misses", action="store_true", help="nearest misses of rules")
    return parser.parse_args(words)
