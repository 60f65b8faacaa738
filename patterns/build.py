"""What `rewrite` builds with: nodes of a graph, or tensors inside `verify`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

import torch
from dsi.ir.custom import CustomOp, custom_of
from dsi.ir.errors import DsiError
from dsi.ir.ops import REGISTRY
from torch import fx
from torch.utils._pytree import tree_leaves

from .effects import is_mutation
from .pattern import _unknown, widened
from .vocabulary import OPS, Target, invoke, spell


class _Keep:
    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


KEEP = _Keep("dsi.keep")
CUT = _Keep("dsi.cut")


class _Words:
    """Attribute access to operators: `dsi.aten.view(x, sizes)`."""

    def __init__(self, builder: Builder):
        self._builder = builder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in OPS:
            raise _unknown(f"dsi.aten.{name}", name, OPS)
        op, builder = OPS[name], self._builder
        return lambda *args, **kwargs: builder._emit(op.overloads[0], args, {**op._fixed_of(op.overloads[0]), **kwargs}, op.compute)


class Builder(ABC):
    """The `dsi` of a rewrite: `dsi.<operator>(...)` for the semantic operators, `dsi.aten.<word>(...)` for the vocabulary of patterns.

    `dsi.keep`, returned in place of a value, leaves that output of the pattern as it is. `dsi.cut` does so too, and is a hint to fusion: a
    region ends there, so that no region both computes the value and reads it.
    """

    keep = KEEP
    cut = CUT

    @property
    def aten(self) -> _Words:
        """The words of the pattern vocabulary, arguments in schema order."""
        return _Words(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in REGISTRY:
            raise DsiError(f"dsi.{name} is no semantic operator (known: {', '.join(REGISTRY)}); dsi.call(overload, ...) takes any overload")
        overload = REGISTRY[name].overload
        return lambda *args, **kwargs: self._emit(overload, args, kwargs)

    def call(self, overload: Target | CustomOp, *args: Any, **kwargs: Any) -> Any:
        """A call of any overload, or of an operator made with `dsi.custom_op`, arguments in schema order."""
        return self._emit(overload.overload if isinstance(overload, CustomOp) else overload, args, kwargs)

    @abstractmethod
    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Target | None = None) -> Any: ...

    @abstractmethod
    def value(self, x: Any) -> Any:
        """The tensor of `x` (a fake one in a graph)."""

    @abstractmethod
    def size(self, x: Any, dim: int) -> Any:
        """The size of dimension `dim` of `x`, usable as an argument: an int, or a node where it is symbolic."""

    def sizes(self, x: Any) -> list[Any]:
        """All sizes of `x`, usable as arguments."""
        return [self.size(x, d) for d in range(self.value(x).dim())]


def _writes_nothing(target: Target, matched: Collection[Any] = ()) -> None:
    """Raises DsiError for an operator that writes, unless it is among those that a rewrite takes the place of."""
    if is_mutation(target) and target not in matched:
        raise DsiError(f"{target} writes to its argument; a graph holds operators that make a new value each")


class EagerBuilder(Builder):
    """Computes a rewrite on tensors. With `wide`, floats are float64 and casts between floats do nothing; with `kernels`, users' own
    operators are computed by their kernels, whatever the device.
    """

    def __init__(self, wide: bool = False, kernels: bool = False):
        self._wide = wide
        self._kernels = kernels
        self.launched = 0
        """How many kernels of users' own operators ran."""

    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Target | None = None) -> Any:
        _writes_nothing(target)
        if self._wide:
            args, kwargs = tuple(widened(a) for a in args), {k: widened(v) for k, v in kwargs.items()}
        if compute is not None:
            return compute(*args)
        if self._kernels and (own := custom_of(target)) is not None and own.kernel is not None:
            self.launched += 1
            return own.kernel(*args, **kwargs)
        return invoke(target, args, kwargs)

    def value(self, x: Any) -> Any:
        return x

    def size(self, x: Any, dim: int) -> Any:
        return x.shape[dim]


class GraphBuilder(Builder):
    """Adds the nodes of a rewrite to a graph, at the graph's insertion point; keeps the list of what it `made`. `matched`: the operators
    that it takes the place of."""

    def __init__(self, graph: fx.Graph, evaluate: Callable[[fx.Node], Any], matched: Collection[Any] = ()):
        self._graph, self._evaluate, self._matched = graph, evaluate, matched
        self.made: list[fx.Node] = []

    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Target | None = None) -> fx.Node:
        _writes_nothing(target, self._matched)
        positional, named = spell(target, args, kwargs)
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in tree_leaves((positional, named))):
            raise DsiError(f"{target} is built with a symbolic size as a number; dsi.size(x, dim) gives it as a value of the graph")
        # Named for the operator alone ("rope_1"), as AOTAutograd names its nodes.
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        node = self._graph.create_node("call_function", target, positional, named, name)
        self.made.append(node)
        node.meta["val"] = self._evaluate(node)
        return node

    def value(self, x: Any) -> Any:
        return x.meta["val"]

    def size(self, x: Any, dim: int) -> Any:
        size = x.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self._emit(torch.ops.aten.sym_size.int, (x, dim), {})
