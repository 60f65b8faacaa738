"""What a graph does to memory that tracing does not keep: the guard's questions about addresses and shared places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from dsi.passes.writes import may_write, written_by
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

# What copies into contiguous memory, if it copies.
_CONTIGUOUS = ("contiguous", "reshape", "flatten", torch.reshape, torch.flatten)


class MemoryGuard:
    """Asked of one node after another, in the order of the graph."""

    def __init__(self, example_inputs: Sequence[Any]):
        self._offset = any(isinstance(value, Tensor) and _begins_elsewhere(value) for value in example_inputs)
        self._overlapping: set[int] = set()  # memory of which a tensor shows a place several times
        self._gapped: set[int] = set()  # memory of which windows were taken that do not cover it
        self._inputs: dict[int, list[Tensor]] = {}  # memory -> the inputs that show it
        self._changed: set[int] = set()  # memory of inputs that is written to
        self._makers: dict[int, fx.Node] = {}  # memory -> the node that made it

    def why_not(self, node: fx.Node) -> str | None:
        """Why `node` of Dynamo's graph means something else once it is traced; None where it does not."""
        value = node.meta.get("example_value")
        if isinstance(value, Tensor):
            self._makers.setdefault(_memory(value), node)
            if _shows_a_place_twice(value):
                self._overlapping.add(_memory(value))
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        name = str(name).split(".")[0]
        if name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"):
            if self._offset:
                return "memory is addressed from its beginning (as_strided), and an input begins elsewhere"
            if not self._lies_as_known(node.args[0] if node.args else None):
                return "memory is addressed (as_strided) of a tensor that is only a part of it, or may lie in another order"
        if name == "unfold" and isinstance(value, Tensor) and not _covers(value, node.all_input_nodes[0]):
            self._gapped.add(_memory(value))
        if name.startswith("_foreach_") and name.endswith("_") and node.args and isinstance(node.args[0], list | tuple):
            held = [one.meta.get("example_value") for one in node.args[0] if isinstance(one, fx.Node)]
            places = [_memory(value) for value in held if isinstance(value, Tensor)]
            if len(set(places)) < len(places):
                return "tensors that share memory are written to in one call"
        if node.op == "placeholder" and isinstance(value, Tensor):
            self._inputs.setdefault(_memory(value), []).append(value)
        if node.op == "output" and any(self._shows_what_inputs_share(one) for one in node.all_input_nodes):
            return "a result shows memory that several inputs show, and that is written to"
        if node.op in ("call_function", "call_method") and may_write(node):
            written = self._written(node)
            self._changed |= written & self._inputs.keys()
            if any(may_overlap(self._inputs[memory]) for memory in written & self._inputs.keys()):
                return "an input is written to whose memory another one shows, too"
            if written & self._overlapping:
                return "a tensor is written to that shows a place of its memory several times (expand, unfold)"
            if written & self._gapped:
                return "a tensor is written to of which windows were taken that leave some of it out (unfold)"
        return None

    def _lies_as_known(self, node: Any) -> bool:
        """Whether a value surely is all of its memory (a part that is computed for itself lies in memory of its own), in the order that its
        fake says: what torch believes of an operator's result is not always so where arguments are not contiguous."""
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return False
        size = value.numel() * value.element_size()
        whole = statically_known_true(value.storage_offset() == 0) and statically_known_true(size == value.untyped_storage().nbytes())
        maker = self._makers.get(_memory(value), node)
        if not whole or maker.op == "placeholder":
            return whole
        arguments = [one.meta.get("example_value") for one in maker.all_input_nodes]
        return maker.target in _CONTIGUOUS or all(one.is_contiguous() for one in arguments if isinstance(one, Tensor))

    def _shows_what_inputs_share(self, node: fx.Node) -> bool:
        """Whether a result is a view of an input beside which another one shows the memory, which is written to. (Tracing makes such a view
        anew from the memory's beginning, whatever it was a view of.)"""
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or node.op == "placeholder":
            return False
        return _memory(value) in self._changed and len(self._inputs[_memory(value)]) > 1

    def _written(self, node: fx.Node) -> set[int]:
        values = [one.meta.get("example_value") for one in written_by(node) if isinstance(one, fx.Node)]
        return {_memory(value) for value in values if isinstance(value, Tensor)}


def may_overlap(values: Sequence[Tensor]) -> bool:
    """Whether two of these tensors may show a place of memory both: they reach over the same bytes, or have sizes that are not known."""
    spans = [_span(value) for value in values] if len(values) > 1 else []
    if any(not all(isinstance(number, int) for number in span) for span in spans):
        return True
    spans.sort()
    return any(place == there and begin < last for (place, _, last), (there, begin, _) in itertools.pairwise(spans))


def _span(value: Tensor) -> tuple[int, Any, Any]:
    """A number of a tensor's memory, and the first byte and the one behind the last that it reaches over there."""
    first = value.storage_offset() * value.element_size()
    return _memory(value), first, first + bytes_of(value)


def bytes_of(value: Tensor) -> Any:
    """How many bytes a tensor reaches over, from its first to behind its last; an expression where its sizes are not known."""
    if any(isinstance(size, int) and size == 0 for size in value.shape):
        return 0
    return (sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1) * value.element_size()


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else id(value)


def _covers(windows: Tensor, source: fx.Node) -> bool:
    """Whether windows surely show all of the tensor that they were taken of, if none of them overlap. (Made functional, a write to windows
    makes the tensor anew of them, with zeros between.)"""
    value = source.meta.get("example_value")
    return isinstance(value, Tensor) and statically_known_true(windows.numel() == value.numel())


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
