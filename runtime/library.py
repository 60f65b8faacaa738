"""Calls of library kernels inside a region: cuBLAS's products and scaled_dot_product_attention, on views of the region's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from dsi.codegen.kernel import LibraryCall, View
from torch import Tensor

from .launcher import GROUPS
from .sizes import Environment, Sizes

Numbers = tuple[int, ...] | Callable[..., tuple[int, ...]]


class LibraryStep:
    """One call, with everything about it that does not change between calls worked out. `over` brings a size of the kernel over the
    symbols of `sizes`."""

    def __init__(self, call: LibraryCall, over: Callable[[Any], sympy.Expr], sizes: Sizes):
        self.call = call
        self._function = FUNCTIONS[call.function]
        self._views = [_Strided(view, over, sizes) for view in call.operands]

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], sizes: Environment, workspaces: Sequence[Any] = ()) -> None:
        """The call, on the current stream."""
        groups = (inputs, outputs, workspaces)
        *given, made = (view(groups, sizes) for view in self._views)
        if made.numel():
            self._function(given, made, self.call.options)

    def compile(self, inputs: Sequence[Any], outputs: Sequence[Any], workspaces: Sequence[Any], sizes: Environment) -> None:
        """Nothing: a library's kernels are compiled already."""

    def __str__(self) -> str:
        return f"library {self.call.function}"


class _Strided:
    """A view of one of the region's tensors."""

    def __init__(self, view: View, over: Callable[[Any], sympy.Expr], sizes: Sizes):
        self.group, self.number, self.rank = GROUPS.index(f"{view.kind}s"), view.number, len(view.sizes)
        self._numbers: Numbers = sizes.compile(*(over(expr) for expr in (*view.sizes, *view.strides, view.offset)))

    def __call__(self, groups: Sequence[Sequence[Any]], sizes: Environment) -> Tensor:
        numbers = self._numbers if isinstance(self._numbers, tuple) else self._numbers(*sizes)
        tensor: Tensor = groups[self.group][self.number]
        start = tensor.storage_offset() + numbers[-1]
        return tensor.as_strided(numbers[: self.rank], numbers[self.rank : -1], start)


def product(given: Sequence[Tensor], made: Tensor, options: dict[str, Any]) -> None:
    """[M, K] x [K, N]."""
    torch.mm(*given, out=made)


def attention(given: Sequence[Tensor], made: Tensor, options: dict[str, Any]) -> None:
    """Queries [B, H, S, D], keys [B, G, J, D] and values [B, G, J, E] -> [B, H, S, E]."""
    grouped: dict[str, Any] = {"enable_gqa": True} if options["grouped"] else {}
    q, k, v = given
    made.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=options["causal"], scale=options["scale"], **grouped))


FUNCTIONS: dict[str, Callable[[Sequence[Tensor], Tensor, dict[str, Any]], None]] = {"product": product, "attention": attention}
