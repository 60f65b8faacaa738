"""Types of argparse options: what they cannot be is said before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def count(text: str) -> int:
    """A number of 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """Numbers of 1 or more, by commas."""
    return [count(part) for part in text.split(",")]


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names by commas, each of which is known."""
    names = list(known)

    def read(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        unknown = [name for name in found if name not in names]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or '(none)'}; known: {', '.join(names)}")
        return found

    return read


def output(text: str) -> Path:
    """A file that can be written, now or later."""
    path = Path(text)
    if reason := why_unwritable(path):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}")
    return path


def beside(path: Path) -> Path:
    """The file that takes the place of the one at `path` once it is whole."""
    return path.with_name(f"{path.name}.new")


def why_unwritable(path: Path) -> str:
    """Why no file can be written at `path`, whose folder is made; "" where one can. What is there stays as it is."""
    if path.is_dir():
        return "it is a folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside(path).touch()
        beside(path).unlink()
    except OSError as error:
        return str(error)
    return ""
