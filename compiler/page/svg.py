"""A picture as SVG: boxes that are links, lines between them, a frame around what is repeated, a bar at every all-reduce."""

from __future__ import annotations

from html import escape
from itertools import pairwise

import networkx as nx

from .layout import Box, Layout, lay_out
from .model import INPUT, OUTPUT, REDUCE, Item, Picture

_CHAR, _LINE, _PAD = 7.3, 16.0, 11.0

_LEAST = 0.72  # a picture shrinks to this before it has to be scrolled


def draw(picture: Picture, prefix: str, title: str, narrow: bool = False) -> str:
    """`picture` as one <svg>. Links go to "#<prefix><item>"; `narrow`: boxes are small, for pictures with many of them."""
    sizes = {name: _size(item, narrow) for name, item in picture.items.items()}
    layout = lay_out(sizes, _acyclic(picture), [names for names, _ in picture.frames])
    parts = [
        f'<svg class="picture" role="group" aria-label="{escape(title)}" width="{layout.width:.0f}" height="{layout.height:.0f}" '
        f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" style="min-width:{layout.width * _LEAST:.0f}px">'
    ]
    parts += [_frame(layout, names, count) for names, count in picture.frames]
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


def _frame(layout: Layout, names: tuple[str, ...], count: int) -> str:
    boxes: list[Box] = [layout.boxes[name] for name in names if name in layout.boxes]
    left = min(b.x - b.width / 2 for b in boxes) - 8
    right = max(b.x + b.width / 2 for b in boxes) + 8
    top = min(b.y - b.height / 2 for b in boxes) - 23
    bottom = max(b.y + b.height / 2 for b in boxes) + 10
    if any(
        left < b.x + b.width / 2 and b.x - b.width / 2 < right and top < b.y + b.height / 2 and b.y - b.height / 2 < bottom
        for name, b in layout.boxes.items()
        if name not in names
    ):  # layers that run in between each other: a frame would take in strangers
        return "".join(
            f'<g class="frame"><text x="{b.x - b.width / 2:.1f}" y="{b.y - b.height / 2 - 4:.1f}">× {count}</text></g>' for b in boxes
        )
    return (
        f'<g class="frame"><rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" rx="10"/>'
        f'<text x="{left + 8:.1f}" y="{top + 15:.1f}">× {count}</text></g>'
    )
