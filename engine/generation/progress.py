"""One line on the terminal while something is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def compiling(what: str, new: bool = True) -> Iterator[None]:
    """Within: a line that says that the graph of `what` is compiled, if it is `new` and errors go to a terminal. It leaves no trace."""
    console = Console(stderr=True) if new else None
    if console is None or not console.is_terminal:
        yield
        return
    with console.status(f"dsi: compiling the {what}, once for this shape …", spinner="dots"):
        yield
