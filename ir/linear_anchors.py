"""The products of a linear region: what they share, and which row of which weight each of their channels reads."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

from .index_map import ONE, Space, product
from .pull import Contraction, Puller, args_of, fail, fake, sizes_of
from .semantics import LINEARS, dsi
from .tile import K, Load, Scale
from .views import keyword


@dataclass(frozen=True)
class Weight:
    """Channel n of a linear is row `row(n)` of weight input `input`. The coordinates of `scale` are in n, too."""

    input: int
    kn: bool
    symbol: sympy.Symbol
    row: sympy.Expr
    scale: Scale | None = None


class Anchors:
    """The linears of a body: `rows` and `inner` elements of their common input, the weights of those that were added, and how many columns
    these have together."""

    def __init__(self, body: fx.GraphModule):
        self.space = Space()
        self.pull = Puller(body, self.space)
        self.linears = [n for n in body.graph.nodes if n.op == "call_function" and n.target in LINEARS]
        first = self.linears[0]
        *lead, self.inner = sizes_of(fake(args_of(first)[0]))
        self.rows = product(lead)
        self.x_dtype = fake(args_of(first)[0]).dtype
        self.activations: str = keyword(first, "activations", "")
        self.weights: dict[fx.Node, Weight] = {}
        self.all_columns = 0

    def add(self, linear: fx.Node) -> None:
        """Take in a linear. Raises `Refused` where it has no place beside those before it, or where its weight is no input."""
        x, weight = args_of(linear)[:2]
        first = self.linears[0]
        if fake(weight).dtype != (torch.int8 if linear.target is dsi.linear_int8.default else fake(x).dtype):
            raise fail(linear, f"{linear.name} multiplies {_short(fake(x).dtype)} by a weight of {_short(fake(weight).dtype)}", 2)
        if fake(x).dtype != self.x_dtype or sizes_of(fake(x))[-1] != self.inner or product(sizes_of(fake(x))[:-1]) != self.rows:
            raise fail(linear, f"{linear.name} and {first.name} differ in dtype, rows or inner size, so they are no common anchor", 2)
        if keyword(linear, "activations", "") != self.activations:
            raise fail(linear, f"{linear.name} and {first.name} differ in what they round the common input to", 2)
        self.weights[linear] = self._weight(linear, weight)
        columns = sizes_of(fake(linear))[-1]
        if not columns.is_Integer or not self.inner.is_Integer:
            raise fail(linear, f"{linear.name} has a symbolic number of channels", 1)
        self.all_columns += int(columns)

    def _weight(self, linear: fx.Node, weight: fx.Node) -> Weight:
        kn = bool(linear.kwargs.get("kn", False))
        n = self.space.add(sympy.Symbol(f"n{len(self.weights)}_", integer=True, nonnegative=True), sizes_of(fake(linear))[-1])
        k = self.space.add(K, self.inner)
        value = self.pull.at(weight, (k, n) if kn else (n, k))
        if isinstance(value, Load) and len(value.coords) == 2:
            for stored_kn, (inner, row) in ((False, value.coords[::-1]), (True, value.coords)):
                if inner == k and isinstance(row, sympy.Expr) and k not in row.free_symbols:
                    return Weight(value.input, stored_kn, n, row, self._scale(linear, n, k))
        raise fail(linear, f"the weight {weight.name} of {linear.name} is no input of the region, nor a slice of one", 2)

    def _scale(self, linear: fx.Node, n: sympy.Expr, k: sympy.Expr) -> Scale | None:
        if linear.target is not dsi.linear_int8.default:
            return None
        scales, group = args_of(linear)[2], keyword(linear, "group", 0)
        value = self.pull.at(scales, (n, self.space.floordiv(k, sympy.Integer(group))) if group else (n,))
        coords = [c for c in value.coords if isinstance(c, sympy.Expr)] if isinstance(value, Load) else []
        if not isinstance(value, Load) or len(coords) != len(value.coords) or value.dtype not in (torch.float32, torch.float16):
            reason = f"the scales {scales.name} of {linear.name} are no fp32 or fp16 input of the region, nor a slice of one"
            raise fail(linear, reason, 2)
        return Scale(value.input, tuple(coords), group if any(k in c.free_symbols for c in coords) else 0)

    def place(self, leaf: Contraction) -> tuple[sympy.Expr, sympy.Expr]:
        """(flat row, weight row) of a linear's element, over atoms."""
        flat, stride = [], ONE
        sizes = sizes_of(fake(leaf.node))
        for c, n in zip(reversed(leaf.at[:-1]), reversed(sizes[:-1]), strict=True):
            flat.append(c * stride)
            stride = stride * n
        weight = self.weights[leaf.node]
        return self.space.join(sympy.Add(*flat)), self.space.substitute(weight.row, {weight.symbol: leaf.at[-1]})


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
