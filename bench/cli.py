"""What the commands of `python -m bench` share: options, and the reading of lists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

Against = Annotated[str, typer.Option("--against", "--sides", help="Sides, by commas (bench/sides.py names them).")]
Json = Annotated[Path | None, typer.Option("--json", help="File for everything that was measured.")]
Seconds = Annotated[
    float | None, typer.Option("--budget", help="Seconds that the run may take; what no longer fits is skipped or broken off.")
]
Blocks = Annotated[int, typer.Option(min=1, help="Interleaved blocks of which the median is taken.")]
Dtype = Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; left out: the case's own.")]
Limit = Annotated[float | None, typer.Option(help="Seconds that compiling a side may take; a side that takes longer is left out.")]
Small = Annotated[bool, typer.Option("--small", help="Toy sizes, to try the harness anywhere.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of each model; left out: as in bench/shapes.py.")]
FewLayers = Annotated[int | None, typer.Option(min=1, help="Layers of each model.")]
Room = Annotated[int, typer.Option(help="Tokens that the static cache has room for.")]
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
    return Settings(sides, blocks, dtype, small, "cuda" if torch.cuda.is_available() else "cpu", Budget(budget), json, limit)


def numbers(text: str) -> list[int]:
    """Integers from a list with commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers") from None


def models(text: str, decoders: bool = False) -> list[str]:
    """Names of shapes from a list with commas."""
    from bench.shapes import SHAPES

    known = [name for name, shape in SHAPES.items() if not decoders or shape.family != "bert"]
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown model {', '.join(unknown)}; known: {', '.join(known)}")
    return names
