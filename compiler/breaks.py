"""Where Dynamo could not go on: what runs as it is between two graphs, or instead of any, and why."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

from torch._dynamo.utils import counters
from torch.fx import GraphModule

_KINDS = ("graph_break", "unimplemented")  # Dynamo's counters of reasons: a graph ended, or a function was given up
_NEXT = "*** While handling this graph break"
_SKIPPED = re.compile(r"frame skipped: (.+?) \((.+) line (\d+)\)")


class Breaks:
    """Reasons that Dynamo gives from the time that this is made. `seen(gm)` looks at a graph that it hands over, `sentences` sums up."""

    def __init__(self) -> None:
        self._before = {kind: Counter(counters[kind]) for kind in _KINDS}
        self._places: dict[str, str] = {}

    def seen(self, gm: GraphModule) -> None:
        """Takes down where the graph ended, if it ended for a reason."""
        reason: Any = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break and reason.user_stack:
            frame = reason.user_stack[-1]
            self._places[_words(reason.reason)] = f"{os.path.basename(frame.filename)}:{frame.lineno}"

    def sentences(self, graphs: int) -> list[str]:
        """One for each reason; one, too, where there is no graph and no reason."""
        found: dict[str, None] = {}
        given_up = [text for text in self._new("unimplemented") if _SKIPPED.search(text)]
        for text in given_up:
            name, file, line = _SKIPPED.findall(text)[0]
            found[f"{name} ({os.path.basename(file)}:{line}) runs as it is, not in a graph. Dynamo says: {_words(text)}"] = None
        explained = {_words(text) for text in given_up}
        for text in [*self._new("graph_break"), *self._new("unimplemented")]:
            words = _words(text)
            if words not in explained:
                place = f" at {self._places[words]}" if words in self._places else ""
                what = f"a graph ends{place}, and what follows runs as it is up to the next one" if graphs else "nothing was compiled"
                found[f"{what}. Dynamo says: {words}"] = None
        if not graphs and not found:
            return ["nothing was compiled: Dynamo found no operator to take into a graph, or has given the function up in an earlier call"]
        return list(found)

    def _new(self, kind: str) -> list[str]:
        return [str(text) for text in Counter(counters[kind]) - self._before[kind]]


def _words(text: str) -> str:
    """The reason in a line, of several that led to each other the first."""
    return text.split(_NEXT)[0].strip().splitlines()[0].strip()
