"""Around what is compiled: one line on the terminal, and no garbage collections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dsi.compiler.collector import no_collections
from rich.console import Console


@contextlib.contextmanager
def compiling(what: str, new: bool = True) -> Iterator[None]:
    """Within, if it is `new`: a line that says that the graph of `what` is compiled, where errors go to a terminal, and Python's collector
    of garbage off, in Dynamo's part, too. Neither leaves a trace."""
    if not new:
        yield
        return
    console = Console(stderr=True)
    line = console.status(f"dsi: compiling the {what}, once for this shape …", spinner="dots") if console.is_terminal else None
    with no_collections(), line or contextlib.nullcontext():
        yield
