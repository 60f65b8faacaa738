"""Steps of a generation: run as they are, or recorded as CUDA graphs and launched with one call each."""

from __future__ import annotations

import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from dsi.runtime.graphs import CudaRecorder, Recorder

log = logging.getLogger("dsi.engine")

GRAPHS = 32  # recorded steps that an engine keeps; the least recently used one gives way
PROMPT_RUNS = 3  # of a prompt of one size, as it is, before it is recorded: recording takes as long as many prompts


class Steps:
    """Runs steps by key. A step with a key reads and writes the same memory each time it is run, and computes the same.

    The first runs with a key are the step itself (kernels are compiled and loaded then), the next records it, which executes nothing, and
    launches the record, as every later one does. Without a `recorder` every run is the step itself. Where a step cannot be recorded, those
    of its kind (the first entry of its key) go on as they are; `problem` says why.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.problem = ""
        self.launched = self.plain = 0  # records launched, and steps run as they are, so far
        self._recorded: OrderedDict[Hashable, tuple[Callable[[], None], Any]] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._plain: set[Hashable] = set()  # kinds of which one could not be recorded

    def run(self, key: tuple[Hashable, ...], step: Callable[[], Any], plain: int = 1) -> Callable[[], None] | None:
        """Run `step`, or what was recorded of it for the current stream, after so many `plain` runs. Returns what launches the record, to
        be called for the same step again; None where there is none yet."""
        here = self._here(key)
        found = self._recorded.get(here)
        may = self.recorder is not None and key[0] not in self._plain and self.recorder.may_record()
        if found is None and may and self._seen[here] >= plain:
            found = self._record(key[0], here, step)
        if found is None:
            self.plain += 1
            step()
            self._seen[here] += 1  # a step that was broken off has not compiled all that a record needs
            return None
        self._recorded.move_to_end(here)
        launch = functools.partial(self._launch, found[0])
        launch()
        return launch

    def has(self, key: Hashable) -> bool:
        """Whether a run of `key` would launch a record."""
        return self._here(key) in self._recorded

    def _launch(self, replay: Callable[[], None]) -> None:
        self.launched += 1
        replay()

    def replay(self, key: Hashable) -> Callable[[], None] | None:
        """What launches the record of `key`, to be measured; None where there is none."""
        found = self._recorded.get(self._here(key))
        return found[0] if found is not None else None

    def _here(self, key: Hashable) -> Hashable:
        """Kernels have scratch memory for each stream: a record belongs to the one that it is launched on."""
        return (key, self.recorder.place() if self.recorder is not None else None)

    def forget(self) -> None:
        """Memory that steps use has moved: record them anew."""
        if self._recorded and torch.cuda.is_available():
            torch.cuda.synchronize()  # a step behind the end of the last call may be running
        self._recorded.clear()
        self._seen.clear()

    def _record(self, kind: Hashable, key: Hashable, step: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        assert self.recorder is not None

        def run() -> tuple[()]:
            step()
            return ()

        try:
            replay, _ = self.recorder.record(run, self.recorder.place())
        except (RuntimeError, ValueError) as error:
            self._plain.add(kind)
            self.problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            log.warning("dsi: no CUDA graph of a %s could be recorded, so every kernel is launched by itself: %s", kind, self.problem)
            return None
        self._recorded[key] = (replay, step)  # the step holds whatever its kernels read
        if len(self._recorded) > GRAPHS:
            self._recorded.popitem(last=False)
        return self._recorded[key]


def recorder_for(device: torch.device, wanted: bool) -> Recorder | None:
    """CUDA's recorder where graphs are wanted and there is something to record."""
    return CudaRecorder() if wanted and device.type == "cuda" else None
