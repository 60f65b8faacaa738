"""Complex arithmetic written out in reals: kernels know no complex numbers, and rotary embedding is often spelled in them.

A complex value is followed from where it is read as reals (`view_as_real`) up to where it is made of reals (`view_as_complex`, `polar`);
on the way it is a real one with a last dimension of two. A complex value that is made otherwise (a table that the model holds) is read as
reals there, so whatever is not known stays a complex operator of ATen's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.errors import refuse
from dsi.ir.source import source_line
from dsi.patterns.strides import Restrider, memory_order, same_strides
from torch import fx
from torch.fx.node import map_arg

aten = torch.ops.aten

NAME = "complex_in_reals"


def in_reals(gm: fx.GraphModule, context: Context) -> None:
    """Replace, in place, the reals that the functional ATen graph `gm` reads complex values as by real arithmetic."""
    (output,) = gm.graph.find_nodes(op="output")
    if any(map(_is_complex, output.all_input_nodes)):
        return  # it may share its memory with the reals, and go on doing so
    writer = _Writer(gm.graph, context)
    for node in list(gm.graph.find_nodes(op="call_function", target=aten.view_as_real.default)):
        if not context.fuel.take(f"{NAME}: {node.name} at {source_line(node) or 'an unknown line'} (passes/complexes.py)"):
            break
        real, value = writer.real(node.args[0]), node.meta["val"]
        if (real.meta["val"].dtype, real.meta["val"].shape) != (value.dtype, value.shape):
            continue
        if same_strides(real.meta["val"], value):
            node.replace_all_uses_with(real)
        elif memory_order(value) is not None:
            writer.restrider.substitute(node, real)
        else:
            continue
        context.report.hits[NAME] += 1
    if writer.twins:
        writer.erase_dead()
        gm.graph.lint()
        gm.recompile()


class _Writer:
    """Writes the real twin of a complex value, once, directly behind it."""

    def __init__(self, graph: fx.Graph, context: Context):
        self.graph, self.context = graph, context
        self.twins: dict[fx.Node, fx.Node] = {}
        self._added: list[fx.Node] = []
        self.restrider = Restrider(graph, self._evaluate)
        self._before: list[fx.Node] = []  # where the twins being written stand, innermost last

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["val"])
        try:
            with self.context.faking():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise refuse(f"{node.name} does not take a value of other strides") from error

    def real(self, value: Any) -> fx.Node:
        """`value` (complex, [...]) as reals [..., 2], the imaginary part last."""
        if value not in self.twins:
            place = value.next
            while value.op == "placeholder" and place.op == "placeholder":
                place = place.next
            self._before.append(place)
            self.twins[value] = self._write(value)
            self._before.pop()
        return self.twins[value]

    def _write(self, value: fx.Node) -> fx.Node:
        write = _WRITTEN.get(value.target) if value.op == "call_function" else None
        twin = write(self, value) if write is not None else None
        return twin if twin is not None else self.emit(aten.view_as_real_copy.default, value)

    def emit(self, target: Any, *args: Any) -> fx.Node:
        """A new node behind the complex value whose twin is being written."""
        with self.context.faking():
            value = target(*map_arg(args, lambda n: n.meta["val"]))
        with self.graph.inserting_before(self._before[-1]):
            node = self.graph.call_function(target, args)
        origin = self._before[-1].prev.prev
        node.meta |= {k: origin.meta[k] for k in ("stack_trace", "source_fn_stack", "nn_module_stack") if k in origin.meta}
        node.meta["dsi_provenance"] = (NAME, origin.name)
        node.meta["val"] = value
        self._added.append(node)
        return node

    def parts(self, value: Any) -> tuple[fx.Node, fx.Node]:
        """The real and the imaginary part of a complex value."""
        twin = self.real(value)
        return self.emit(aten.select.int, twin, -1, 0), self.emit(aten.select.int, twin, -1, 1)

    def joined(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        """The twin with these parts."""
        return self.emit(aten.stack.default, [real, imaginary], -1)

    def erase_dead(self) -> None:
        """Erase what nothing reads any more: complex values, and twins that were not used. Both are pure."""
        for node in reversed(list(self.graph.nodes)):
            known = node in self.twins or node.target is aten.view_as_real.default
            if node.op == "call_function" and not node.users and (known or node in self._added):
                self.graph.erase_node(node)


def _is_complex(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(held := value.meta.get("val"), torch.Tensor) and held.is_complex()


def _of_reals(writer: _Writer, value: fx.Node) -> fx.Node:
    return value.args[0]  # type: ignore[return-value]


def _polar(writer: _Writer, value: fx.Node) -> fx.Node:
    length, angle = value.args
    parts = (writer.emit(function, angle) for function in (aten.cos.default, aten.sin.default))
    return writer.joined(*(writer.emit(aten.mul.Tensor, length, part) for part in parts))


def _product(writer: _Writer, value: fx.Node) -> fx.Node | None:
    """The product of two complex values, or of one and a real."""
    a, b = value.args
    if _is_complex(a) and _is_complex(b):
        (a_real, a_imaginary), (b_real, b_imaginary) = writer.parts(a), writer.parts(b)
        times: Callable[..., fx.Node] = lambda x, y: writer.emit(aten.mul.Tensor, x, y)  # noqa: E731
        real = writer.emit(aten.sub.Tensor, times(a_real, b_real), times(a_imaginary, b_imaginary))
        return writer.joined(real, writer.emit(aten.add.Tensor, times(a_imaginary, b_real), times(a_real, b_imaginary)))
    if _is_complex(b):
        a, b = b, a
    if isinstance(b, complex) or (isinstance(b, fx.Node) and not isinstance(b.meta.get("val"), torch.Tensor)):
        return None
    twin = writer.real(a)
    if isinstance(b, fx.Node) and b.meta["val"].dim():  # with a dimension, a scalar would have a say in the dtype
        b = writer.emit(aten.unsqueeze.default, b, -1)
    return writer.emit(aten.mul.Tensor, twin, b)


def _view(writer: _Writer, value: fx.Node) -> fx.Node | None:
    """A view along the dimensions before the last of the twin. A table that the model holds is read as reals behind its first view."""
    source, *args = value.args
    if not isinstance(source, fx.Node) or source.op in ("placeholder", "get_attr") or value.kwargs:
        return None
    rank = source.meta["val"].dim()
    if value.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default):
        args = [[*args[0], 2]]  # type: ignore[misc]
    elif value.target is aten.permute.default:
        args = [[*(d % rank for d in args[0]), rank]]  # type: ignore[union-attr]
    elif value.target is aten.transpose.int:
        args = [d % rank for d in args]
    elif args:
        args = [args[0] % (rank + (value.target is aten.unsqueeze.default)), *args[1:]]
    twin = writer.real(source)
    try:
        return writer.emit(value.target, twin, *args)
    except (RuntimeError, ValueError):  # a product's twin need not lie in memory as the product does: no view of it has these sizes
        return None


def _same(writer: _Writer, value: fx.Node) -> fx.Node | None:
    """A copy that changes neither dtype nor device."""
    source = value.args[0]
    old, new = source.meta["val"], value.meta["val"]  # type: ignore[union-attr]
    if value.target is aten.clone.default:
        contiguous = value.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
        return writer.real(source) if contiguous and old.stride() == new.stride() else None
    return writer.real(source) if (old.dtype, old.device, old.stride()) == (new.dtype, new.device, new.stride()) else None


_VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default),
    *(aten.transpose.int, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int),
)
_WRITTEN: dict[Any, Callable[[_Writer, fx.Node], fx.Node | None]] = {
    aten.view_as_complex.default: _of_reals,
    aten.polar.default: _polar,
    aten.mul.Tensor: _product,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.alias.default: _same,
    **dict.fromkeys(_VIEWS, _view),
}
