"""Finds a pattern at a node: backtracking over the ways to read it, with the deepest failure remembered. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .arguments import Arguments, canonical_literal, equal_literals
from .pattern import Call, Either, Value, Var
from .rule import Compiled
from .vocabulary import Target, parameters

# Of a value that can be read in one way without binding anything, and of one that cannot be.
_ONCE: tuple[None, ...] = (None,)
_NEVER: tuple[None, ...] = ()


@dataclass
class Failure:
    """The deepest failure so far: how many nodes had matched, where it stopped, and why."""

    depth: int = -1
    node: Any = None
    reason: str = ""

    def note(self, depth: int, node: Any, reason: str) -> None:
        """Remembers this failure if it is deeper than the one known."""
        if depth > self.depth:
            self.depth, self.node, self.reason = depth, node, reason


class State:
    """The bindings of a match in progress. Every binding is undone when the generator that made it is resumed."""

    def __init__(self) -> None:
        self.env: dict[str, Any] = {}
        self.calls: dict[int, fx.Node] = {}  # id of a pattern's Call -> node
        self.nodes: list[fx.Node] = []  # the matched nodes, in order of matching; a node may occur twice
        self.tags: dict[str, tuple[str, Any]] = {}
        self.labels: dict[str, Any] = {}


class Matcher:
    """Matches one rule's pattern; keeps the nearest miss in `failure`."""

    def __init__(self, compiled: Compiled, arguments: Arguments):
        self.compiled, self.arguments = compiled, arguments
        self.failure = Failure()

    def at(self, node: fx.Node) -> Iterator[State]:
        """Every way to read the pattern with its first output at `node`. The state is valid until the iterator is advanced."""
        state = State()
        first, *others = self.compiled.outputs
        for _ in self._match(first, node, state):
            yield from self._others(others, state)

    def _others(self, outputs: list[Value], state: State) -> Iterator[State]:
        if not outputs:
            yield state
            return
        for node in self._candidates(outputs[0], state):
            for _ in self._match(outputs[0], node, state):
                yield from self._others(outputs[1:], state)

    def _candidates(self, value: Value, state: State) -> list[fx.Node]:
        """Nodes that a further output can be: the node it already is, or nodes below what is bound, as deep as the pattern is."""
        if isinstance(value, Call) and id(value) in state.calls:
            return [state.calls[id(value)]]
        targets, depth = _targets(value), _depth(value)
        seen = {n for n in (*state.nodes, *state.env.values()) if isinstance(n, fx.Node)}
        frontier, found = list(seen), []
        for _ in range(depth):
            frontier = list({u: None for n in frontier for u in n.users if u not in seen})
            seen.update(frontier)
            found += [n for n in frontier if n.target in targets]
        return found + [n for n in dict.fromkeys(state.nodes) if n.target in targets]

    # ------------------------------------------------------------------------------------------------------------ one value

    def _match(self, pattern: Any, actual: Any, state: State) -> Iterable[None]:
        if isinstance(pattern, Value):
            matches = self._value(pattern, actual, state)
            return self._labelled(pattern.label, actual, state, matches) if pattern.label else matches
        if isinstance(pattern, (list, tuple)):
            if isinstance(actual, (list, tuple)) and len(actual) == len(pattern):
                return self._sequence(list(zip(pattern, actual, strict=True)), state)
            self._fail(state, lambda: f"a list of {len(pattern)} was expected, {_show(actual)} found")
            return _NEVER
        if equal_literals(pattern, actual):
            return _ONCE
        self._fail(state, lambda: f"the constant {pattern!r} was expected, {_show(actual)} found")
        return _NEVER

    def _labelled(self, label: str, actual: Any, state: State, matches: Iterable[None]) -> Iterator[None]:
        for _ in matches:
            before = state.labels.get(label)
            state.labels[label] = actual
            yield
            state.labels[label] = before

    def _value(self, pattern: Value, actual: Any, state: State) -> Iterable[None]:
        if isinstance(pattern, Var):
            return self._variable(pattern.name, actual, state)
        if isinstance(pattern, Either):
            return self._either(pattern, actual, state)
        if isinstance(pattern, Call):
            return self._call(pattern, actual, state)
        return _NEVER

    def _variable(self, name: str, actual: Any, state: State) -> Iterator[None]:
        if name not in state.env:
            if actual is None:
                self._fail(state, lambda: f"{name} is not given")
                return
            state.env[name] = actual
            yield
            del state.env[name]
        elif self.arguments.equal(state.env[name], actual):
            yield
        else:
            self._fail(state, lambda: f"{name} is {_show(state.env[name])} elsewhere and {_show(actual)} here")

    def _either(self, pattern: Either, actual: Any, state: State) -> Iterator[None]:
        known = state.tags.get(pattern.tag)
        for name, branch in pattern.branches.items():
            if known is not None and known[0] != name:
                continue
            state.tags[pattern.tag] = (name, actual)
            yield from self._match(branch, actual, state)
            if known is None:
                state.tags.pop(pattern.tag, None)
            else:
                state.tags[pattern.tag] = known

    def _call(self, pattern: Call, actual: Any, state: State) -> Iterable[None]:
        if id(pattern) in state.calls:
            if state.calls[id(pattern)] is actual:
                return _ONCE
            self._fail(state, lambda: f"{pattern.op.name} is {_show(state.calls[id(pattern)])} elsewhere and {_show(actual)} here")
            return _NEVER
        if not isinstance(actual, fx.Node) or actual.op != "call_function" or actual.target not in pattern.op.overloads:
            self._fail(state, lambda: f"{pattern.op.name} was expected, {_show(actual)} found", actual)
            return _NEVER
        return self._arguments(pattern, actual, state)

    def _arguments(self, pattern: Call, actual: fx.Node, state: State) -> Iterator[None]:
        state.calls[id(pattern)] = actual
        state.nodes.append(actual)
        for pairs in self._readings(pattern, actual, state):
            yield from self._sequence(pairs, state)
        state.nodes.pop()
        del state.calls[id(pattern)]

    def _readings(self, pattern: Call, node: fx.Node, state: State) -> Iterator[list[tuple[Any, Any]]]:
        """The ways to pair the pattern's arguments with the node's. None where an argument is not accounted for."""
        target: Target = node.target  # type: ignore[assignment]
        named = self.arguments.of(node)
        names = list(named)
        wanted = {**dict(zip(names, pattern.args, strict=False)), **pattern.kwargs}
        for p in parameters(target):
            if p.name in wanted:
                continue
            accepted = pattern.op.fixed.get(p.name, p.default)
            if not equal_literals(accepted, named[p.name]):
                said = f"argument {p.name} of {_show(node)} is {_show(named[p.name])}, of which the pattern says nothing"
                self._fail(state, said.__str__)
                return
        if pattern.op.name == "div" and equal_literals(named["other"], 0):
            # A rule computes with the numbers that it takes, and this one makes infinities.
            self._fail(state, lambda: f"{_show(node)} divides by 0")
            return
        if pattern.op.commutative:
            # A call on a literal and a tensor has one spelling only, but a pattern may have been written either way.
            first, second, *rest = names
            a, b = wanted[first], wanted[second]
            others = [(wanted[n], named[n]) for n in rest if n in wanted]
            yield [(a, named[first]), (b, named[second]), *others]
            if a is not b:
                yield [(b, named[first]), (a, named[second]), *others]
            return
        pairs = []
        for name, value in wanted.items():
            literal = not isinstance(value, Value)
            pairs.append((canonical_literal(node, named, name, value) if literal else value, named[name]))
        # Literals first: they refuse without a search.
        pairs.sort(key=lambda pair: _has_value(pair[0]))
        yield pairs

    def _sequence(self, pairs: list[tuple[Any, Any]], state: State) -> Iterator[None]:
        if not pairs:
            yield
            return
        (pattern, actual), *rest = pairs
        for _ in self._match(pattern, actual, state):
            yield from self._sequence(rest, state)

    def _fail(self, state: State, reason: Callable[[], str], node: Any = None) -> None:
        depth = len(state.nodes)
        if depth > self.failure.depth:
            self.failure.note(depth, node if isinstance(node, fx.Node) else (state.nodes[-1] if state.nodes else None), reason())


def _has_value(pattern: Any) -> bool:
    return any(map(_has_value, pattern)) if isinstance(pattern, (list, tuple)) else isinstance(pattern, Value)


def _targets(value: Any) -> frozenset[Any]:
    from .pattern import roots

    return roots(value)


def _depth(value: Any) -> int:
    if isinstance(value, Call):
        return 1 + max((_depth(a) for a in (*value.args, *value.kwargs.values())), default=0)
    if isinstance(value, Either):
        return max(_depth(b) for b in value.branches.values())
    if isinstance(value, (list, tuple)):
        return max((_depth(a) for a in value), default=0)
    return 0


def _show(value: Any) -> str:
    if isinstance(value, fx.Node):
        target = value.target
        name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
        return value.name if value.op == "placeholder" else f"{value.name} ({name})"
    return repr(value)
