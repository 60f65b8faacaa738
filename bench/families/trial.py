"""One case being run: its models, what dsi made of them, and how far the numbers are from float64."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .axes import LENGTH, STEPS, Case
from .family import Family

# Operators by which one sees, in a graph, that a GEMM, a norm or an attention was not recognised.
MARKS = {
    "gemm": (
        *(f"aten.{name}." for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv")),
        "linear",
        "dsi.linear.",
    ),
    "norm": (
        *(f"aten.{name}." for name in ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "rsqrt")),
        "aten.var",
        "dsi.layer_norm.",
        "dsi.rms_norm.",
    ),
    "attention": (
        *(f"aten.{name}" for name in ("_softmax.", "softmax.", "scaled_dot_product", "_scaled_dot_product")),
        "scaled_dot_product_attention",
        "dsi.attention.",
    ),
}


@dataclass
class Outcome:
    """What came of it, a phase each: reports of the graphs, and (dsi's error, eager's own error) against float64."""

    reports: dict[str, list[Any]] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def unfused(self) -> Counter[str]:
        """GEMMs, norms and attentions that are in no region, or unrecognised in one; over all graphs of both phases."""
        return sum((unfused(report) for reports in self.reports.values() for report in reports), Counter())


def unfused(report: Any) -> Counter[str]:
    """GEMMs, norms and attentions that one graph left to ATen, or that are in a region by their parts only."""
    counts: Counter[str] = Counter()
    names = [str(refusal.reason).split(" ")[0] for refusal in report.unfused]
    for region in report.regions:
        names += [str(node.target) for node in region.members if not str(node.target).startswith("dsi.")]
    for name in names:
        for kind, marks in MARKS.items():
            counts[kind] += name.startswith(marks)
    return +counts


@dataclass
class Trial:
    """What a runner is given: the model, its twin in float64 where it runs there, and the outcome to fill."""

    family: Family
    case: Case
    model: Any
    exact: Any
    outcome: Outcome
    options: dict[str, Any] | None = None
    length: int = LENGTH
    steps: int = STEPS

    def compiled(self) -> tuple[Callable[..., Any], list[Any]]:
        """The model compiled under the trial's options, and its reports."""
        return compiled_and_reports(self.model, self.options)

    def finish(self, phase: str, reports: list[Any]) -> None:
        """The phase is over: its reports are kept, and the list is emptied for the next."""
        self.outcome.reports[phase] = list(reports)
        reports.clear()

    def note(self, phase: str, got: Tensor, eager: Tensor, exact: Tensor) -> None:
        """Take errors of a phase, the largest so far."""

        def error(a: Tensor) -> float:
            if not bool(a.isfinite().all()):
                return float("inf")
            return float((a.double() - exact).norm() / exact.norm())

        old = self.outcome.errors.get(phase, (0.0, 0.0))
        self.outcome.errors[phase] = (max(old[0], error(got)), max(old[1], error(eager)))


def compiled_and_reports(model: Callable[..., Any], options: dict[str, Any] | None = None) -> tuple[Callable[..., Any], list[Any]]:
    """`model` compiled by dsi, run by the reference executor, and the list to which the report of each graph is added."""
    from dsi.compiler.backend import dsi
    from dsi.compiler.observe import collecting

    reports: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with collecting() as contexts:
            compiled = dsi(gm, example_inputs, options={"executor": "reference", **(options or {})})
        reports.extend(context.report for context in contexts)
        return compiled

    return torch.compile(model, backend=backend), reports


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def logits_of(output: Any) -> Tensor:
    """The tensor that is compared: logits, or the last hidden state."""
    if isinstance(output, Tensor):
        return output
    value = getattr(output, "logits", None)
    return value if value is not None else output.last_hidden_state
