"""What happens when a replacement has other strides than the value it replaces.

Semantic operators return contiguous values; what they replace need not have been. The difference is carried on to what reads the value, as
far as it goes; where someone outside could see it (an output of the graph, an operator that reads memory as such), a visible copy restores
the strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsi.ir.errors import DsiInternalError, Refused
from torch import fx

from .dims import same_size
from .effects import has_effect

aten = torch.ops.aten

# Operators whose result depends on how their input lies in memory, and not on its values alone. So may that of graphs that an operator
# calls (flex attention's lies as the query does), which are not looked into.
_READS_LAYOUT = frozenset({aten.as_strided.default, aten.view.dtype, aten.sym_stride.int, aten.sym_storage_offset.default})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})

_Plan = tuple[dict[fx.Node, Any], dict[fx.Node, tuple[Any, list[fx.Node]]], list[tuple[fx.Node, fx.Node]]]


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are known to lie in memory alike; strides of dimensions of size 1 do not matter."""
    if any(same_size(size, 0) for size in a.shape):
        return True
    return all(same_size(size, 1) or same_size(p, q) for size, p, q in zip(a.shape, a.stride(), b.stride(), strict=True))


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions of `value`, outermost in memory first, if it is a permuted contiguous tensor; else None."""
    order: list[int] = []
    expected: Any = 1
    left = [d for d in range(value.dim()) if not same_size(value.shape[d], 1)]
    while left:
        inner = next((d for d in reversed(left) if same_size(value.stride(d), expected)), None)
        if inner is None:
            return None
        order.insert(0, inner)
        left.remove(inner)
        expected = expected * value.shape[inner]
    return [d for d in range(value.dim()) if d not in order] + order


class Restrider:
    """Carries changed strides through a graph. `made` lists the nodes that it had to add.

    `evaluate(node, values)` computes a node's fake value, `values` taking precedence over `meta["val"]`; it raises `Refused` where that
    fails.
    """

    def __init__(self, graph: fx.Graph, evaluate: Callable[[fx.Node, dict[fx.Node, Any]], Any]):
        self.graph, self.evaluate = graph, evaluate
        self.made: list[fx.Node] = []

    def substitute(self, old: fx.Node, new: fx.Node) -> None:
        """Makes every user of `old` a user of `new`, whose strides differ. `old` must have a `memory_order`."""
        before = old.meta["val"]
        old.replace_all_uses_with(new)
        plan = self._plan(new, before)
        if plan is None:
            users = list(new.users)
            restored = self._restored(new, before)
            for user in users:
                user.replace_input_with(new, restored)
            return
        values, restores, copies = plan
        for node, value in values.items():
            node.meta["val"] = value
        for source, (value, users) in restores.items():
            restored = self._restored(source, value)
            for user in users:
                user.replace_input_with(source, restored)
        for user, source in copies:
            with self.graph.inserting_before(user):
                copy = self._make(aten.clone.default, (source,), {"memory_format": torch.contiguous_format}, user)
            user.replace_input_with(source, copy)

    def _plan(self, new: fx.Node, before: torch.Tensor) -> _Plan | None:
        """What carrying on the strides of `new` takes: values that change, users that need the old strides, views that need a copy. None:
        impossible.
        """
        values: dict[fx.Node, Any] = {new: new.meta["val"]}
        was: dict[fx.Node, Any] = {new: before}
        restores: dict[fx.Node, tuple[Any, list[fx.Node]]] = {}
        copies: list[tuple[fx.Node, fx.Node]] = []
        pending = {new}
        while pending:
            source = min(pending)
            pending.remove(source)
            for user in sorted(source.users):
                if user.op != "call_function" or user.target in _READS_LAYOUT or isinstance(user.target, torch._ops.HigherOrderOperator):
                    if not isinstance(was[source], torch.Tensor) or memory_order(was[source]) is None:
                        return None
                    restores.setdefault(source, (was[source], []))[1].append(user)
                    continue
                if has_effect(user.target):
                    continue
                try:
                    value = self.evaluate(user, values)
                except Refused:
                    if user.target not in _VIEWS or user.args[0] is not source:
                        return None
                    # The view was possible on the old strides only: it takes the copy that `reshape` would make.
                    copies.append((user, source))
                    value = self.evaluate(user, {**values, source: values[source].contiguous()})
                before_user = was.setdefault(user, user.meta.get("val"))
                if _alike(before_user, value):
                    values.pop(user, None)
                else:
                    values[user] = value
                    pending.add(user)
        return values, restores, copies

    def _restored(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """A copy of `node` with the strides of `like`, right behind it."""
        order = memory_order(like)
        if order is None:
            raise DsiInternalError(
                f"the strides {list(like.stride())} of what {node.name} replaces are not those of a permuted contiguous tensor"
            )
        inverse = [order.index(d) for d in range(len(order))]
        steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [(aten.clone.default, (), {"memory_format": torch.contiguous_format})]
        if inverse != order or order != sorted(order):
            steps = [
                (aten.permute.default, (order,), {}),
                *steps,
                (aten.permute.default, (inverse,), {}),
            ]
        last = node
        for target, args, kwargs in steps:
            with self.graph.inserting_after(last):
                last = self._make(target, (last, *args), kwargs, node)
        return last

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: fx.Node) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs, target._opname)
        for key, value in origin.meta.items():
            if key != "val":
                new.meta[key] = value
        new.meta["val"] = self.evaluate(new, {})
        self.made.append(new)
        return new


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_strides(a, b)
    return True
