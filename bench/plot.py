"""`python -m bench plot RESULTS.json …`: the share of the roofline that each side reaches, by model and batch, as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

OURS = ("#0b6e4f", "#35b37e", "#9bd7b5", "#1f8a70", "#57c4ad", "#a3c940", "#5f7d1f", "#c8e6a0")
THEIRS = ("#c9704a", "#8e6fb0", "#5b84b1", "#9aa0a6", "#c2a83e", "#b0527a", "#6b4f3a")
LEGEND = 3  # sides in a line of it
BAR, GAP, GROUP_GAP, LABEL, PLOT = 13, 2, 14, 300, 560
NOTHING = "nothing to draw: no row has a share of the roofline, which is measured on a CUDA device only"
Rows = dict[str, dict[str, float]]  # what was run -> side -> share of the roofline
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Side(BaseModel):
    """What is read of a side."""

    share: Share | None = Field(None, alias="roofline share")


class Row(BaseModel):
    """What is read of a row."""

    title: str = "?"
    case: str | None = None
    layers: int | None = None
    batch: int = 1
    live: int | None = None
    cache: int | None = None
    length: int | None = None
    sides: dict[str, Side] = {}

    @property
    def label(self) -> str:
        """What ran, in a few words: model, layers, batch, and the tokens."""
        if self.case is None:
            return self.title
        layers = f", {self.layers} layers" if self.layers is not None else ""
        tokens = f", {self.live} of {self.cache} tokens" if self.live is not None and self.cache is not None else ""
        tokens = f", {self.length} tokens" if self.length is not None else tokens
        return f"{self.case}{layers}, b{self.batch}{tokens}"


class Run(BaseModel):
    """What is read of the file of one command."""

    machine: dict[str, Any] = {}
    rows: list[Row] = []


class Runs(BaseModel):
    """What is read of the file of `bench all`, which keeps the contents of many."""

    runs: list[Run]


def read(files: Sequence[Path], wanted: Sequence[str] = ()) -> tuple[Rows, str]:
    """The shares in result files (a later file's where two have the same row and side), and where they were measured; of the `wanted` sides
    alone, if any are named. Rows of one model stand together. Raises ValueError."""
    rows: Rows = {}
    devices: dict[str, None] = {}
    known: set[str] = set()
    for file in files:
        for part in _runs(file):
            for row in part.rows:
                shares = {side: found.share for side, found in row.sides.items() if found.share}
                known.update(shares)
                shares = {side: share for side, share in shares.items() if not wanted or side in wanted}
                if shares:
                    rows.setdefault(row.label, {}).update(shares)
                    devices[str(part.machine.get("device", "?"))] = None
    unknown = [side for side in wanted if side not in known]
    if known and unknown:
        raise ValueError(f"no row has a side {', '.join(map(repr, unknown))}; there are {', '.join(sorted(known))}")
    if not rows:
        raise ValueError(NOTHING)
    return dict(sorted(rows.items(), key=lambda item: _place(item[0]))), ", ".join(devices)


def _runs(file: Path) -> list[Run]:
    """What a file has of each command. Raises ValueError with a sentence where it is no result of a benchmark."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Runs.model_validate(content).runs if isinstance(content, dict) and "runs" in content else [Run.model_validate(content)]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file} is no result of a benchmark: {f'{where}: ' if where else ''}{first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no result of a benchmark: {error}") from None


def _place(label: str) -> list[int | str]:
    """Where a row stands: numbers in a label count as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", label)]


def order_of(rows: Rows) -> list[str]:
    """The sides that occur: dsi's first, then in the order of their names."""
    return sorted({side for shares in rows.values() for side in shares}, key=lambda side: (not side.startswith("dsi"), side))


def colours_of(sides: Sequence[str]) -> dict[str, str]:
    """A colour a side: greens for dsi's."""
    ours = [side for side in sides if side.startswith("dsi")]
    theirs = [side for side in sides if side not in ours]
    pairs = [(side, OURS[i % len(OURS)]) for i, side in enumerate(ours)] + [
        (side, THEIRS[i % len(THEIRS)]) for i, side in enumerate(theirs)
    ]
    return dict(pairs)


def svg(rows: Rows, title: str) -> str:
    """A picture of bars, a group each row."""
    sides = order_of(rows)
    colour = colours_of(sides)
    width, top = LABEL + PLOT + 70, 76 + 18 * ((len(sides) - 1) // LEGEND)
    parts, y = [], float(top)
    for label, shares in rows.items():
        drawn = [side for side in sides if side in shares]
        height = len(drawn) * (BAR + GAP)
        parts.append(f'<text x="{LABEL - 10}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for side in drawn:
            long = max(min(shares[side], 1.0) * PLOT, 1.0)
            words = f"{escape(label)}: {escape(side)} {shares[side]:.2f}"
            parts.append(
                f'<rect x="{LABEL}" y="{y:.1f}" width="{long:.1f}" height="{BAR}" fill="{colour[side]}"><title>{words}</title></rect>'
            )
            parts.append(f'<text class="small" x="{LABEL + long + 5:.1f}" y="{y + BAR - 3:.1f}">{shares[side]:.2f}</text>')
            y += BAR + GAP
        y += GROUP_GAP
    grid = [
        f'<line x1="{LABEL + PLOT * step / 4:.1f}" x2="{LABEL + PLOT * step / 4:.1f}" y1="{top - 8}" y2="{y:.1f}"/>'
        f'<text class="small" x="{LABEL + PLOT * step / 4:.1f}" y="{y + 14:.1f}" text-anchor="middle">{step / 4:.2f}</text>'
        for step in range(5)
    ]
    legend = []
    for number, side in enumerate(sides):
        x, at = LABEL + (number % LEGEND) * 195, 46 + 18 * (number // LEGEND)
        legend.append(f'<rect x="{x}" y="{at - 10}" width="11" height="11" fill="{colour[side]}"/>')
        legend.append(f'<text class="small" x="{x + 16}" y="{at}">{escape(side)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 28:.0f}" viewBox="0 0 {width} {y + 28:.0f}" '
        'font-family="sans-serif" font-size="12">\n'
        "<style>.small{font-size:10.5px} line{stroke:#ddd}</style>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n<text x="12" y="22" font-size="15">{escape(title)}</text>\n'
        + "\n".join([*grid, *legend, *parts])
        + "\n</svg>\n"
    )


def png(rows: Rows, title: str, file: Path) -> None:
    """The same bars by matplotlib. Raises ValueError where it is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ValueError(f"{file}: PNG needs matplotlib (pip install matplotlib); a name that ends in .svg needs nothing") from None
    sides = order_of(rows)
    colour = colours_of(sides)
    count = sum(map(len, rows.values()))
    figure = Figure(figsize=(11, 1.6 + 0.17 * count + 0.12 * len(rows)), layout="constrained")
    axes = figure.subplots()
    at, ticks = 0.0, []
    for label, shares in rows.items():
        drawn = [side for side in sides if side in shares]
        ticks.append((at + (len(drawn) - 1) / 2, label))
        for side in drawn:
            axes.barh(at, shares[side], 0.85, color=colour[side])
            axes.text(shares[side] + 0.005, at, f"{shares[side]:.2f}", va="center", fontsize=7)
            at += 1
        at += 0.9
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.05), title=title)
    axes.margins(y=0.01)
    axes.legend([Patch(color=colour[side]) for side in sides], sides, fontsize=8, loc="lower right")
    figure.savefig(file, dpi=130)


def draw(files: Sequence[Path], out: Path, sides: Sequence[str] = ()) -> None:
    """Draw the rows of `files` into `out`, by its ending: all sides, or those that are named. Raises ValueError with a sentence where that
    cannot be."""
    rows, where = read(files, sides)
    title = f"Share of the roofline, {where}"
    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"{out}: a picture's name ends in .svg or .png")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".png":
            png(rows, title, out)
        else:
            out.write_text(svg(rows, title), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from None
