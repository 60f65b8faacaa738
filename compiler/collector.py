"""No garbage collection while a graph is compiled: each looks at every object of the process, and finds next to nothing to free."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

FROZEN = 1000  # objects: Python 3.12 has frozen some hundreds when it starts; who freezes more has done so on purpose

_changing = threading.Lock()
_within = 0
_was_on = False


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Within: Python's collector of cyclic garbage is off, in the whole process. Afterwards it is as it was before, errors or not.

    A graph of a large model makes hundreds of thousands of objects that stay, which has the collector look at all objects of torch and of
    the model again and again. What is alive at the end counts as old from then on: else a full collection, or Dynamo's own of what is
    young, would follow at once and take the time that was saved. Blocks may be nested, and be run by several threads: the last to end
    turns the collector on.
    """
    global _within, _was_on
    with _changing:
        if not _within:
            _was_on = gc.isenabled()
            gc.disable()
        _within += 1
    try:
        yield
    finally:
        with _changing:
            _within -= 1
            if _was_on and gc.get_freeze_count() < FROZEN:  # what the program has frozen stays so
                gc.freeze()
                gc.unfreeze()
            if _was_on and not _within:
                gc.enable()
