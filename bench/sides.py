"""The sides of a comparison: ways to run a model, each with what compiling it takes and how far off its numbers may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bench import estimates, path, weights
from bench.estimates import Compiling, Size

SLACK = 2.0  # a side's error against the wider dtype over eager's own: one sample of each is noisy
FLOOR = 1e-6  # errors below this are rounding of any dtype that is timed


@dataclass(frozen=True)
class Side:
    """One way to run a model. `captures`: the harness may capture its calls in a CUDA graph of its own. `compiling`: the seconds that it is
    expected to compile, until this run has measured it. `slack`: how many times eager's own error it may have. `weights`: what is done to a
    copy of the model before (bench/weights.py). `int8`: it reads int8 weights."""

    name: str
    backend: str | None
    mode: str | None
    captures: bool
    compiling: Compiling
    slack: float = SLACK
    weights: str = ""
    int8: bool = False

    def seconds(self, size: Size, before: Iterable[Side] = ()) -> float:
        """Seconds of compiling so much, after the sides `before` have compiled the same."""
        return self.compiling.seconds(size, any(side._kernels == self._kernels for side in before))

    @property
    def _kernels(self) -> tuple[str | None, bool, str, bool]:
        """What sides have in common that share kernels."""
        return self.backend, "max-autotune" in (self.mode or ""), self.weights, self.int8

    def bound(self, eager: float, rounding: float = 0.0) -> float:
        """The error against the wider dtype that it may have, where eager's is so large, and that of int8 weights `rounding`."""
        return self.slack * (eager + rounding * self.int8) + FLOOR

    def compile(self, function: Any) -> Any:
        """`function` (or a module) as this side runs it."""
        if self.backend is None:
            return function
        if self.backend == "deepspeed":
            raise ValueError("DeepSpeed runs its own layers, no model: python -m bench deepspeed")
        function = weights.prepared(self.weights, function)
        backend = path.backend() if self.backend == "dsi" else self.backend
        if self.backend == "dsi" and self.int8:
            options = {"dtype": "int8", "mode": self.mode or "default"}
            return torch.compile(function, backend=backend, options=options, fullgraph=True)
        return torch.compile(function, backend=backend, mode=self.mode, fullgraph=True)


SIDES = {
    side.name: side
    for side in (
        Side("eager", None, None, True, estimates.EAGER),
        Side("default", "inductor", None, True, estimates.INDUCTOR),
        Side("reduce-overhead", "inductor", "reduce-overhead", False, estimates.INDUCTOR),
        Side("max-autotune", "inductor", "max-autotune", False, estimates.AUTOTUNED),
        Side("max-autotune-no-cudagraphs", "inductor", "max-autotune-no-cudagraphs", True, estimates.AUTOTUNED),
        Side("dsi", "dsi", None, True, estimates.DSI),
        Side("dsi-reduce-overhead", "dsi", "reduce-overhead", False, estimates.DSI),
        Side("dsi-max-autotune", "dsi", "max-autotune", False, estimates.DSI_TUNED),
        Side("dsi-max-autotune-no-cudagraphs", "dsi", "max-autotune-no-cudagraphs", True, estimates.DSI_TUNED),
        Side("dsi-laid-out", "dsi", None, True, estimates.DSI, weights="laid out"),
        Side("dsi-laid-out-reduce-overhead", "dsi", "reduce-overhead", False, estimates.DSI, weights="laid out"),
        Side("dsi-laid-out-max-autotune", "dsi", "max-autotune", False, estimates.DSI_TUNED, weights="laid out"),
        Side("dsi-int8", "dsi", None, True, estimates.DSI_INT8, int8=True),
        Side("dsi-int8-reduce-overhead", "dsi", "reduce-overhead", False, estimates.DSI_INT8, int8=True),
        Side("dsi-int8-max-autotune", "dsi", "max-autotune", False, estimates.DSI_TUNED, int8=True),
        Side("int8-recipe", "inductor", "max-autotune-no-cudagraphs", True, estimates.AUTOTUNED, weights="recipe", int8=True),
        # Not by max-autotune, which compiled 4 layers of its products by sums for more than 170 s.
        Side("torchao", "inductor", None, True, estimates.TORCHAO, weights="torchao", int8=True),
        # bench/deepspeed_side.py knows how to run it, nothing else does. It is not ours to be judged by our bound.
        Side("deepspeed", "deepspeed", None, True, estimates.DEEPSPEED, slack=50.0),
    )
}


def sides_of(text: str) -> tuple[str, ...]:
    """Names of sides from a list with commas. Raises ValueError naming one that is unknown."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in SIDES]
    if unknown or not names:
        raise ValueError(f"unknown comparator {', '.join(unknown) or '(none)'}; known: {', '.join(SIDES)}")
    return names
