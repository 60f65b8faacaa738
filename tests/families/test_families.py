"""Every listed architecture: nothing left unfused, the numbers of eager, and exactly these regions and hits.

By default each family runs three ways that together have every value of every axis (attention, cache, dtype, initialisation, padding), and
the families together every pair of values; `make test-all` runs the whole product. Counts are in golden/, a file a family.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dsi.ir.tolerances import TOLERANCES
from dsi.passes.recognise import RULES

from bench.families.axes import CACHES, PADDINGS, Case
from bench.families.harness import decodes, run, spoken
from bench.families.listed import FAMILIES
from bench.families.trial import Outcome

GOLDEN = Path(__file__).parent / "golden"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEMANTIC = {rule.name() for rule in RULES}
OTHER_LENGTHS = (12, 13, 14)  # of prompts by which a doubtful error is judged
MIXED = {"GPT-Neo", "Gemma 2"}  # whose layers alternate: one of each


def possible(case: Case) -> bool:
    """Whether the case exists: only decoders have positions to shift to the left, vision has none, plain models take no mask."""
    kind = FAMILIES[case.family].kind
    allowed = {"decoder": PADDINGS, "encoder": PADDINGS, "embedded": ("none", "right"), "seq2seq": ("none", "right")}.get(kind, ("none",))
    return case.padding in allowed and (case.cache == "none" or kind in ("decoder", "seq2seq"))


def three_cases(name: str) -> list[Case]:
    """Three rows of an orthogonal array, others for each family."""
    family, number = FAMILIES[name], list(FAMILIES).index(name)
    layers = 2 if name in MIXED else 1
    cases = []
    for row in range(3):
        case = Case(
            name,
            family.attentions[(row + number) % len(family.attentions)],
            CACHES[row] if family.kind in ("decoder", "seq2seq") else "none",
            DTYPES[(row + number) % 3],
            (row + number // 2) % 2 == 0,
            PADDINGS[(2 * row + number // 3) % 3],
            layers,
        )
        cases.append(case if possible(case) else Case(*(getattr(case, f) for f in list(case.__dataclass_fields__)[:5]), "none", layers))
    return cases


def all_cases() -> list[Case]:
    """The whole product."""
    axes = (CACHES, DTYPES, (True, False), PADDINGS)
    every = (Case(n, a, *rest, 2) for n, f in FAMILIES.items() for a in f.attentions for rest in itertools.product(*axes))
    return [case for case in every if possible(case)]


def name_of(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{case.attention} {case.cache} {dtype} {'hot' if case.hot_init else 'default'} {case.padding}"


def allowed(case: Case, eager: float) -> float:
    """The error that a case may have, where eager's is so large."""
    return max(TOLERANCES[torch.float32].relative, 2 * eager) if case.dtype == torch.float32 else 2 * eager + 1e-4


def check_numbers(case: Case, outcome: Outcome) -> None:
    """dsi's error against float64 is at most the tolerance, or twice what eager's is where the model is ill-conditioned: of one prompt, or
    on the average of several where one says otherwise, as rounding to half precision may by chance."""
    for phase, (error, eager) in outcome.errors.items():
        if not error <= allowed(case, eager) and case.dtype != torch.float32:
            several = [(error, eager), *(run(case, length=length).errors[phase] for length in OTHER_LENGTHS)]
            error, eager = (sum(found) / len(several) for found in zip(*several, strict=True))
        assert error <= allowed(case, eager), f"{case.family}, {name_of(case)}, {phase}: {error:.1e}, where eager has {eager:.1e}"
    assert set(outcome.reports) == ({"prefill", "decode"} if decodes(case) else {"prefill"})


def counts(outcome: Outcome) -> str:
    """Regions and hits, a line a phase."""
    lines = []
    for phase, reports in outcome.reports.items():
        hits: dict[str, int] = {}
        for report in reports:
            for rule, n in report.hits.items():
                if rule in SEMANTIC or rule.startswith("lift."):
                    hits[rule] = hits.get(rule, 0) + n
        lines.append(f"  {phase}: {spoken(reports)}; {', '.join(f'{n} {rule}' for rule, n in sorted(hits.items()))}")
    return "\n".join(lines)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, golden: Any):
    lines = []
    for case in three_cases(name):
        outcome = run(case)
        check_numbers(case, outcome)
        assert not outcome.unfused(), f"{case.family}, {name_of(case)}: {dict(outcome.unfused())} left unfused"
        lines += [name_of(case), counts(outcome)]
    golden(GOLDEN / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.txt", "\n".join(lines) + "\n")


def test_three_cases_have_every_value():
    pairs = set()
    for name, family in FAMILIES.items():
        cases = three_cases(name)
        assert {c.dtype for c in cases} == set(DTYPES)
        assert {c.hot_init for c in cases} == {True, False}
        assert {c.attention for c in cases} == set(family.attentions)
        if family.kind == "decoder":
            assert {c.cache for c in cases} == set(CACHES)
            assert {c.padding for c in cases} == set(PADDINGS)
            for case in cases:
                pairs |= set(itertools.combinations((("cache", case.cache), ("dtype", case.dtype), ("padding", case.padding)), 2))
    assert len(pairs) == 27


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.family} {name_of(case)}")
def test_whole_product(case: Case):
    outcome = run(case)
    check_numbers(case, outcome)
    assert not outcome.unfused()
