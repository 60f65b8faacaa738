"""What code generation and caches need besides the plan: tensors, size symbols, readable lines, the structural key."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .index_map import size_of
from .pull import args_of
from .source import source_frame
from .tile import KernelSpec, Plan, Tensor

# The symbols that name points, as against sizes.
POINTS = frozenset(sympy.Symbol(s, integer=True, nonnegative=True) for s in "rckbhgsjde")


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, torch.Tensor):
        return Tensor(name, tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride())), value.dtype)
    return Tensor(name, (), (), torch.int64)  # a size, passed as a number


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op == "placeholder"]


def _returned(body: fx.GraphModule) -> list[fx.Node]:
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    return list(args_of(output)[0])


def kernel_spec(region_name: str, body: fx.GraphModule, plan: Plan, constants: frozenset[int] = frozenset()) -> KernelSpec:
    """The `KernelSpec` of a planned region. A SymInt placeholder keeps its place among the inputs as a 0-d int64 `Tensor`. `constants`
    numbers the inputs that no kernel of the graph writes."""
    inputs = [_tensor(n.name, n.meta["val"]) for n in _placeholders(body)]
    outputs = [_tensor(n.name, n.meta["val"]) for n in _returned(body)]
    scalars = []
    for number, node in enumerate(_placeholders(body)):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) and size_of(value).is_Symbol:
            scalars.append((str(size_of(value)), number))
    members = [n for n in body.graph.nodes if n.op == "call_function"]
    lines: dict[str, None] = {}
    for node in members:
        file, line, code = source_frame(node)
        if file:
            lines[f"{os.path.basename(file)}:{line}  {code}"] = None
    return KernelSpec(region_name, plan, inputs, outputs, scalars, [_line(n) for n in members], list(lines), constants)


def _line(node: fx.Node) -> str:
    args = [*map(_argument, args_of(node)), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
    target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", str(node.target))
    return f"{node.name} = {target}({', '.join(args)})"


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, fx.Node) else str(value)


# ------------------------------------------------------------------------------------------------------------------------------ sizes


def _readable(expr: sympy.Expr) -> tuple[sympy.Symbol, int] | None:
    """(symbol, factor) of an expression that is a positive multiple of one size symbol, which can so be read off its value."""
    factor, symbol = expr.as_coeff_Mul()
    return (symbol, int(factor)) if symbol.is_Symbol and factor.is_Integer and factor > 0 else None


def _numbers(value: Any) -> Iterator[Any]:
    """The integers that a kernel's caller sees of an input."""
    if isinstance(value, torch.Tensor):
        yield from value.shape
        yield from value.stride()
    else:
        yield value


def bind_sizes(body: fx.GraphModule, values: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The values of the size symbols for actual inputs, in the order of the placeholders."""
    result: dict[sympy.Symbol, int] = {}
    for node, value in zip(_placeholders(body), values, strict=True):
        for expected, number in zip(_numbers(node.meta["val"]), _numbers(value), strict=True):
            found = _readable(size_of(expected))
            if found is not None:
                result.setdefault(found[0], int(number) // found[1])
    return result


def unbound_sizes(body: fx.GraphModule, plan: Plan) -> set[sympy.Symbol]:
    """Size symbols that the plan, its inputs or its outputs mention and that no input gives."""
    used: set[sympy.Symbol] = set().union(*(part.free_symbols for part in within(plan) if isinstance(part, sympy.Basic)))
    for node in (*_placeholders(body), *_returned(body)):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            for n in (*value.shape, *value.stride()):
                used |= size_of(n).free_symbols
    given = (_readable(size_of(number)) for node in _placeholders(body) for number in _numbers(node.meta["val"]))
    return used - POINTS - {found[0] for found in given if found is not None}


def within(plan: Any) -> Iterator[Any]:
    """Everything that a plan or expression is made of: stores, expressions, sympy expressions; shared parts once."""
    seen: set[int] = set()
    stack = [plan]
    while stack:
        value = stack.pop()
        if isinstance(value, tuple):
            stack.extend(value)
        elif isinstance(value, sympy.Basic):
            yield value
        elif dataclasses.is_dataclass(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            stack.extend(getattr(value, f.name) for f in dataclasses.fields(value))


# -------------------------------------------------------------------------------------------------------------------------------- key


def region_key(body: fx.GraphModule) -> str:
    """A digest that two bodies share exactly when one kernel serves both: operators, arguments, shapes, strides, dtypes and devices of
    inputs and outputs; names of nodes do not count, and size symbols count by the order in which they first occur."""
    renamed: dict[sympy.Symbol, sympy.Symbol] = {}
    numbers: dict[fx.Node, int] = {}

    def size(value: Any) -> str:
        if type(value) is int:
            return str(value)
        expr = size_of(value)
        if expr.is_Integer:
            return str(expr)
        for symbol in sorted(expr.free_symbols, key=str):
            # A number that may be negative does not share the kernel of one that may not: plans rely on signs.
            renamed.setdefault(symbol, sympy.Symbol(f"n{len(renamed)}", integer=True, positive=symbol.is_positive))
        return sympy.srepr(expr.xreplace(renamed))

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}@{value.device}{[size(n) for n in value.shape]}{[size(n) for n in value.stride()]}"
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, list | tuple):
            return f"({','.join(map(describe, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{describe(v)}' for k, v in sorted(value.items()))}}}"
        if isinstance(value, torch.SymInt):
            return size(value)
        return f"{type(value).__name__}:{value!r}"

    parts = []
    for node in body.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            parts.append(f"in {describe(node.meta['val'])}")
        elif node.op == "output":
            parts.append(f"out {[describe(n) + describe(n.meta.get('val')) for n in args_of(node)[0]]}")
        else:
            parts.append(f"{node.target} {describe(args_of(node))} {describe(dict(node.kwargs))} {describe(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
