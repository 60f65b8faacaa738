"""Growth of regions around their anchors: epilogues forwards, prologues backwards, and rows from what is left.

Nothing here knows an operator's arithmetic. A region may hold whatever its plan can be made for; growth only proposes, in an order that
makes equal layers equal regions:

1. *Epilogue.* In graph order, an operator joins the latest of the regions that it reads from, if no path leaves that region and comes back.
2. *Prologue.* Backwards, an operator that no producer could take joins its consumers. With one consumer it moves in. With several it is
   computed in each of them, if that reads no more than the value itself would be; otherwise the first consumer that can stores it for the
   others.
3. *Rows.* What is left and can be planned becomes regions without an anchor, as large as can be.

Three decisions that the region rules leave open. An embedding takes no norm, though its rows are whole: the norm belongs to the prologue of
the layer that reads it, as in every other layer, so that the first layer runs the kernels of all others. And a prologue takes no value that
its region would compute more often than once an element, but for the rows of a linear (recomputed by every column program, rule 5) and
integers that index: rotation tables and masks, which all layers share, stay rows. But a mask of positions that one attention alone reads is
computed there (masks.py).
"""

from __future__ import annotations

from dsi.ir import ops
from dsi.ir.errors import Refusal
from dsi.ir.region import REGION_CUT
from dsi.ir.tile import AttentionPlan, LinearPlan, RowPlan
from torch import fx

from .candidate import Candidate, Planner, input_views, make_candidate, outputs_of
from .convexity import Partition, Piece
from .dataflow import ANCHOR_KINDS, Flow, is_factory, is_tensor
from .grouping import is_main_input
from .masks import hides_by_position, mask_alone

_PLANS = {"linear": LinearPlan, "attention": AttentionPlan, "embedding": RowPlan, "row": RowPlan}
_LOOKAHEAD = 8


class Grower:
    """Grows the pieces of one partition."""

    def __init__(self, flow: Flow, partition: Partition):
        self.flow = flow
        self.partition = partition
        self.planner = Planner()

    # ------------------------------------------------------------------------------------------------------------- legality

    def candidate(self, piece: Piece) -> Candidate:
        return make_candidate(self.flow, piece.members, self.partition.escapes(piece), piece.outside_views, self._parts, piece.whole)

    def _parts(self, node: fx.Node) -> frozenset[fx.Node]:
        """The views of `node` that its piece stores instead of `node`."""
        piece = self.partition.provider.get(node)
        if piece is None or node in piece.whole:
            return frozenset()
        return frozenset(o.node for o in outputs_of(self.flow, node, self.partition.outside_uses(piece, node)) if o.fresh)

    def legal(self, piece: Piece) -> Refusal | None:
        """Plan `piece` as it is now; the refusal if it cannot be. Views of inputs stay outside only where the plan cannot take them in."""
        before = piece.plan, piece.outside_views
        piece.outside_views = frozenset()
        refusal = self._plan(piece)
        views = input_views(self.flow, piece.members) if refusal is not None else []
        if views:
            piece.outside_views = frozenset(views)
            if self._plan(piece) is None:
                refusal = None
                for view in views:
                    outside = piece.outside_views
                    piece.outside_views = outside - {view}
                    if self._plan(piece) is not None:
                        piece.outside_views = outside
                refusal = self._plan(piece)
        if refusal is not None:
            piece.plan, piece.outside_views = before
        return refusal

    def _plan(self, piece: Piece) -> Refusal | None:
        for reader in piece.members:
            cut = next((d for d in self.flow.deps.get(reader, ()) if REGION_CUT in d.meta and d in piece.members), None)
            if cut is not None:
                return Refusal(f"a region ends at {cut.name}, by a hint of {cut.meta[REGION_CUT]}", rule="hint")
        plan = self.planner.plan(self.candidate(piece))
        if isinstance(plan, Refusal):
            return plan
        if not isinstance(plan, _PLANS[piece.kind]):
            return Refusal(f"it would turn a region of kind {piece.kind} into one with a {type(plan).__name__}", rule="region rule 7")
        if piece.kind == "embedding" and isinstance(plan, RowPlan) and plan.reductions:
            return Refusal("a reduction over all columns does not join the epilogue of an embedding", rule="region rule 6")
        piece.plan = plan
        return None

    def attempt(self, piece: Piece, nodes: list[fx.Node], provide: bool = True, reads_piece: bool = False) -> Refusal | None:
        """Let `nodes` join `piece` if the result is convex and can be planned; why not otherwise."""
        with self.partition.trying(piece, nodes, provide) as trial:
            # A node computed again, and handed to nobody, adds no path that was not there through the value itself.
            if provide and not self.partition.convex(piece, nodes if reads_piece else None):
                return Refusal("a path leads out of the region and back into it", rule="region rule 8")
            refusal = self.legal(piece)
            if refusal is None:
                trial.keep()
        return refusal

    # ------------------------------------------------------------------------------------------------------------- epilogue

    def grow_epilogues(self) -> None:
        waiting: dict[fx.Node, Piece] = {}  # refused alone, perhaps legal with what follows (half of a rotation)
        for node in self.flow.core:
            if not self.flow.fusable(node) or not self.partition.free(node) or is_factory(node) or node.target in ANCHOR_KINDS:
                continue
            for piece in self._producers(node, waiting):
                together = self._with_waiting(node, piece, waiting)
                refusal = self.attempt(piece, together, reads_piece=True)
                if refusal is None:
                    for joined in together:
                        waiting.pop(joined, None)
                    break
                self.flow.refuse(node, refusal)
                waiting.setdefault(node, piece)

    def _producers(self, node: fx.Node, waiting: dict[fx.Node, Piece]) -> list[Piece]:
        """The pieces that `node` reads from, the latest anchor first. A `kv_write` follows what it writes; nothing follows it (rule 9)."""
        reads = [self.flow.base(node.args[2])] if node.target is ops.kv_write else self.flow.deps[node]  # type: ignore[arg-type]
        found: dict[Piece, None] = {}
        for read in reads:
            piece = self.partition.provider.get(read) or waiting.get(read)
            if piece is not None and read.target is not ops.kv_write:
                found[piece] = None
        return sorted(found, key=lambda p: -max(self.flow.position[a] for a in p.anchors))

    def _with_waiting(self, node: fx.Node, piece: Piece, waiting: dict[fx.Node, Piece]) -> list[fx.Node]:
        together = {node}
        stack = [node]
        while stack and len(together) < _LOOKAHEAD:
            for dep in self.flow.deps[stack.pop()]:
                if waiting.get(dep) is piece and dep not in together:
                    together.add(dep)
                    stack.append(dep)
        return sorted(together, key=self.flow.position.__getitem__)

    # ------------------------------------------------------------------------------------------------------------- prologue

    def grow_prologues(self) -> None:
        for node in reversed(self.flow.core):
            if not self.flow.fusable(node) or not self.partition.free(node) or node.target in ANCHOR_KINDS:
                continue
            readers = dict.fromkeys(item for reader, _ in self.flow.uses(node) for item in self.partition.items_of(reader))
            pieces = sorted((i for i in readers if isinstance(i, Piece)), key=lambda p: self.flow.position[p.first])
            others = [i for i in readers if isinstance(i, fx.Node) and self.partition.needed(i)]
            if is_factory(node):
                for piece in pieces:
                    if not self._writes_into(piece, node):
                        self.attempt(piece, [node], provide=False)
                continue
            if len(pieces) == 1 and not others and self._mask_within(node, pieces[0]):
                continue
            able = [p for p in pieces if self._may_precede(node, p)]
            if len(pieces) > 1 or others:
                able = [p for p in able if self._feeds_rows(node, p)]
                if not others and able == pieces and self._as_cheap_as_loading(node) and self._recompute({p: [node] for p in pieces}):
                    continue
            for piece in able:
                refusal = self.attempt(piece, [node])
                if refusal is None:
                    break
                self.flow.refuse(node, refusal)

    def _mask_within(self, node: fx.Node, piece: Piece) -> bool:
        """Compute a mask of positions, of which `node` is the last operator, in the attention that alone reads it."""
        nodes, factories = mask_alone(self.flow, self.partition, node, piece)
        if not nodes:
            return False
        with self.partition.trying(piece, factories, provide=False) as made, self.partition.trying(piece, nodes) as trial:
            if self.partition.convex(piece) and self.legal(piece) is None and hides_by_position(piece.plan):
                made.keep()
                trial.keep()
        if not trial.kept:
            self.legal(piece)  # as it was
        return trial.kept

    def _recompute(self, wanted: dict[Piece, list[fx.Node]]) -> bool:
        """Compute in each piece what is wanted there, in all or in none."""
        done: list[tuple[Piece, list[fx.Node]]] = []
        for piece, nodes in wanted.items():
            new = [n for n in nodes if n not in piece.members]
            if self.attempt(piece, new, provide=False) is not None:
                for each, joined in done:
                    for node in joined:
                        self.partition.leave(each, node)
                    self.legal(each)
                return False
            done.append((piece, new))
        return True

    def _may_precede(self, node: fx.Node, piece: Piece) -> bool:
        """Whether computing `node` inside `piece` computes no element twice, but for the rows of a linear and indices."""
        after = self.after_anchor(piece)
        for reader, view in self.flow.uses(node):
            if reader not in piece.members:
                continue
            if reader.target in ANCHOR_KINDS or reader.target is ops.kv_write:
                if not is_main_input(reader, view):
                    return False
            elif reader in after and not self.flow.same_size(node, reader):
                return False
        return True

    def after_anchor(self, piece: Piece) -> set[fx.Node]:
        """The members of `piece` that depend on its anchors, the anchors included."""
        after = set(piece.anchors)
        for node in sorted(piece.members, key=self.flow.position.__getitem__):
            if any(d in after for d in self.flow.deps[node]):
                after.add(node)
        return after

    def _feeds_rows(self, node: fx.Node, piece: Piece) -> bool:
        """Whether `piece` is a linear's and reads `node` before the contraction alone."""
        late = self.after_anchor(piece) - set(piece.anchors)
        return piece.kind == "linear" and not any(r in late for r, _ in self.flow.uses(node))

    def _as_cheap_as_loading(self, node: fx.Node) -> bool:
        """Whether computing `node` again reads no more than `node` itself has: one value of its size."""
        return sum(self.flow.at_least(d, node) for d in self.flow.deps[node]) <= 1

    def _writes_into(self, piece: Piece, node: fx.Node) -> bool:
        return any(r in piece.members and r.target is ops.kv_write and r.args[0] is v for r, v in self.flow.uses(node))

    # ----------------------------------------------------------------------------------------------------------------- rows

    def grow_rows(self) -> None:
        for node in self.flow.core:
            if not self.flow.fusable(node) or not self.partition.free(node) or is_factory(node) or node.target in ANCHOR_KINDS:
                continue
            if not any(True for _ in self.flow.uses(node)):
                continue
            producers = [p for p in self._producers(node, {}) if p.kind == "row"]
            if any(self.attempt(p, [node], reads_piece=True) is None for p in producers):
                continue
            piece = Piece("row", [node], {node})
            self.partition.add(piece)
            if refusal := self.legal(piece):
                self.partition.remove(piece)
                self.flow.refusals.pop(node, None)  # why it can be in no region at all says more than why not in that one
                self.flow.refuse(node, refusal)
        for node in self.flow.core:
            if self.flow.fusable(node) and is_factory(node) and node not in self.partition.provider:
                for piece in dict.fromkeys(p for r, _ in self.flow.uses(node) for p in self.partition.holders.get(r, ())):
                    if piece.kind == "row" and not self._writes_into(piece, node):
                        self.attempt(piece, [node], provide=False)
        self.merge("row")
        self._dissolve_index_rows()
        self._merge_equal_rows()

    def merge(self, kind: str) -> None:
        """Unite pieces of one kind of which one reads the other, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for piece in [p for p in self.partition.pieces if p.kind == kind]:
                for before in self.partition.predecessors(piece):
                    if isinstance(before, Piece) and before.kind == kind and self._unite(before, [piece]):
                        changed = True
                        break
                if changed:
                    break

    def _dissolve_index_rows(self) -> None:
        """Compute positions and other index arithmetic where it is used: a row piece of integers that only rows read needs no kernel."""
        for piece in reversed([p for p in self.partition.pieces if p.kind == "row"]):
            outside = {d for m in piece.members for d in self.flow.deps[m] if d not in piece.members and is_tensor(d)}
            if any(d.meta["val"].is_floating_point() for d in outside):
                continue
            readers = {i for n in self.partition.escapes(piece) for r, _ in self.flow.uses(n) for i in self.partition.items_of(r)} - {piece}
            into = {i: self._behind(i, piece) for i in readers if isinstance(i, Piece) and i.kind == "row"}
            if into and len(into) == len(readers) and self._recompute(into):
                self.partition.remove(piece)

    def _behind(self, reader: Piece, piece: Piece) -> list[fx.Node]:
        """The members of `piece` that `reader` needs, in graph order."""
        found: set[fx.Node] = set()
        stack = list(reader.members)
        while stack:
            new = {d for d in self.flow.deps[stack.pop()] if d in piece.members} - found
            found |= new
            stack.extend(new)
        return sorted(found, key=self.flow.position.__getitem__)

    def _merge_equal_rows(self) -> None:
        """Unite row pieces of the same rows and columns that do not depend on each other (the length counters of all layers)."""
        equal: dict[tuple, list[Piece]] = {}
        for piece in [p for p in self.partition.pieces if p.kind == "row"]:
            assert isinstance(piece.plan, RowPlan)
            equal.setdefault((piece.plan.rows, piece.plan.columns), []).append(piece)
        for pieces in equal.values():
            if len(pieces) == 1 or self._unite(pieces[0], pieces[1:]):
                continue
            kept: list[Piece] = []
            for piece in pieces:
                if not any(self._unite(known, [piece]) for known in kept):
                    kept.append(piece)

    def _unite(self, into: Piece, others: list[Piece]) -> bool:
        """Move all of `others` into `into` if that is convex and can be planned."""
        before = list(self.partition.pieces)
        provided = {m: p for p in others for m in p.members if self.partition.provider.get(m) is p}
        for piece in others:
            self.partition.remove(piece)
        recomputed = [m for p in others for m in p.members if m not in provided]
        with self.partition.trying(into, recomputed, provide=False) as trial:
            if self.attempt(into, sorted(provided, key=self.flow.position.__getitem__)) is None:
                trial.keep()
        if trial.kept:
            into.anchors.extend(a for p in others for a in p.anchors)
            return True
        self.partition.pieces[:] = before
        for piece in others:
            for node in piece.members:
                self.partition.holders.setdefault(node, []).append(piece)
        self.partition.provider.update(provided)
        return False
