"""How long each part of a compilation took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from dsi.ir.context import Context


@contextlib.contextmanager
def timed(context: Context, part: str) -> Iterator[None]:
    """Adds the seconds spent within to `context.report.seconds[part]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = context.report.seconds
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
