"""What a graph does to memory that tracing does not keep: the guard's questions about addresses and shared places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dsi.passes.writes import may_write, written_by
from torch import Tensor, fx


class MemoryGuard:
    """Asked of one node after another, in the order of the graph."""

    def __init__(self, example_inputs: Sequence[Any]):
        self._offset = any(isinstance(value, Tensor) and _begins_elsewhere(value) for value in example_inputs)
        self._overlapping: set[int] = set()  # memory of which a tensor shows a place several times

    def why_not(self, node: fx.Node) -> str | None:
        """Why `node` of Dynamo's graph means something else once it is traced; None where it does not."""
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and _shows_a_place_twice(value):
            self._overlapping.add(_memory(value))
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        name = str(name).split(".")[0]
        if self._offset and name in ("as_strided", "as_strided_"):
            return "memory is addressed from its beginning (as_strided), and an input begins elsewhere"
        if name.startswith("_foreach_") and name.endswith("_") and node.args and isinstance(node.args[0], list | tuple):
            held = [one.meta.get("example_value") for one in node.args[0] if isinstance(one, fx.Node)]
            places = [_memory(value) for value in held if isinstance(value, Tensor)]
            if len(set(places)) < len(places):
                return "tensors that share memory are written to in one call"
        if self._overlapping and node.op in ("call_function", "call_method") and may_write(node) and self._writes_to_overlapping(node):
            return "a tensor is written to that shows a place of its memory several times (expand, unfold)"
        return None

    def _writes_to_overlapping(self, node: fx.Node) -> bool:
        values = [one.meta.get("example_value") for one in written_by(node) if isinstance(one, fx.Node)]
        return any(isinstance(value, Tensor) and _memory(value) in self._overlapping for value in values)


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else id(value)


def _begins_elsewhere(value: Tensor) -> bool:
    """Whether a tensor does not begin where its memory does, as far as is known."""
    if value.layout != torch.strided:
        return False
    offset = value.storage_offset()
    return not isinstance(offset, int) or offset != 0


def _shows_a_place_twice(value: Tensor) -> bool:
    """Whether two entries of a tensor may be one place in memory. Of symbolic sizes it is only taken that they are no 0 and no 1, and a
    dimension of symbolic stride is left out: most are so that nothing overlaps."""
    if value.layout != torch.strided or any(isinstance(size, int) and size == 0 for size in value.shape):
        return False
    dims = [
        (stride, size if isinstance(size, int) else 2)
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if isinstance(stride, int) and not (isinstance(size, int) and size == 1)
    ]
    reach = 0  # how far from its first place the dimensions so far go
    for stride, size in sorted(dims):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
