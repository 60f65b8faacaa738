"""What one compilation carries from stage to stage."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import Refusal
from .fakes import Fakes
from .region import Region


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight that int8 stands in for: its name and shape in the model, the number format, bytes as the model has it and in int8."""

    name: str
    shape: tuple[int, ...]
    format: str
    before: int
    after: int


@dataclass
class Report:
    """What happened to one graph: counts, regions, and every reason why something was left alone."""

    hits: Counter[str] = field(default_factory=Counter)  # rule name -> times it fired
    misses: dict[str, Refusal] = field(default_factory=dict)  # rule name -> nearest miss, for rules that fired 0 times
    regions: list[Region] = field(default_factory=list)
    unfused: list[Refusal] = field(default_factory=list)  # operators left to ATen, and why
    quantised: list[QuantisedWeight] = field(default_factory=list)
    kept: list[Refusal] = field(default_factory=list)  # weights that stay as they are where the options ask for int8, and why
    across: list[str] = field(default_factory=list)  # weights stored so that what one output reads is far apart (`dsi.lay_out`)
    notes: list[str] = field(default_factory=list)  # what a user should know: steps aside, cache-sized copies, fallbacks
    custom: Counter[str] = field(default_factory=Counter)  # operator of a user's own (ir/custom.py) -> nodes that call it
    seconds: dict[str, float] = field(default_factory=dict)  # part of the compilation -> seconds spent in it


class Fuel:
    """`DSI_FUEL=n`: the first n rewrites happen and no more, so that a wrong one is found by bisection. None: unlimited."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.spent = 0
        self.log: list[str] = []

    def take(self, what: str) -> bool:
        """Whether one more rewrite, described by `what`, may happen; counts it if so."""
        if self.limit is not None and self.spent >= self.limit:
            return False
        self.spent += 1
        self.log.append(what)
        return True


@dataclass
class Context:
    """Options, report, fuel and the fake mode of one compilation. Passed to every stage; holds no graph."""

    options: Any  # dsi.ir.options.Options
    report: Report = field(default_factory=Report)
    fuel: Fuel = field(default_factory=Fuel)
    weights: dict[str, str] = field(default_factory=dict)  # placeholder that keeps its place between calls -> its name in the model
    fake_mode: Any = None  # the tracing fake mode; set before the first ATen-level stage
    fakes: Fakes = field(default_factory=Fakes)
    device: str = "cpu"  # device type that the graph runs on
    int8_reads: list[tuple[str, Any]] = field(default_factory=list)  # what reads int8 (ir/source.py: captured_as), its form
    dequantised: Callable[[Any, Any], Any] | None = None  # (weight, form) -> what its int8 stands for; None: it has none
    artifacts: dict[str, str] = field(default_factory=dict)  # relative path -> text, e.g. "kernels/<name>.py"
    listener: Callable[[str, str], None] | None = None  # told of each artifact as it is made; the dump and torch's trace

    def emit(self, path: str, text: str) -> None:
        """Hand over a text worth keeping, such as the source of a kernel ("kernels/<name>.py"). May come long after compilation."""
        self.artifacts[path] = text
        if self.listener is not None:
            self.listener(path, text)

    @contextlib.contextmanager
    def faking(self) -> Iterator[None]:
        """Within: operators on fake tensors of this compilation compute fakes only."""
        with self.fake_mode or contextlib.nullcontext():
            yield
