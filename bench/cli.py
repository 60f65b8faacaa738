"""What the commands of `python -m bench` share: options, and the reading of lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from bench.arguments import why_unwritable

Against = Annotated[str, typer.Option("--against", "--sides", help="Sides, by commas (bench/sides.py names them).")]
Json = Annotated[Path | None, typer.Option("--json", help="File for everything that was measured.")]
Seconds = Annotated[
    float | None, typer.Option("--budget", min=0, help="Seconds that the run may take; what no longer fits is skipped or broken off.")
]
Blocks = Annotated[int, typer.Option(min=1, help="Interleaved blocks of which the median is taken.")]
Dtype = Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; left out: the case's own.")]
Limit = Annotated[
    float | None, typer.Option(min=0.01, help="Seconds that compiling a side may take; a side that takes longer is left out.")
]
Small = Annotated[bool, typer.Option("--small", help="Toy sizes, to try the harness anywhere.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of each model; left out: as in bench/shapes.py.")]
FewLayers = Annotated[int | None, typer.Option(min=1, help="Layers of each model.")]
Room = Annotated[int, typer.Option(min=1, help="Tokens that the static cache has room for.")]
Live = Annotated[int, typer.Option(min=1, help="Tokens in the cache when a step begins.")]
Batches = Annotated[str, typer.Option(help="Batch sizes, by commas.")]
Cases = Annotated[str, typer.Option(help="Models, by commas (bench/shapes.py).")]


def settings(
    against: str, blocks: int, dtype: str | None, small: bool, budget: float | None, json: Path | None, limit: float | None = None
):
    """The settings of a command; a mistake in them ends it before anything is measured."""
    import torch

    from bench.comparators import DTYPES
    from bench.report import Settings
    from bench.sides import sides_of
    from bench.timing import Budget

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    try:
        sides = sides_of(against)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json is not None:
        writable(json, "--json")
    return Settings(sides, blocks, dtype, small, "cuda" if torch.cuda.is_available() else "cpu", Budget(budget), json, limit)


def writable(path: Path, option: str) -> None:
    """Ends the command where no file can be written there: said before anything is measured, since what was measured would be lost."""
    if reason := why_unwritable(path):
        raise typer.BadParameter(f"{str(path)!r} cannot be written: {reason}", param_hint=option)


def table_of_defaults(path: Path | None, read: Callable[[Path], Any]) -> None:
    """Ends the command where winners cannot be added to the file at `path`, which may not exist yet and is read by `read`; on a GPU that
    the table has no name for they would be taken for another's."""
    if path is None:
        return
    from dsi.codegen.devices import DEVICES

    from bench.timing import device_name

    name = device_name()
    if name and not any(known in name for known in DEVICES):
        raise typer.BadParameter(f"winners are kept for {', '.join(DEVICES)}, and this is {name}", param_hint="--defaults")
    writable(path, "--defaults")
    try:
        if path.exists():
            read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        raise typer.BadParameter(f"{str(path)!r} is no table of defaults: {why}", param_hint="--defaults") from None


def listed(text: str) -> list[str]:
    """What a list with commas names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def known_ones(text: str, known: Iterable[str], what: str) -> list[str]:
    """Names from a list with commas, one at least, each of which is `known`."""
    names, known = listed(text), list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown) or '(none)'}; known: {', '.join(known)}")
    return names


def numbers(text: str) -> list[int]:
    """Integers, none below 1, from a list with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r}: every number must be 1 or more")
    return found


def models(text: str, decoders: bool = False) -> list[str]:
    """Names of shapes from a list with commas."""
    from bench.shapes import SHAPES

    return known_ones(text, [name for name, shape in SHAPES.items() if not decoders or shape.family != "bert"], "model")


def steps_fit(names: Sequence[str], cache: int, lives: Sequence[int | None]) -> None:
    """Ends the command where a block of steps does not fit the cache behind the `lives` tokens, unless all models are encoders."""
    from bench.decode import STEPS
    from bench.shapes import SHAPES

    if names and all(SHAPES[name].family == "bert" for name in names):
        return
    most = max(1 if live is None else live for live in lives)
    if most > cache - STEPS:
        raise typer.BadParameter(f"a block of {STEPS} steps behind {most} tokens needs a cache of {most + STEPS}, not of {cache}")
