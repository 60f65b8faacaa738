"""Views of kernels' outputs, each made of the output itself in one step: a chain of operators costs a call of torch's dispatcher each."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from .expand import region_of

# (base, sizes, strides, offset) -> a view of `base`, whose first element is at the start of its memory: as code that Inductor writes makes
# them, where torch has it.
as_strided: Callable[..., torch.Tensor] = getattr(getattr(torch._C._dynamo, "guards", None), "_reinterpret_tensor", torch.as_strided)


class Views:
    """Which nodes of an outer graph are views of a region's output, of fixed sizes. What a view is, is found out by its operators,
    on a tensor without memory that lies as the output will."""

    def __init__(self) -> None:
        self.kernels: set[fx.Node] = set()  # the calls of regions that a kernel runs: their outputs lie as their fakes do
        self._found: dict[fx.Node, tuple[fx.Node, torch.Tensor] | None] = {}

    def of(self, node: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
        """The output that `node` shows, and a tensor on "meta" that lies as the view does; None for what is no such view."""
        if node not in self._found:
            with unset_fake_temporarily():
                self._found[node] = self._look(node)
        return self._found[node]

    def only_seen_through(self, node: fx.Node) -> bool:
        """Whether whatever reads the view `node` is such a view itself, so that nothing needs `node`."""
        return bool(node.users) and all(self.of(user) is not None for user in node.users)

    def _look(self, node: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
        target = node.target
        if not (node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target.is_view and node.args):
            return None
        base, *rest = node.args
        if not isinstance(base, fx.Node) or node.kwargs or any(isinstance(leaf, fx.Node | torch.SymInt) for leaf in tree_leaves(rest)):
            return None
        output, shown = self.of(base) or (base, self._memoryless(base))
        if shown is None:
            return None
        try:
            view = target(shown, *rest)
        except RuntimeError:  # what cannot be viewed so says it when it is run
            return None
        if not isinstance(view, torch.Tensor) or view.dtype != shown.dtype or view.is_conj() or view.is_neg():
            return None
        return (output, view) if view.untyped_storage()._cdata == shown.untyped_storage()._cdata else None

    def _memoryless(self, node: fx.Node) -> torch.Tensor | None:
        """A tensor on "meta" that lies as a kernel's output; None where `node` is none, or is an input, or has symbolic sizes."""
        call, value = node.args[0] if node.target is operator.getitem else None, node.meta.get("val")
        if not isinstance(call, fx.Node) or call not in self.kernels or not isinstance(value, torch.Tensor):
            return None
        numbers = (*value.shape, *value.stride())
        if node.args[1] in region_of(call).in_place or any(type(number) is not int for number in numbers):
            return None
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
