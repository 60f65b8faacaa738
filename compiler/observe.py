"""Observers: what is told of a compilation while it runs, to the log, to torch's trace, to the dump and to whoever collects reports."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
import warnings
from collections.abc import Iterator

from torch import fx

from dsi.ir.context import Context
from dsi.passes.pipeline import Stage

log = logging.getLogger("dsi.compiler")

_collected: contextvars.ContextVar[list[Context] | None] = contextvars.ContextVar("dsi_collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Context]]:
    """Within: the contexts of all graphs compiled by this thread, in order."""
    contexts: list[Context] = []
    token = _collected.set(contexts)
    try:
        yield contexts
    finally:
        _collected.reset(token)


class Observer:
    """Runs the stages of one graph and tells of them."""

    def __init__(self, gm: fx.GraphModule, context: Context):
        self.context = context

    def run(self, stage: Stage, gm: fx.GraphModule) -> None:
        """Run one stage on `gm`."""
        start = time.perf_counter()
        stage.run(gm, self.context)
        log.debug("%s: %.1f ms, %d nodes", stage.name, 1e3 * (time.perf_counter() - start), len(gm.graph.nodes))

    def aot(self, gm: fx.GraphModule) -> None:
        """AOTAutograd has made `gm`."""

    def aside(self, reason: str) -> None:
        """The graph is run as it is: noted in the report, and said once for each reason."""
        note = f"stepped aside: {reason}"
        self.context.report.notes.append(note)
        warnings.warn(f"dsi {note}", stacklevel=2)


@contextlib.contextmanager
def observing(gm: fx.GraphModule, context: Context) -> Iterator[Observer]:
    """An observer of the compilation of `gm`."""
    collected = _collected.get()
    if collected is not None:
        collected.append(context)
    yield Observer(gm, context)
