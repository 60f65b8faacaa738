"""A small layered layout: nodes in rows by their longest way from an input, in the order that crosses few edges, edges as smooth lines.

The steps are the classical ones (Sugiyama): layers, dummy nodes on long edges, ordering by barycentres, coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

LAYER_GAP, NODE_GAP, DUMMY_WIDTH, MARGIN = 30.0, 16.0, 10.0, 12.0
_SWEEPS = 8


@dataclass
class Box:
    """Where a node lies: its centre and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass
class Layout:
    """Boxes by node, the points of each edge from its source's lower side to its target's upper side, and the size of it all."""

    boxes: dict[str, Box] = field(default_factory=dict)
    edges: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


def lay_out(
    sizes: Mapping[str, tuple[float, float]],
    edges: Iterable[tuple[str, str]],
    groups: Iterable[Sequence[str]] = (),
    alone: bool = False,
) -> Layout:
    """Places nodes of the given (width, height) in layers from top to bottom. Raises `ValueError` if the edges form a circle.

    What a group reads stands above all of the group and what reads it below, so that a frame around it holds nothing else; unless something
    unrelated comes to stand beside it. `alone`: that stands above it, too.
    """
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(sizes)
    graph.add_edges_from((a, b) for a, b in edges if a != b)
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError(f"the edges form a circle: {nx.find_cycle(graph)}")
    layer = _layers(_with_gates(graph, groups, alone))
    rows, segments, chains = _with_dummies(graph, layer)
    _order(rows, segments)
    widths = {node: sizes[node][0] if node in sizes else DUMMY_WIDTH for row in rows for node in row}
    centres = _centres(rows, segments, widths)
    return _placed(sizes, rows, centres, chains)


def _with_gates(graph: nx.DiGraph, groups: Iterable[Sequence[str]], alone: bool) -> nx.DiGraph:
    """`graph` with a node before and one after each group, through which all its edges to other nodes lead; `alone`: and all other nodes
    that do not depend on the group come before it."""
    gated = graph.copy()
    for number, group in enumerate(groups):
        inside = set(group)
        trial = gated.copy()
        for node in inside:
            for other in gated.predecessors(node):
                if other not in inside:
                    trial.add_edge(other, ("before", number))
            for other in gated.successors(node):
                if other not in inside:
                    trial.add_edge(("after", number), other)
            trial.add_edge(("before", number), node)
            trial.add_edge(node, ("after", number))
        if alone and inside:
            behind = set().union(*(nx.descendants(gated, node) for node in inside if node in gated))
            # Gates of a group around this one stay where they are.
            trial.add_edges_from((other, ("before", number)) for other in graph if other not in inside and other not in behind)
        if nx.is_directed_acyclic_graph(trial):
            gated = trial
    return gated


def _layers(graph: nx.DiGraph) -> dict[str, int]:
    layer: dict[str, int] = {}
    for node in nx.topological_sort(graph):
        layer[node] = max((layer[p] + 1 for p in graph.predecessors(node)), default=0)
    # What reads nothing stands right above its first reader, so that no edge is longer than it must be.
    for node in reversed(list(nx.topological_sort(graph))):
        if graph.in_degree(node) == 0 and graph.out_degree(node):
            layer[node] = min(layer[s] for s in graph.successors(node)) - 1
    return layer


Dummy = tuple[str, str, int]


def _with_dummies(graph: nx.DiGraph, layer: Mapping[str, int]):
    rows: list[list] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for node in graph:
        rows[layer[node]].append(node)
    segments: list[tuple] = []
    chains: dict[tuple[str, str], list] = {}
    for a, b in graph.edges:
        chain: list = [a, *((a, b, i) for i in range(layer[a] + 1, layer[b])), b]
        for dummy in chain[1:-1]:
            rows[dummy[2]].append(dummy)
        segments += pairwise(chain)
        chains[a, b] = chain
    return rows, segments, chains


def _order(rows: list[list], segments: list[tuple]) -> None:
    up: dict = {}
    down: dict = {}
    for a, b in segments:
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)
    for sweep in range(_SWEEPS):
        towards, order = (up, rows) if sweep % 2 == 0 else (down, rows[::-1])
        place = {node: i - (len(row) - 1) / 2 for row in rows for i, node in enumerate(row)}
        for row in order:
            weight = {n: _mean([place[m] for m in towards.get(n, ())], place[n]) for n in row}
            row.sort(key=weight.__getitem__)
            place.update((node, i - (len(row) - 1) / 2) for i, node in enumerate(row))


def _centres(rows: list[list], segments: list[tuple], widths: Mapping) -> dict:
    """x of every node: as near to its neighbours as its row's order and gaps allow."""
    near: dict = {}
    for a, b in segments:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    x: dict = {}
    for row in rows:
        at = 0.0
        for node in row:
            x[node] = at + widths[node] / 2
            at += widths[node] + NODE_GAP
        shift = (at - NODE_GAP) / 2
        for node in row:
            x[node] -= shift
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = {n: _mean([x[m] for m in near.get(n, ())], x[n]) for n in row}
            _settle(row, wanted, widths, x)
    return x


def _settle(row: list, wanted: Mapping, widths: Mapping, x: dict) -> None:
    """The places nearest to the wanted ones, in order and without overlap: neighbours that would collide move together."""
    blocks: list[list] = []  # [sum of wanted left edges, number of nodes, nodes, width]
    for node in row:
        left = wanted[node] - widths[node] / 2
        blocks.append([left, 1, [node], widths[node] + NODE_GAP])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] + blocks[-2][3] > blocks[-1][0] / blocks[-1][1]:
            total, count, nodes, width = blocks.pop()
            before = blocks[-1]
            before[0] += total - count * before[3]
            before[1] += count
            before[2] += nodes
            before[3] += width
    for total, count, nodes, _ in blocks:
        at = total / count
        for node in nodes:
            x[node] = at + widths[node] / 2
            at += widths[node] + NODE_GAP


def _placed(sizes: Mapping[str, tuple[float, float]], rows: list[list], centres: Mapping, chains: Mapping) -> Layout:
    layout = Layout()
    left = min((centres[n] - sizes.get(n, (DUMMY_WIDTH, 0))[0] / 2 for row in rows for n in row), default=0.0)
    shift, top = MARGIN - left, MARGIN
    middle: dict = {}
    for row in rows:
        height = max((sizes[n][1] for n in row if n in sizes), default=0.0)
        for node in row:
            middle[node] = (centres[node] + shift, top + height / 2, top, top + height)
            if node in sizes:
                layout.boxes[node] = Box(centres[node] + shift, top + height / 2, *sizes[node])
        top += height + LAYER_GAP
    layout.height = top - LAYER_GAP + MARGIN
    for (a, b), chain in chains.items():
        first, last = layout.boxes[a], layout.boxes[b]
        points = [(first.x, first.y + first.height / 2)]
        for dummy in chain[1:-1]:
            x, _, upper, lower = middle[dummy]
            points += [(x, upper), (x, lower)]
        layout.edges[a, b] = [*points, (last.x, last.y - last.height / 2)]
    right = max((b.x + b.width / 2 for b in layout.boxes.values()), default=0.0)
    along = max((x for points in layout.edges.values() for x, _ in points), default=0.0)
    layout.width = max(right, along) + MARGIN
    return layout


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
