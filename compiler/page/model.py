"""What a page shows of one graph: the items of the picture before and after, repeated layers folded, and what belongs to each item."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsi.codegen.devices import Device
from dsi.ir.context import Report
from dsi.ir.errors import Refusal
from dsi.ir.region import Region

from ..figures import Figures, figures_of, microseconds, percent
from ..record import GraphRecord, Node
from .fold import Place, Repeat, follows, places, repeats, settled

LEFT, CUSTOM, REDUCE, INPUT, OUTPUT = "left", "custom", "all_reduce", "input", "output"
_LABEL_WIDTH = 30


@dataclass(frozen=True)
class Item:
    """A drawn node: its words, what it reads, and `shows`, the item of the picture after that a click on it opens ("" for none)."""

    name: str
    kind: str
    lines: tuple[str, ...]
    inputs: tuple[str, ...]
    shows: str
    node: Node
    region: Region | None = None


@dataclass
class Picture:
    """Items by name in order of execution, and the frames around what is repeated: (items of one stretch, how often it occurs), outer
    frames before those within."""

    items: dict[str, Item] = field(default_factory=dict)
    frames: list[tuple[tuple[str, ...], int]] = field(default_factory=list)


@dataclass
class GraphModel:
    """Both pictures of a graph and what its items share: for every shown item of `after` the items folded into it, figures, refusals."""

    record: GraphRecord
    report: Report
    before: Picture = field(default_factory=Picture)
    after: Picture = field(default_factory=Picture)
    folded: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)


def build(record: GraphRecord, report: Report, device: Device, custom: Mapping[str, object]) -> GraphModel:
    """The model of one graph. `custom` has the names of users' own operators, as nodes spell them."""
    model = GraphModel(record, report, refusals={r.node: r for r in report.unfused if r.node})
    by_key: dict[tuple[str, str], Figures | None] = {}
    for node in record.lowered:
        if (region := node.region) is not None:
            identity = (region.key, "" if region.key else region.name)
            if identity not in by_key:
                by_key[identity] = figures_of(region, device)
            if (found := by_key[identity]) is not None:
                model.figures[node.name] = found
    after = _items(record.lowered, record.given, lambda node: _after_item(node, model, custom))
    owners = {member.name: item.name for item in reversed(after.values()) if item.region for member in item.region.members}
    owners.update((item.name, item.name) for item in after.values() if item.region is None)
    before = _items(record.recognised, record.given, lambda node: _before_item(node, owners, after))
    fold = _Fold(after, {node.name: number for number, node in enumerate(record.recognised)})
    model.after, model.before = fold.after(), fold.before(before)
    model.folded = fold.folded
    return model


def _items(nodes: list[Node], given: frozenset[str], make) -> dict[str, Item]:
    """Items of a graph's nodes. Views, tuples' parts and sizes are no items: who reads them reads what they are made from."""
    items: dict[str, Item] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        reads = tuple(dict.fromkeys(source for name in node.inputs for source in sources.get(name, ())))
        if node.op in ("placeholder", "get_attr"):
            shown = node.op == "placeholder" and node.name in given
            if shown:
                items[node.name] = Item(node.name, INPUT, ("input", node.value), (), "", node)
            sources[node.name] = (node.name,) if shown else ()
        elif node.op == "output":
            items[node.name] = Item(node.name, OUTPUT, ("output",), reads, "", node)
        elif node.is_view or "[" not in node.value:
            # Made into no item; but a value that nothing else gives (a mutation, the tuple of a region) is one.
            if node.region is None and not _effect(node):
                sources[node.name] = reads
                continue
            items[node.name], sources[node.name] = replace(make(node), inputs=reads), (node.name,)
        else:
            items[node.name], sources[node.name] = replace(make(node), inputs=reads), (node.name,)
    read = {name for item in items.values() for name in item.inputs}
    return {name: item for name, item in items.items() if item.kind != INPUT or name in read}


def _effect(node: Node) -> bool:
    return node.target.split(".")[1:2] != [] and node.target.split(".")[1].endswith("_")


def _after_item(node: Node, model: GraphModel, custom: Mapping[str, object]) -> Item:
    if node.region is not None:
        found = model.figures.get(node.name)
        last = (f"{microseconds(found.seconds)} · {percent(found.share)} of roofline",) if found else ()
        lines = (*textwrap.wrap(node.region.label or node.region.kind, _LABEL_WIDTH), *last)
        return Item(node.name, node.region.kind, lines, (), node.name, node, node.region)
    kind = REDUCE if "all_reduce" in node.target else CUSTOM if _plain(node.target) in custom else LEFT
    return Item(node.name, kind, (_plain(node.target),), (), node.name, node)


def _before_item(node: Node, owners: Mapping[str, str], after: Mapping[str, Item]) -> Item:
    owner = owners.get(node.name, "")
    kind = after[owner].kind if owner else REDUCE if "all_reduce" in node.target else LEFT
    return Item(node.name, kind, (_plain(node.target),), (), owner, node)


def _plain(target: str) -> str:
    """An operator's name without its overload."""
    return re.sub(r"\.(default|Tensor|Scalar|self|int|dim|correction|Tensor_\w+|Scalar_\w+|dim_\w+|start\w*)$", "", target)


class _Fold:
    """Maps each item of the picture after to the one that is drawn for it. `program`: the places of operators in the model."""

    def __init__(self, items: dict[str, Item], program: Mapping[str, int]):
        self.items = items
        ordered = {name: item for name, item in items.items() if item.kind not in (INPUT, OUTPUT)}
        signatures = {name: _signature(item) for name, item in ordered.items()}
        last = {name: max((program.get(n, 0) for n in _operators(item)), default=0) for name, item in ordered.items()}
        self.order = settled({name: item.inputs for name, item in ordered.items()}, signatures, last)
        self.repeats = repeats([signatures[name] for name in self.order])
        self.drawn = {name: name for name in items}
        self.places: dict[str, Place] = {}
        self.folded: dict[str, list[str]] = {}
        for number, place in places(self.repeats).items():
            name, first = self.order[number], self.order[place.first]
            self.places[name], self.drawn[name] = place, first
            if name != first:
                self.folded.setdefault(first, []).append(name)

    def after(self) -> Picture:
        picture = Picture(self._merge(self.items, self.drawn, self.places))
        picture.frames = list(self._frames(self.repeats))
        return picture

    def _frames(self, found: Sequence[Repeat]) -> Iterator[tuple[tuple[str, ...], int]]:
        """(items of one stretch, how often it occurs), a repeat before those within it."""
        for repeat in found:
            yield tuple(self.order[i] for i in repeat.shown()), repeat.count
            yield from self._frames(repeat.inner)

    def before(self, items: dict[str, Item]) -> Picture:
        """The same stretches folded where their operators were."""
        drawn, there = {name: name for name in items}, {}
        for item in items.values():
            if not item.shows or item.shows not in self.places:
                continue
            there[item.name] = self.places[item.shows]
            first = self.items[self.drawn[item.shows]]
            if first.name == item.shows:
                continue
            own = self.items[item.shows].region
            if own is None or first.region is None:
                drawn[item.name] = first.name if first.name in items else ""
                continue
            position = next((i for i, member in enumerate(own.members) if member.name == item.name), None)
            members = first.region.members
            drawn[item.name] = members[position].name if position is not None and position < len(members) else ""
        drawn = {name: target if target in items else "" for name, target in drawn.items()}
        picture = Picture(self._merge(items, drawn, there))
        for frame, count in self._frames(self.repeats):
            inside = tuple(item.name for item in picture.items.values() if item.shows in frame)
            if inside:
                picture.frames.append((inside, count))
        return picture

    def _merge(self, items: dict[str, Item], drawn: dict[str, str], where: Mapping[str, Place]) -> dict[str, Item]:
        reads: dict[str, dict[str, None]] = {}
        for item in items.values():
            target = drawn[item.name]
            for name in item.inputs:
                source = drawn[name]
                # From one stretch to the next: drawn by the frame.
                beyond = item.name in where and name in where and follows(where[name], where[item.name])
                if target and source and source != target and not beyond:
                    reads.setdefault(target, {})[source] = None
        return {
            name: replace(item, inputs=tuple(reads.get(name, ())), shows=self.drawn.get(item.shows, ""))
            for name, item in items.items()
            if drawn[name] == name
        }


def _operators(item: Item) -> list[str]:
    return [item.name] if item.region is None else [member.name for member in item.region.members]


def _signature(item: Item) -> tuple[str, ...]:
    if item.region is not None:
        return (item.kind, item.region.key or item.name)
    return (item.kind, item.node.target, item.node.value)
