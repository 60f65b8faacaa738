"""Pulling a value of a region's body back to the region's inputs and anchors, at one point.

`Puller.at(node, coords)` is the expression of `node`'s element at `coords`. Views only change coordinates (ir/views.py); pointwise
operations become `Op`s (ir/elementwise.py); semantic operators are spelled out (ir/semantics.py). It stops at inputs (`Load`), at anchors
(`Contraction`) and at row statistics (`Moment`); a planner turns the latter two into windows and statistics of its kernel, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from .errors import Refused, refuse
from .index_map import ONE, ZERO, FloorDiv, Max, Min, Mod, Space, nonnegative, size_of
from .source import source_line
from .tile import Const, Expr, Index, Load, Op, Test, parts_of

Coords = tuple[sympy.Expr, ...]
Handler = Callable[["Puller", fx.Node, Coords], Expr]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Contraction(Expr):
    """An anchor's own result (before a bias) at `at`: a linear's leading coordinates and output channel, or attention's (b, h, s, e)."""

    node: fx.Node
    at: Coords
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Moment(Expr):
    """`which` ("mean" or "rstd") of the last dimension of norm `node`'s input, at the leading coordinates `lead`."""

    node: fx.Node
    lead: Coords
    which: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class MomentBody:
    """What a `Moment` is taken over: `body` for `over` in [0, size); `kind` and `eps` as in `tile.Reduction`."""

    kind: str
    body: Expr
    over: sympy.Symbol
    size: sympy.Expr
    eps: float


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments. Their types are those of its operator's schema, which `fx` does not know."""
    return node.args


def sizes_of(value: torch.Tensor) -> list[sympy.Expr]:
    """The sizes of a fake tensor as sympy expressions."""
    return [size_of(n) for n in value.shape]


def fake(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that is one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise fail(node, f"{node.name} is no tensor")
    return value


def fail(node: fx.Node, reason: str, rule: int | None = None) -> Refused:
    """A refusal about `node`, to raise."""
    return refuse(reason, node=node.name, where=source_line(node), rule=f"region rule {rule}" if rule else "region")


class Puller:
    """Expressions of a body's values at points of `space`. Equal requests give the same object."""

    def __init__(self, body: fx.GraphModule, space: Space):
        from .activations import ACTIVATIONS_OF_ATEN
        from .elementwise import ELEMENTWISE
        from .scatters import FILLS, SCATTERS
        from .semantics import SEMANTICS
        from .views import VIEWS

        self.space = space
        self.inputs = {n: i for i, n in enumerate(n for n in body.graph.nodes if n.op == "placeholder")}
        self.handlers: dict[Any, Handler] = {**VIEWS, **SCATTERS, **FILLS, **ELEMENTWISE, **ACTIVATIONS_OF_ATEN, **SEMANTICS}
        self.moments: dict[tuple[fx.Node, Coords], MomentBody] = {}
        self.gathers: dict[sympy.Symbol, Expr] = {}  # a coordinate that is itself a value, as a symbol of the space
        self._gather_of: dict[tuple[int, sympy.Expr], sympy.Symbol] = {}
        self._memo: dict[tuple[fx.Node, Coords], Expr] = {}
        self._loose = False  # whether coordinates may leave their tensor at points whose value is not selected

    def at(self, node: fx.Node, coords: Sequence[sympy.Expr]) -> Expr:
        """The value of `node` (a tensor) at `coords`, one an dimension. Raises `Refused`."""
        key = (node, tuple(coords))
        if key not in self._memo:
            self._memo[key] = self._at(node, key[1])
        return self._memo[key]

    def _at(self, node: fx.Node, coords: Coords) -> Expr:
        value = fake(node)
        if value.dtype not in DTYPES:
            raise fail(node, f"{node.name} has dtype {str(value.dtype).removeprefix('torch.')}, which kernels do not compute in")
        if any(n == 0 for n in sizes_of(value)):
            raise fail(node, f"{node.name} has no elements")
        if len(coords) != value.dim():
            raise AssertionError(f"{node.name}: {len(coords)} coordinates for {value.dim()} dimensions")
        coords = tuple(ZERO if n == 1 else c for c, n in zip(coords, sizes_of(value), strict=True))
        if node.op == "placeholder":
            if self._loose:
                coords = tuple(self.wrap(c, n) for c, n in zip(coords, sizes_of(value), strict=True))
            return Load(self.inputs[node], tuple(self.coordinate(node, c) for c in coords), value.dtype)
        if node.op != "call_function":
            raise fail(node, f"{node.name} is a {node.op} node: everything that a region reads must be one of its inputs")
        handler = self.handlers.get(node.target)
        if handler is None:
            raise fail(node, f"{node.target} is neither a view nor pointwise, so no point of {node.name} can be computed by itself", 4)
        return handler(self, node, coords)

    def selected(self, node: fx.Node, coords: Coords) -> Expr | None:
        """`node` at coordinates that are in range only where its value is selected. Loads are wrapped into their tensors; None where that
        does not make every coordinate safe: an anchor's would have to be wrapped too, or a negative value would be divided."""
        outer, self._loose = self._loose, True
        memo, self._memo = self._memo, {}
        try:
            value = self.at(node, coords)
        finally:
            self._loose, self._memo = outer, memo
        return value if all(map(self._safe, parts_of(value))) else None

    def wrap(self, coordinate: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
        """`coordinate` where it lies in [0, size), and something in [0, size) everywhere else."""
        if size == 1:
            return ZERO
        if self.space.within(coordinate, size):
            return coordinate
        bounds = self.space.bounds(coordinate)
        if bounds is not None and bounds[0].is_Integer and size.is_Integer:
            return self.space.mod(coordinate, size)
        return Max(ZERO, Min(coordinate, size - 1))

    def _safe(self, part: Expr) -> bool:
        if isinstance(part, Contraction):
            sizes = sizes_of(fake(part.node))
            return all(self.space.within(c, n) for c, n in zip(part.at, sizes, strict=True)) and all(map(self._defined, part.at))
        if isinstance(part, Moment):
            sizes = sizes_of(fake(part.node))[:-1]
            return all(self.space.within(c, n) and self._defined(c) for c, n in zip(part.lead, sizes, strict=True))
        if isinstance(part, Load):
            return all(self._defined(c) for c in part.coords if isinstance(c, sympy.Basic))
        if isinstance(part, Index | Test):
            return self._defined(part.expr if isinstance(part, Index) else part.condition)
        return True

    def _defined(self, expr: sympy.Basic) -> bool:
        """Whether every floor division and modulo within `expr` is of a value that is not negative."""
        for division in expr.atoms(FloorDiv, Mod):
            bounds = self.space.bounds(division.args[0])
            if bounds is None or not nonnegative(bounds[0]):
                return False
        return True

    # ------------------------------------------------------------------------------------------------------------------ operands

    def operand(self, node: fx.Node, argument: Any, coords: Coords, dtype: torch.dtype | None = None) -> Expr:
        """An argument of a pointwise `node` at the point `coords` of its result: a tensor that broadcasts, a number (of type `dtype`) or
        a size."""
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                return self.at(argument, self.broadcast(node, argument, coords))
            if isinstance(value, int | torch.SymInt):
                return Index(size_of(value))
            raise fail(node, f"{node.name} takes {argument.name}, which is neither a tensor nor a size")
        if isinstance(argument, bool | int | float):
            kind = dtype or (torch.bool if isinstance(argument, bool) else torch.int64 if isinstance(argument, int) else torch.float32)
            return Const(_literal(argument, kind), kind)
        if isinstance(argument, torch.SymInt):
            return Index(size_of(argument))
        raise fail(node, f"{node.name} takes {argument!r}, which is neither a tensor nor a number")

    def broadcast(self, node: fx.Node, argument: fx.Node, coords: Coords) -> Coords:
        """Coordinates in `argument`, which broadcasts to the result of `node`, of the result's point `coords`."""
        sizes, whole = sizes_of(fake(argument)), sizes_of(fake(node))
        skipped = len(whole) - len(sizes)
        result = []
        for n, full, c in zip(sizes, whole[skipped:], coords[skipped:], strict=True):
            if n == 1:
                result.append(ZERO)
            elif n == full:
                result.append(c)
            else:
                raise fail(
                    node, f"{node.name} broadcasts a dimension of size {n} of {argument.name} to {full}, which may or may not be equal", 1
                )
        return tuple(result)

    def cast(self, value: Expr, dtype: torch.dtype) -> Expr:
        """`value` as an operand of an operation that computes in `dtype`. Floats are all fp32 already, so only a change of kind is a
        cast."""
        if value.dtype == dtype or (value.dtype.is_floating_point and dtype.is_floating_point):
            return value
        if isinstance(value, Const):
            return Const(_literal(value.value, dtype), dtype)
        return Op("cast", (value,), dtype)

    # ------------------------------------------------------------------------------------------------------------------- gathers

    def gathered(self, index: Expr, size: sympy.Expr) -> sympy.Symbol:
        """A symbol in [0, size) that stands for the value `index` in coordinates."""
        key = (id(index), size)
        if key not in self._gather_of:
            if self._loose and any(isinstance(part, Index | Test) for part in parts_of(index)):
                # Computed from coordinates that may leave their range here: what is looked up must not.
                lowest = Op("maximum", (self.cast(index, torch.int64), Const(0, torch.int64)), torch.int64)
                index = Op("minimum", (lowest, Index(size - 1)), torch.int64)
            symbol = sympy.Symbol(f"g{len(self.gathers)}_", integer=True, nonnegative=True)
            self._gather_of[key] = self.space.add(symbol, size)
            self.gathers[symbol] = index
        return self._gather_of[key]

    def coordinate(self, node: fx.Node, coordinate: sympy.Expr) -> sympy.Expr | Expr:
        """A coordinate as a `Load` or `Store` takes it: gather symbols become the values that they stand for."""
        found = coordinate.free_symbols & self.gathers.keys()
        if not found:
            return coordinate
        if coordinate.is_Symbol:
            return self.gathers[coordinate]
        total: Expr | None = None
        rest = ZERO
        for term in sympy.Add.make_args(coordinate):
            if not (term.free_symbols & self.gathers.keys()):
                rest = rest + term
                continue
            factor, part = ONE, None
            for f in sympy.Mul.make_args(term):
                if f in self.gathers and part is None:
                    part = self.gathers[f]
                elif not (f.free_symbols & self.gathers.keys()):
                    factor = factor * f
                else:
                    raise fail(node, f"{node.name} is read at {coordinate}, which divides a gathered index", 5)
            assert part is not None
            if part.dtype != torch.int64:
                part = Op("cast", (part,), torch.int64)
            if factor != 1:
                part = Op("mul", (part, Index(factor)), torch.int64)
            total = part if total is None else Op("add", (total, part), torch.int64)
        assert total is not None
        return total if rest == 0 else Op("add", (total, Index(rest)), torch.int64)


def _literal(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
