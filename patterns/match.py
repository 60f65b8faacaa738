"""What `check` and `rewrite` are given: the parameters, branches and named values of one match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.errors import DsiError, refuse
from torch import fx

from .dims import DimSolver, broadcasts_to, same_shape, same_size
from .pattern import CAST
from .rule import Compiled


class Match:
    """One match of a rule, in a graph or (inside `verify`) on tensors. Rules read it and change nothing.

    `m.x` is the parameter x: a node (a tensor inside `verify`), a literal, or None where the branch taken does not use it.
    """

    def __init__(
        self,
        compiled: Compiled,
        env: dict[str, Any],
        tags: dict[str, tuple[str, Any]],
        labels: dict[str, Any],
        outputs: Sequence[Any],
        nodes: Sequence[fx.Node] = (),
    ):
        self._compiled, self._env, self._tags, self._labels = compiled, env, tags, labels
        self._outputs, self._nodes = tuple(outputs), tuple(nodes)
        self._solver = DimSolver()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._env:
            return self._env[name]
        if any(v.name == name for v in self._compiled.variables):
            return None
        raise AttributeError(f"rule {self._compiled.name} ({self._compiled.place}) has no parameter {name!r}")

    # ------------------------------------------------------------------------------------------------------------- branches

    def tag(self, tag: str) -> str | None:
        """The branch that was found for `op.either(tag, ...)`; None where the alternative around it was not taken."""
        self._known_tag(tag)
        return self._tags[tag][0] if tag in self._tags else None

    def cast(self, tag: str) -> torch.dtype | None:
        """The dtype that `op.maybe_cast(..., tag=tag)` was found to cast to; None where there is no cast."""
        self._known_tag(tag)
        if tag not in self._tags or self._tags[tag][0] != CAST:
            return None
        return value_of(self._tags[tag][1]).dtype

    def _known_tag(self, tag: str) -> None:
        if tag not in self._compiled.tags:
            raise AttributeError(f"rule {self._compiled.name} ({self._compiled.place}) has no tag {tag!r}")

    # --------------------------------------------------------------------------------------------------------------- values

    def value(self, name: str) -> Any:
        """The tensor (a fake one in a graph) of a parameter or named value, or the literal."""
        if name in self._labels:
            return value_of(self._labels[name])
        if name in self._compiled.labels:
            return None
        return value_of(getattr(self, name))

    def shape(self, name: str) -> tuple[Any, ...]:
        """The sizes of a tensor parameter or named value; SymInts where they are symbolic."""
        return tuple(self._tensor(name).shape)

    def rank(self, name: str) -> int:
        """The number of dimensions of a tensor parameter or named value."""
        return self._tensor(name).dim()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor parameter or named value."""
        return self._tensor(name).dtype

    def _tensor(self, name: str) -> Any:
        value = self.value(name)
        # A rule that asks the shape of a number has found one where it means a tensor; None is a mistake of the rule's own.
        if value is not None and not isinstance(value, torch.Tensor):
            raise refuse(f"{name} is {value!r}, which is no tensor", rule=self._compiled.name)
        return value

    def size(self, name: str) -> Any:
        """The size that a name of the rule's `dims` stands for."""
        return self._solver.sizes[name]

    def output(self, index: int = 0) -> torch.Tensor:
        """The tensor (fake in a graph) of one of the values that `pattern` returns."""
        return value_of(self._outputs[index])

    def present(self, name: str) -> bool:
        """Whether the branch that was taken uses this parameter."""
        return getattr(self, name) is not None

    # ----------------------------------------------------------------------------------------------------------- predicates

    def is_float(self, name: str) -> bool:
        """Whether the parameter is a literal float."""
        return isinstance(getattr(self, name), float)

    def is_int(self, name: str) -> bool:
        """Whether the parameter is a literal int."""
        value = getattr(self, name)
        return isinstance(value, int) and not isinstance(value, bool)

    def is_number(self, name: str) -> bool:
        """Whether the parameter is a literal int or float."""
        return self.is_int(name) or self.is_float(name)

    def same(self, a: Any, b: Any) -> bool:
        """Whether two sizes or shapes are known to be equal, for every value of their symbols."""
        if isinstance(a, (tuple, list, torch.Size)):
            return same_shape(a, b)
        return same_size(a, b)

    def broadcasts(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Whether shape `a` is known to broadcast to shape `b`, leaving `b` as it is."""
        return broadcasts_to(a, b)

    def require(self, condition: Any, why: str) -> None:
        """Refuses the match with the sentence `why` unless `condition` holds."""
        if not condition:
            raise refuse(why, rule=self._compiled.name)

    # ------------------------------------------------------------------------------------------------------- for the engine

    def check_declared(self) -> None:
        """Refuses unless the parameters are what `dims`, `dtypes` and `literals` say. Raises `Refused`."""
        for name in self._compiled.rule.literals:
            value = self._env.get(name)
            if isinstance(value, (fx.Node, torch.Tensor)):
                raise refuse(f"{name} is {value}, computed in the graph; the rule wants a literal", rule=self._compiled.name)
        for name, spec in self._compiled.dims.items():
            if self._env.get(name) is None:
                continue
            value = value_of(self._env[name])
            if not isinstance(value, torch.Tensor):
                raise refuse(f"{name} is {value!r}, which is no tensor", rule=self._compiled.name)
            reason = self._solver.add(name, spec, value.shape)
            self.require(reason is None, reason or "")
        reason = self._solver.finish()
        self.require(reason is None, reason or "")


def value_of(item: Any) -> Any:
    """The tensor (a fake one) of a node; anything else as it is."""
    return item.meta.get("val") if isinstance(item, fx.Node) else item


def run_check(compiled: Compiled, match: Match) -> None:
    """A rule's `check` of a match. Raises `Refused` where it says no; `DsiError` where it returns what it should have required."""
    check: Callable[[Match], Any] = compiled.rule.check  # it should return None
    answer = check(match)
    if answer is not None:
        raise DsiError(
            f"{compiled.place}: rule {compiled.name}: `check` returned {answer!r}, which nothing looks at; it refuses a match with "
            "m.require(condition, sentence)"
        )


RESERVED = frozenset(n for n in dir(Match) if not n.startswith("_")) | {"self", "op"}
