"""Seconds that a part of a run may take: what goes on longer is broken off."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Expired(Exception):
    """A part of a run took longer than it may."""


@contextlib.contextmanager
def at_most(seconds: float | None, what: str) -> Iterator[None]:
    """Raises `Expired` in the block once `seconds` have passed, as soon as Python runs again (a compiler's own code is not interrupted).

    No limit without `seconds`, nor outside of the main thread, nor where the system has no timer signals.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise Expired(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def expired(error: BaseException | None) -> Expired | None:
    """The `Expired` behind an error that a compiler has made of it, if that is what it was."""
    while error is not None and not isinstance(error, Expired):
        error = error.__cause__ or error.__context__
    return error
