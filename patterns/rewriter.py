"""The one place where rules change a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.errors import DsiError, Refused, refuse
from dsi.ir.region import REGION_CUT
from dsi.ir.source import source_line
from torch import fx
from torch._guards import detect_fake_mode

from .build import CUT, KEEP, GraphBuilder
from .dims import same_shape
from .effects import aliases, escapes_as_memory, is_dead, is_mutation, is_pure, is_size_query, storage_root
from .match import Match
from .rule import Compiled
from .strides import Restrider, memory_order, same_strides

aten = torch.ops.aten

PROVENANCE = "dsi_provenance"
_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")


@dataclass(frozen=True)
class Provenance:
    """Which rule made a node: its name, its "file.py:12", and the names of the nodes that were replaced."""

    rule: str
    place: str
    replaced: tuple[str, ...]


class Rewriter:
    """Replaces matches in one graph, keeping every `meta["val"]` right, and tells what it created and erased."""

    def __init__(self, gm: fx.GraphModule, context: Context):
        self.gm, self.graph, self.context = gm, gm.graph, context
        self.fake_mode = context.fake_mode or _fake_mode_of(gm)
        self.erased: set[fx.Node] = set()
        self.created: list[fx.Node] = []
        self.out_of_fuel = False

    # ------------------------------------------------------------------------------------------------------------- replacing

    def replace(self, compiled: Compiled, match: Match, outputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> bool:
        """Replaces `nodes`, of which `outputs` are read outside, by what the rule builds. False when the fuel is spent.

        Raises `Refused`, the graph unchanged, where the replacement would not be the same to everything that reads it.
        """
        inside = set(nodes)
        point = self.insertion_point(match, outputs, inside)
        moved = self._size_queries(outputs, inside, match)
        where = source_line(outputs[0])
        builder = GraphBuilder(self.graph, self.evaluate, {node.target for node in nodes})
        try:
            with self.graph.inserting_before(point):
                result = compiled.rule.rewrite(builder, match)
            values = self._results(compiled, result)
            replaced = [(old, new) for old, new in zip(outputs, values, strict=True) if new is not KEEP and new is not CUT]
            cut = [old for old, new in zip(outputs, values, strict=True) if new is CUT]
            if cut and not replaced and all(REGION_CUT in old.meta for old in cut):
                raise refuse(f"a region ends at {cut[0].name} already")
            for old, new in replaced:
                self._check_value(old, new, builder.made, inside)
                self._check_placement(new, builder.made, point, old)
            if not self._take_fuel(compiled, outputs[0], where):
                self._undo(builder.made)
                return False
        except (Refused, DsiError):
            self._undo(builder.made)
            raise
        except Exception as error:
            self._undo(builder.made)
            raise DsiError(f"{compiled.place}: rule {compiled.name}: `rewrite` failed at {outputs[0].name}: {error}") from error
        for old in cut:
            old.meta[REGION_CUT] = f"{compiled.name} ({compiled.place})"
        self._annotate(compiled, builder.made, outputs[0], nodes)
        for query, (base, dim) in moved.items():
            self._move_query(query, base, dim)
        for old, new in replaced:
            self._substitute(old, new, compiled)
        self._erase(nodes, match)
        for node in reversed(builder.made):
            if is_dead(node):
                self.graph.erase_node(node)
                self.erased.add(node)
        self.created += [n for n in builder.made if n not in self.erased]
        return True

    def insertion_point(self, match: Match, outputs: Sequence[fx.Node], inside: set[fx.Node]) -> fx.Node:
        """The node before which the replacement goes: after all inputs, before every outside user. Raises `Refused` if there is no such
        place.
        """
        first_user = min((u for o in outputs for u in o.users if u not in inside), default=None)
        last_output = max(outputs)
        point = last_output if first_user is None else min(first_user, last_output)
        inputs = [n for n in _nodes_of(match._env.values()) if n not in inside]
        for node in inputs:
            if not node < point:
                raise refuse(
                    f"the input {node.name} comes after {point.name}, which reads what is to be replaced: no place for the replacement"
                )
        return point

    def _results(self, compiled: Compiled, result: Any) -> list[Any]:
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(values) != len(compiled.outputs):
            raise DsiError(
                f"{compiled.place}: rule {compiled.name}: `rewrite` returned {len(values)} values, `pattern` {len(compiled.outputs)}"
            )
        for value in values:
            if value is not KEEP and value is not CUT and not isinstance(value, fx.Node):
                raise DsiError(f"{compiled.place}: rule {compiled.name}: `rewrite` returned {value!r}, which is no value of the graph")
        return values

    def _check_value(self, old: fx.Node, new: fx.Node, made: list[fx.Node], inside: set[fx.Node]) -> None:
        before, after = old.meta["val"], new.meta["val"]
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            if type(before) is not type(after):
                raise refuse(f"the replacement of {old.name} is a {type(after).__name__}, not a {type(before).__name__}")
            return
        if not same_shape(before.shape, after.shape):
            raise refuse(f"the replacement of {old.name} has shape {list(after.shape)}, not {list(before.shape)}")
        if before.dtype != after.dtype:
            raise refuse(f"the replacement of {old.name} has dtype {after.dtype}, not {before.dtype}")
        if before.device != after.device:
            raise refuse(f"the replacement of {old.name} is on {after.device}, not {before.device}")
        if not same_strides(before, after) and memory_order(before) is None:
            raise refuse(f"{old.name} has strides {list(before.stride())}, which nothing but itself can have")
        self._check_aliasing(old, new, made, inside)

    def _check_aliasing(self, old: fx.Node, new: fx.Node, made: list[fx.Node], inside: set[fx.Node]) -> None:
        """No value may share memory with another one that it did not share it with, where that could be seen."""
        was, becomes = storage_root(old), storage_root(new)
        fresh = becomes in made
        if new not in made and any(u.op == "output" for u in old.users) and new is not old:
            raise refuse(f"{old.name} is returned by the graph and {new.name} is another value: they must stay two tensors")
        if was is becomes or (fresh and was in inside):
            return
        seen_by = escapes_as_memory(old)
        if seen_by is None and not fresh:
            written = [u for a in aliases(becomes) for u in a.users if u.op == "call_function" and is_mutation(u.target)]
            last = max((u for a in aliases(old) for u in a.users), default=old)
            seen_by = next((u for u in written if u < last), None)
        if seen_by is not None:
            raise refuse(f"{old.name} and {new.name} share no memory now; {seen_by.name} could tell if they did")

    def _check_placement(self, new: fx.Node, made: list[fx.Node], point: fx.Node, old: fx.Node) -> None:
        for node in made:
            for argument in node.all_input_nodes:
                if not argument < node:
                    raise refuse(f"the replacement reads {argument.name}, which comes only after {point.name}")
        if new not in made and not (new < old or new is old):
            raise refuse(f"the replacement {new.name} comes after {old.name}")

    def _take_fuel(self, compiled: Compiled, output: fx.Node, where: str) -> bool:
        taken = self.context.fuel.take(f"{compiled.name} at {output.name} ({where or 'no source line'}), rule at {compiled.place}")
        self.out_of_fuel |= not taken
        return taken

    def _undo(self, made: list[fx.Node]) -> None:
        for node in reversed(made):
            self.graph.erase_node(node)

    # ------------------------------------------------------------------------------------------------------------------ values

    def evaluate(self, node: fx.Node, values: dict[fx.Node, Any] | None = None) -> Any:
        """The fake value of a node, computed from its inputs' (`values` first). Raises `Refused` where that fails or would need a guard."""
        known = values or {}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n] if n in known else n.meta["val"])

        def compute() -> Any:
            with self._faking():
                return node.target(*args, **kwargs)  # type: ignore[operator]

        try:
            return self.context.fakes.result(node.target, args, kwargs, compute)
        except Exception as error:
            line = str(error).strip().splitlines()
            raise refuse(f"{node.target} does not take these values: {line[0] if line else type(error).__name__}") from error

    @contextlib.contextmanager
    def _faking(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
                shape_env = self.fake_mode.shape_env
                if shape_env is not None and hasattr(shape_env, "error_on_new_guards"):
                    stack.enter_context(shape_env.error_on_new_guards())
            stack.enter_context(torch.no_grad())
            yield

    def _annotate(self, compiled: Compiled, made: list[fx.Node], origin: fx.Node, nodes: Sequence[fx.Node]) -> None:
        ordered = sorted(set(nodes))
        earlier = tuple(dict.fromkeys(p for n in ordered for p in _provenance(n)))
        note = Provenance(compiled.name, compiled.place, tuple(n.name for n in ordered))
        for node in made:
            for key in _COPIED:
                if key in origin.meta:
                    node.meta[key] = origin.meta[key]
            node.meta[PROVENANCE] = (*earlier, note)

    def _substitute(self, old: fx.Node, new: fx.Node, compiled: Compiled) -> None:
        if new is old:
            return
        if REGION_CUT in old.meta:
            new.meta[REGION_CUT] = old.meta[REGION_CUT]
        restrider = Restrider(self.graph, self.evaluate)
        if isinstance(old.meta["val"], torch.Tensor) and not same_strides(old.meta["val"], new.meta["val"]):
            restrider.substitute(old, new)
        else:
            old.replace_all_uses_with(new)
        self.created += restrider.made
        for node in restrider.made:
            node.meta.setdefault(PROVENANCE, (Provenance(compiled.name, compiled.place, (old.name,)),))

    # ----------------------------------------------------------------------------------------------------------- size queries

    def _size_queries(self, outputs: Sequence[fx.Node], inside: set[fx.Node], match: Match) -> dict[fx.Node, tuple[fx.Node, int]]:
        """For every size read off a value that will vanish: another value with that size."""
        found: dict[fx.Node, tuple[fx.Node, int]] = {}
        for node in inside - set(outputs):
            for user in node.users:
                if user in inside or not is_size_query(user.target):
                    continue
                size = user.meta.get("val")
                base = next(
                    (
                        (i, d)
                        for i in _nodes_of(match._env.values())
                        if isinstance(i.meta.get("val"), torch.Tensor) and i < user
                        for d, s in enumerate(i.meta["val"].shape)
                        if str(s) == str(size)
                    ),
                    None,
                )
                if base is None:
                    raise refuse(f"{user.name} reads a size of {node.name} that no input of the match has")
                found[user] = base
        return found

    def _move_query(self, query: fx.Node, base: fx.Node, dim: int) -> None:
        with self.graph.inserting_before(query):
            new = self.graph.call_function(aten.sym_size.int, (base, dim))
        new.meta.update(query.meta)
        query.replace_all_uses_with(new)
        self.graph.erase_node(query)
        self.erased.add(query)

    # ----------------------------------------------------------------------------------------------------------------- erasing

    def _erase(self, nodes: Sequence[fx.Node], match: Match) -> None:
        inputs = [n for n in _nodes_of(match._env.values()) if n not in nodes]
        for node in sorted(set(nodes), reverse=True):
            for user in [u for u in node.users if is_dead(u)]:
                self.graph.erase_node(user)
                self.erased.add(user)
            if not node.users and node not in self.erased:
                inputs += [a for a in node.all_input_nodes if a not in nodes]
                self.graph.erase_node(node)
                self.erased.add(node)
        # What only the match has read is dead now.
        while inputs:
            node = inputs.pop()
            if node not in self.erased and not node.users and is_pure(node):
                inputs += node.all_input_nodes
                self.graph.erase_node(node)
                self.erased.add(node)


def _provenance(node: fx.Node) -> tuple[Provenance, ...]:
    return tuple(p for p in node.meta.get(PROVENANCE, ()) if isinstance(p, Provenance))


def _nodes_of(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _nodes_of(value)
    return found


def _fake_mode_of(gm: fx.GraphModule) -> Any:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
