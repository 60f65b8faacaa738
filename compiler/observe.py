"""Observers: what is told of a compilation while it runs, to the log, to torch's trace, to the dump and to whoever collects reports."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import warnings
from collections.abc import Iterator

from dsi.ir.context import Context
from dsi.ir.spec import Aliases, check_graph, output_aliases
from dsi.passes.pipeline import PIPELINE, Stage
from torch import fx
from torch._logging import trace_structured

from .dump import Dump, rules_text
from .explain import Explanation
from .printing import graph_text
from .record import GraphRecord

log = logging.getLogger("dsi.compiler")  # TORCH_LOGS="+dsi" and torch._logging.set_logs(modules={"dsi": DEBUG}) reach it by its name

_collected: contextvars.ContextVar[list[Context] | None] = contextvars.ContextVar("dsi_collected", default=None)
_recorded: contextvars.ContextVar[dict[int, GraphRecord] | None] = contextvars.ContextVar("dsi_recorded", default=None)
_said: set[str] = set()
_saying = threading.Lock()


@contextlib.contextmanager
def collecting() -> Iterator[list[Context]]:
    """Within: the contexts of all graphs that this thread compiles, in order."""
    contexts: list[Context] = []
    token = _collected.set(contexts)
    try:
        yield contexts
    finally:
        _collected.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[dict[int, GraphRecord]]:
    """Within: what a page shows of every graph that this thread compiles, by the `id` of its context (see `collecting`)."""
    records: dict[int, GraphRecord] = {}
    token = _recorded.set(records)
    try:
        yield records
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def observing(gm: fx.GraphModule, context: Context) -> Iterator[Observer]:
    """An observer of the compilation of `gm`, Dynamo's graph."""
    collected = _collected.get()
    if collected is not None:
        collected.append(context)
    observer = Observer(context)
    observer.captured("00_dynamo", gm)
    try:
        yield observer
    except BaseException as error:
        # Dynamo may start over (a float that turned out to be constant): the graph of the first attempt never runs.
        context.report.notes.append(f"not compiled: {type(error).__name__}: {error}")
        if collected is not None:
            collected[:] = [other for other in collected if other is not context]
        raise
    finally:
        observer.finish()


class Observer:
    """Runs the stages of one graph and tells of them; under `check` holds each result against the IR's specification."""

    def __init__(self, context: Context):
        self.context = context
        self.dump = Dump(context.options.dump, context) if context.options.dump else None
        self._aliases: Aliases | None = None
        context.listener = self._artifact

    def run(self, stage: Stage, gm: fx.GraphModule) -> None:
        """Run one stage on `gm`."""
        context = self.context
        spent = context.fuel.spent
        with self.timed(stage.name):
            stage.run(gm, context)
        milliseconds = 1e3 * context.report.seconds[stage.name]
        log.info("%s: %.1f ms, %d rewrites, %d nodes", stage.name, milliseconds, context.fuel.spent - spent, len(gm.graph.nodes))
        for what in context.fuel.log[spent:]:
            log.debug("%s", what)
        self._tell(f"{PIPELINE.index(stage) + 1:02d}_{stage.name}", gm)
        if context.options.check and stage.leaves is not None:
            check_graph(gm, stage.leaves, context.fake_mode, self._aliases)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds spent within to the report, under `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.context.report.seconds
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start

    def captured(self, name: str, gm: fx.GraphModule) -> None:
        """Another tool has made `gm`: Dynamo, or AOTAutograd."""
        log.info("%s: %d nodes", name, len(gm.graph.nodes))
        self._tell(name, gm, captured=True)

    def aot(self, gm: fx.GraphModule) -> None:
        """AOTAutograd has made `gm` after the Dynamo-level stages."""
        number = sum(stage.level == "dynamo" for stage in PIPELINE)
        self.captured(f"{number:02d}b_aot", gm)
        if self.context.options.check:
            self._aliases = output_aliases(gm)
            check_graph(gm, "aten", self.context.fake_mode, self._aliases)

    def left_to_aot(self, reason: str) -> None:
        """The graph is not plain, so that AOTAutograd traces it."""
        log.info("traced by AOTAutograd: %s", reason)

    def aside(self, reason: str) -> None:
        """The graph is run as it is: noted in its report, and warned of once a process for each kind of reason."""
        note = f"stepped aside, and the graph runs as it is: {reason}"
        self.context.report.notes.append(note)
        log.info("%s", note)
        kind = reason.split(" (")[0]  # without the place
        with _saying:
            new = kind not in _said
            _said.add(kind)
        if new:
            warnings.warn(f"dsi {note}", stacklevel=2)

    def finish(self) -> None:
        """The graph is compiled, or compiling it has failed."""
        report = self.context.report
        self._own_rules_that_missed()
        for name, miss in report.misses.items():
            log.debug("nearest miss of %s: %s", name, miss)
        for refusal in report.unfused:
            log.debug("left as it was: %s", refusal)
        _trace("dsi_rules", lambda: rules_text(self.context))
        _trace("dsi_report", lambda: str(Explanation([report])))
        if self.dump is not None:
            self.dump.finish()

    def _own_rules_that_missed(self) -> None:
        """A rule of the user's that has fired nowhere yet is warned of, once a process, with the place where it came nearest."""
        report = self.context.report
        for rule in self.context.options.rules:
            name = rule.name()
            with _saying:
                new = f"rule {name}" not in _said
                if new and (report.hits[name] or name in report.misses):
                    _said.add(f"rule {name}")
            if new and not report.hits[name] and name in report.misses:
                warnings.warn(f"dsi: your rule fired nowhere in this graph; its nearest miss: {report.misses[name]}", stacklevel=2)

    def _tell(self, name: str, gm: fx.GraphModule, captured: bool = False) -> None:
        _trace(f"dsi_{name}", lambda: graph_text(gm))
        if (records := _recorded.get()) is not None:
            records.setdefault(id(self.context), GraphRecord()).take(name, gm)
        if self.dump is not None:
            (self.dump.captured if captured else self.dump.graph)(name, graph_text(gm))

    def _artifact(self, path: str, text: str) -> None:
        _trace(f"dsi_{path.replace('/', '_')}", lambda: text)
        if self.dump is not None:
            self.dump.write(path, text)


def _trace(name: str, text) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
