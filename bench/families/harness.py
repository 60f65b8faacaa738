"""Runs one case of one family, eager and by dsi, and compares."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.models import hot

from . import decoders, encoders
from .axes import LENGTH, STEPS, Case
from .beyond import OTHERS
from .family import Family
from .listed import FAMILIES
from .trial import Outcome, Trial


def family_of(name: str) -> Family:
    """The family of that name. Raises KeyError."""
    return FAMILIES.get(name) or OTHERS[name]


def build(name: str, attention: str, *, layers: int = 2, dtype: torch.dtype = torch.float32, hot_init: bool = True) -> nn.Module:
    """A toy in eval mode with fresh random weights, the same ones each time."""
    torch.manual_seed(0)
    model = family_of(name).make(attention, layers).eval()
    if hot_init:
        hot(model)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        model.tie_weights()
    return model.to(dtype)


def decodes(case: Case) -> bool:
    """Whether the case has decode steps. Slots behind a padded prompt are not where a window, which counts slots, looks for tokens."""
    return case.cache != "none" and not (case.padding == "right" and family_of(case.family).window)


_RUNNERS: dict[str, Callable[[Trial], None]] = {
    "decoder": lambda trial: decoders.decoder(trial, decodes(trial.case)),
    "seq2seq": decoders.seq2seq,
    "encoder": lambda trial: encoders.one_call(trial, encoders.text),
    "vision": lambda trial: encoders.one_call(trial, encoders.pixels),
    "plain": lambda trial: encoders.one_call(trial, encoders.ids_alone),
    "embedded": encoders.embedded,
}


def run(case: Case, options: dict[str, Any] | None = None, length: int = LENGTH, steps: int = STEPS) -> Outcome:
    """Builds the model, runs it eager and by dsi, and compares."""
    torch._dynamo.reset()
    start = time.perf_counter()
    family = family_of(case.family)
    outcome = Outcome()
    with torch.no_grad():
        model, exact = (build(case.family, case.attention, layers=case.layers, dtype=case.dtype, hot_init=case.hot_init) for _ in range(2))
        if family.runs_in_float64:
            exact = exact.double()
        _RUNNERS[family.kind](Trial(family, case, model, exact, outcome, options, length, steps))
    outcome.seconds = time.perf_counter() - start
    return outcome


def spoken(reports: list[Any]) -> str:
    """Regions of the graphs of a phase by kind."""
    kinds = Counter(region.kind for report in reports for region in report.regions)
    return " ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + (f" ({len(reports)} graphs)" if len(reports) > 1 else "")
