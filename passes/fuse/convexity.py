"""Which operator is in which region, and whether the graph of regions is still free of cycles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsi.ir.tile import Plan
from torch import fx

from .dataflow import Flow


@dataclass(eq=False)
class Piece:
    """A region while it grows. `members` are core nodes; one that another piece provides to the rest of the graph is recomputed here."""

    kind: str
    anchors: list[fx.Node]
    members: set[fx.Node]
    plan: Plan | None = None
    outside_views: frozenset[fx.Node] = frozenset()
    whole: frozenset[fx.Node] = frozenset()  # members of which all is stored although parts would do: no plan stores those parts
    span: tuple[int, int] | None = None  # places of the first and the last member, where they are known

    @property
    def first(self) -> fx.Node:
        return self.anchors[0]


Item = Piece | fx.Node


@dataclass
class Trial:
    """Whether a change that is being tried is to stay."""

    kept: bool = False

    def keep(self) -> None:
        self.kept = True


@dataclass
class Partition:
    """All pieces of one graph. What is in none is an item by itself.

    `provider[n]` is the piece that hands n to readers outside of it; a node with no provider is computed by itself wherever somebody still
    needs it, even if pieces recompute it for themselves.
    """

    flow: Flow
    pieces: list[Piece] = field(default_factory=list)
    provider: dict[fx.Node, Piece] = field(default_factory=dict)
    holders: dict[fx.Node, list[Piece]] = field(default_factory=dict)  # node -> pieces that compute it

    def free(self, node: fx.Node) -> bool:
        """Whether no piece computes `node`."""
        return not self.holders.get(node)

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for node in piece.members:
            self.holders.setdefault(node, []).append(piece)
            self.provider.setdefault(node, piece)

    def remove(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        for node in piece.members:
            self._release(piece, node)

    def join(self, piece: Piece, node: fx.Node, provide: bool = True) -> None:
        piece.members.add(node)
        piece.span = None
        self.holders.setdefault(node, []).append(piece)
        if provide:
            self.provider.setdefault(node, piece)

    def leave(self, piece: Piece, node: fx.Node) -> None:
        piece.members.discard(node)
        piece.span = None
        self._release(piece, node)

    def _release(self, piece: Piece, node: fx.Node) -> None:
        self.holders[node].remove(piece)
        if self.provider.get(node) is piece:
            del self.provider[node]

    @contextmanager
    def trying(self, piece: Piece, nodes: list[fx.Node], provide: bool = True) -> Iterator[Trial]:
        """`nodes` join `piece` for the time of the block, and for good if it says `trial.keep()`."""
        new = [n for n in nodes if n not in piece.members]
        handed = [n for n in nodes if provide and n not in self.provider]
        for node in new:
            self.join(piece, node, provide)
        self.provider.update(dict.fromkeys(handed, piece))
        trial = Trial()
        yield trial
        if not trial.kept:
            for node in handed:
                del self.provider[node]
            for node in new:
                self.leave(piece, node)

    def items_of(self, node: fx.Node) -> list[Item]:
        """Everything that computes `node`: the pieces that hold it, and `node` itself where no piece provides it."""
        holders: list[Item] = list(self.holders.get(node, ()))
        return holders if node in self.provider else [*holders, node]

    def outside_uses(self, piece: Piece, node: fx.Node) -> list[fx.Node]:
        """The views of `node` (or itself) that something reads which neither is in `piece` nor computes `node` for itself."""
        shown: dict[fx.Node, None] = {}
        for reader, view in self.flow.uses(node):
            if view in shown:
                continue
            for item in self.items_of(reader):
                if item is piece or (isinstance(item, Piece) and node in item.members):
                    continue
                if isinstance(item, Piece) or self.needed(item):
                    shown[view] = None
                    break
        return list(shown)

    def needed(self, node: fx.Node) -> bool:
        """Whether `node`, computed by itself, is read by anything at all: a factory that every reader recomputes is not."""
        if self.free(node) or node.op != "call_function":
            return True
        return any(self._reads_from_outside(item, node) for reader, _ in self.flow.uses(node) for item in self.items_of(reader))

    def _reads_from_outside(self, item: Item, node: fx.Node) -> bool:
        return node not in item.members if isinstance(item, Piece) else self.needed(item)

    def escapes(self, piece: Piece) -> dict[fx.Node, list[fx.Node]]:
        """What `piece` has to hand out: its members with readers outside, and the views by which they are read."""
        found = {}
        for node in piece.members:
            if self.provider.get(node) is piece and (shown := self.outside_uses(piece, node)):
                found[node] = shown
        return found

    def predecessors(self, item: Item) -> set[Item]:
        """The items that `item` reads from or has to wait for."""
        if isinstance(item, Piece):
            reads = itertools.chain.from_iterable(self.flow.deps[m] for m in item.members)
            return {self.provider.get(d, d) for d in reads if d not in item.members}
        return {self.provider.get(d, d) for d in self.flow.deps[item]}

    def reaches(self, source: Piece, targets: set[Item]) -> bool:
        """Whether there is a path from `source` to one of `targets` (a target itself counts)."""
        floor = self._floor(source)
        seen = {item for item in targets if self._span(item)[1] >= floor}
        stack = list(seen)
        while stack:
            item = stack.pop()
            if item is source:
                return True
            if isinstance(item, Piece) or item.op == "call_function":
                new = {before for before in self.predecessors(item) if before not in seen and self._span(before)[1] >= floor}
                seen |= new
                stack.extend(new)
        return False

    def _floor(self, source: Piece) -> int:
        """A place in the graph such that nothing that ends before it can depend on `source`: each question would else walk all of it.

        No piece but `source` lies on both sides of it. What ends before it reads from what has a member before it, which ends before it,
        too, and is not `source`.
        """
        floor, _ = self._span(source)
        spans = [self._span(piece) for piece in self.pieces if piece is not source]
        while across := [first for first, last in spans if first < floor <= last]:
            floor = min(across)
        return floor

    def _span(self, item: Item) -> tuple[int, int]:
        """The places of an item's first and last node."""
        if not isinstance(item, Piece):
            return self.flow.position[item], self.flow.position[item]
        if item.span is None:
            places = [self.flow.position[member] for member in item.members]
            item.span = min(places), max(places)
        return item.span

    def convex(self, piece: Piece, joined: list[fx.Node] | None = None) -> bool:
        """Whether no path leaves `piece` and comes back. Asked after each change of one piece, it keeps the graph of all items acyclic.

        `joined`: the nodes that have just come, if all of them read from the piece before: only what they read besides can close a cycle.
        """
        if joined is None:
            return not self.reaches(piece, self.predecessors(piece))
        reads = {self.provider.get(d, d) for n in joined for d in self.flow.deps[n] if d not in piece.members}
        return not self.reaches(piece, reads)
