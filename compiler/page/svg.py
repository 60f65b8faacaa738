"""A picture as SVG: boxes that are links, lines between them, a frame around what is repeated, a bar at every all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import networkx as nx

from .layout import Box, Layout, lay_out
from .model import INPUT, OUTPUT, REDUCE, Item, Picture

_CHAR, _LINE, _PAD = 7.3, 16.0, 11.0

Bounds = tuple[float, float, float, float]  # left, top, right, bottom
_LEAST = 0.72  # a picture shrinks to this before it has to be scrolled


def draw(picture: Picture, prefix: str, title: str, narrow: bool = False) -> str:
    """`picture` as one <svg>. Links go to "#<prefix><item>"; `narrow`: boxes are small, for pictures with many of them."""
    sizes = {name: _size(item, narrow) for name, item in picture.items.items()}
    edges, groups = _acyclic(picture), [names for names, _ in picture.frames]
    layout = lay_out(sizes, edges, groups)
    frames = _frames(layout, picture.frames)
    if any(bounds is None for _, bounds in frames):
        layout = lay_out(sizes, edges, groups, alone=True)
        frames = _frames(layout, picture.frames)
    # A frame around a frame may reach beyond what the layout has left free.
    left, top, right, bottom = _hull([(0, 0, layout.width, layout.height), *(_wider(bounds, 4) for _, bounds in frames if bounds)])
    width, height = right - left, bottom - top
    parts = [
        f'<svg class="picture" role="group" aria-label="{escape(title)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" style="min-width:{width * _LEAST:.0f}px">'
    ]
    parts += [text for text, _ in frames]
    for (a, b), points in layout.edges.items():
        ends = f'data-from="{escape(a)}" data-to="{escape(b)}"'
        parts.append(f'<path class="edge" {ends} d="{_path(points)}"/>')
    parts += [_box(item, layout, prefix, narrow) for item in picture.items.values()]
    return "\n".join([*parts, "</svg>"])


def _size(item: Item, narrow: bool) -> tuple[float, float]:
    widest = max(len(line) for line in item.lines)
    if narrow:
        return widest * _CHAR + 2 * 8, _LINE * len(item.lines) + 8
    return max(widest * _CHAR + 2 * _PAD, 90.0), _LINE * len(item.lines) + 2 * 7


def _acyclic(picture: Picture) -> list[tuple[str, str]]:
    """The edges between drawn items, without those that would close a circle (folding may have made one)."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_edges_from((source, item.name) for item in picture.items.values() for source in item.inputs if source in picture.items)
    while not nx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*nx.find_cycle(graph)[-1][:2])
    return list(graph.edges)


def _path(points: list[tuple[float, float]]) -> str:
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        if abs(x1 - x0) < 0.5:
            text += f"L{x1:.1f} {y1:.1f}"
        else:
            middle = (y0 + y1) / 2
            text += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return text


def _box(item: Item, layout: Layout, prefix: str, narrow: bool) -> str:
    box = layout.boxes[item.name]
    left, top = box.x - box.width / 2, box.y - box.height / 2
    round_ = box.height / 2 if item.kind in (INPUT, OUTPUT) else 4 if narrow else 7
    shape = ""
    if item.kind == REDUCE:
        shape = f'<line class="boundary" x1="4" x2="{layout.width - 4:.1f}" y1="{box.y:.1f}" y2="{box.y:.1f}"/>'
    shape += f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{round_:.1f}"/>'
    words = "".join(
        f'<text x="{box.x:.1f}" y="{top + (4 if narrow else 7) + _LINE * i + 12:.1f}"'
        f"{' class=small' if i and i == len(item.lines) - 1 else ''}>{escape(line)}</text>"
        for i, line in enumerate(item.lines)
    )
    title = f"<title>{escape(_title(item))}</title>"
    if not item.shows:
        return f'<g class="node {item.kind}" data-name="{escape(item.name)}">{title}{shape}{words}</g>'
    return (
        f'<a class="node {item.kind}" href="#{prefix}{escape(item.shows)}" data-name="{escape(item.name)}" '
        f'data-shows="{prefix}{escape(item.shows)}">{title}{shape}{words}</a>'
    )


def _title(item: Item) -> str:
    node = item.node
    place = f"{node.file.rsplit('/', 1)[-1]}:{node.line}: {node.code}" if node.file else ""
    return "\n".join(part for part in (f"{item.name}: {item.lines[0] if item.region is None else item.region.label}", place) if part)


def _frames(layout: Layout, frames: Sequence[tuple[tuple[str, ...], int]]) -> list[tuple[str, Bounds | None]]:
    """Each frame as SVG, around its items and the frames of those within it; outer ones first.

    Layers that run in between each other have none (it would take in strangers): each of their boxes says by itself how often it occurs.
    """
    known: list[tuple[frozenset[str], Bounds | None]] = []
    drawn: list[tuple[str, Bounds | None]] = []
    for names, count in reversed(frames):  # inner ones first
        inside = frozenset(names) & layout.boxes.keys()
        boxes = [layout.boxes[name] for name in names if name in inside]
        within = [bounds for other, bounds in known if bounds is not None and other <= inside]
        left, top, right, bottom = _hull([*map(_bounds, boxes), *within])
        around: Bounds = (left - 8, top - 23, right + 8, bottom + 10)
        bounds: Bounds | None = around
        if any(_overlap(around, _bounds(box)) for name, box in layout.boxes.items() if name not in inside):
            bounds = None
            text = "".join(f'<g class="frame">{_times(b.x - b.width / 2, b.y - b.height / 2 - 4, count)}</g>' for b in boxes)
        else:
            size = f'width="{right - left + 16:.1f}" height="{bottom - top + 33:.1f}"'
            text = f'<g class="frame"><rect x="{left - 8:.1f}" y="{top - 23:.1f}" {size} rx="10"/>{_times(left, top - 8, count)}</g>'
        known.append((inside, bounds))
        drawn.append((text, bounds))
    return drawn[::-1]


def _times(x: float, y: float, count: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">× {count}</text>'


def _bounds(box: Box) -> Bounds:
    return box.x - box.width / 2, box.y - box.height / 2, box.x + box.width / 2, box.y + box.height / 2


def _wider(bounds: Bounds, by: float) -> Bounds:
    return bounds[0] - by, bounds[1] - by, bounds[2] + by, bounds[3] + by


def _hull(several: Sequence[Bounds]) -> Bounds:
    left, top, right, bottom = zip(*several, strict=True)
    return min(left), min(top), max(right), max(bottom)


def _overlap(a: Bounds, b: Bounds) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
