"""The arguments of a node in one spelling: schema order, defaults filled in, dimensions and slice bounds counted from the front."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .effects import has_effect
from .vocabulary import DIMENSION_ARGUMENTS, Target, parameters

aten = torch.ops.aten


# Operators for which a constant tensor without dimensions is as good as the number in it.
_TAKES_NUMBERS = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.where.self, aten.masked_fill.Tensor},
)
_COMPARISONS = frozenset(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_FILLED = {aten.scalar_tensor.default: 0, aten.full.default: 1}
_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def constant(node: fx.Node) -> Any:
    """The number in a tensor without dimensions, if the graph states it; else the node itself."""
    value = node.meta.get("val")
    if node.op == "get_attr":
        stored = attribute(node)
        if isinstance(stored, torch.Tensor) and not isinstance(stored, FakeTensor) and stored.dim() == 0 and stored.device.type == "cpu":
            return stored.item()
    if not isinstance(value, torch.Tensor) or value.dim() != 0 or node.op != "call_function":
        return node
    if node.target is aten.zeros.default:
        return torch.zeros((), dtype=value.dtype).item()
    if node.target in _FILLED:
        filled = node.args[_FILLED[node.target]]
        # Through the dtype: that is where the number was rounded.
        return torch.tensor(filled, dtype=value.dtype).item() if isinstance(filled, (int, float, bool)) else node
    return node


def attribute(node: fx.Node) -> Any:
    """What a `get_attr` node reads, None where that is not known."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


class Arguments:
    """Canonical arguments per node, remembered until a node's arguments change."""

    def __init__(self) -> None:
        self._memo: dict[fx.Node, tuple[Any, Any, dict[str, Any]]] = {}

    def of(self, node: fx.Node) -> dict[str, Any]:
        """Schema name -> argument, in schema order, with every default."""
        known = self._memo.get(node)
        if known is not None and known[0] is node.args and known[1] is node.kwargs:
            return known[2]
        named = _canonical(node)
        self._memo[node] = (node.args, node.kwargs, named)
        return named

    def equal(self, a: Any, b: Any, depth: int = 4) -> bool:
        """Whether two arguments are one value: equal literals, a node and itself, or two nodes that compute the same of the same.

        A mask that a layer makes twice (`mask == 0` before the softmax and behind it) is one mask. `depth`: operators looked through."""
        if equal_literals(a, b):
            return True
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(self.equal(x, y, depth) for x, y in zip(a, b, strict=True))
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and depth and a.op == b.op == "call_function" and a.target == b.target):
            return False
        if not _repeatable(a.target) or _written_between(a, b):
            return False
        ours, theirs = self.of(a), self.of(b)
        number = _number if a.target in _COMPARISONS else lambda x: x  # of a constant without dimensions, by its number
        return all(self.equal(number(v), number(theirs[k]), depth - 1) for k, v in ours.items())


def _repeatable(target: Any) -> bool:
    """Whether two calls of `target` on equal arguments give equal values; of others' operators nothing is known."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims", "dsi"):
        return False
    return not target._schema.is_mutable and not _UNREPEATABLE & set(target.tags)


def _written_between(a: fx.Node, b: fx.Node) -> bool:
    """Whether anything has an effect between two nodes of a graph."""
    node, last = (a, b) if a < b else (b, a)
    while (node := node.next) is not last:
        if has_effect(node.target):
            return True
    return False


def _number(value: Any) -> Any:
    return constant(value) if isinstance(value, fx.Node) else value


def _canonical(node: fx.Node) -> dict[str, Any]:
    target: Target = node.target  # type: ignore[assignment]
    params = parameters(target)
    named = {p.name: p.default for p in params}
    named.update((p.name, a) for p, a in zip(params, node.args, strict=False))
    named.update(node.kwargs)
    if target is operator.getitem:
        return named
    for name in named:
        if name in DIMENSION_ARGUMENTS:
            named[name] = canonical_dim(named[name], dimension_rank(target, named))
    if target in _TAKES_NUMBERS:
        named = {name: constant(a) if isinstance(a, fx.Node) else a for name, a in named.items()}
    if target in (aten.slice.Tensor, aten.slice_scatter.default):
        _slice_bounds(named)
    elif "size" in named:
        named["size"] = _explicit_sizes(named["size"], node)
    return named


def dimension_rank(target: Target, named: dict[str, Any]) -> int | None:
    """The rank of the tensor whose dimensions a dimension argument of this call numbers."""
    first = next(iter(named.values()), None)
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return value.dim() + (target in (aten.unsqueeze.default, aten.stack.default))


def canonical_dim(dim: Any, rank: int | None) -> Any:
    """`dim`, or each of a list of them, counted from the front."""
    if isinstance(dim, (list, tuple)):
        return [canonical_dim(d, rank) for d in dim]
    if isinstance(dim, int) and not isinstance(dim, bool) and rank and -rank <= dim < 0:
        return dim + rank
    return dim


def _slice_bounds(named: dict[str, Any]) -> None:
    value = named["self"].meta.get("val")
    size = value.shape[named["dim"]] if isinstance(value, torch.Tensor) else None
    start, end = named["start"], named["end"]
    start = 0 if start is None else start
    end = sys.maxsize if end is None else end
    if isinstance(size, int):
        if isinstance(start, int):
            start = max(start + size, 0) if start < 0 else min(start, size)
        if isinstance(end, int):
            end = max(end + size, 0) if end < 0 else min(end, size)
    named["start"], named["end"] = start, end


def _explicit_sizes(sizes: Any, node: fx.Node) -> Any:
    """A size list with every -1 replaced by what it stands for, where that is a number."""
    value = node.meta.get("val")
    if not isinstance(sizes, (list, tuple)) or not isinstance(value, torch.Tensor) or len(sizes) != value.dim():
        return sizes
    return [full if isinstance(s, int) and s == -1 and isinstance(full, int) else s for s, full in zip(sizes, value.shape, strict=True)]


def canonical_literal(node: fx.Node, named: dict[str, Any], name: str, literal: Any) -> Any:
    """A pattern's literal for argument `name` of `node`, brought to the spelling of `named`."""
    if name in DIMENSION_ARGUMENTS:
        return canonical_dim(literal, dimension_rank(node.target, named))  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor and name in ("start", "end"):
        bounds = {**named, "start": 0, "end": None, name: literal}
        _slice_bounds(bounds)
        return bounds[name]
    return literal


def equal_literals(a: Any, b: Any) -> bool:
    """Whether two literals are the same argument: numbers by value, bools apart from numbers, lists element by element."""
    if a is b:
        return True
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal_literals(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    return type(a) is type(b) and a == b
