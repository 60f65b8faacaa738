"""Sizes at run time: symbols bound once a call from the inputs, expressions over them compiled once to Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from dsi.codegen import integers
from dsi.ir.errors import DsiInternalError

Environment = tuple[int, ...]  # the values of the symbols of one `Sizes`, in its order


def expression(size: Any) -> sympy.Expr:
    """A size, stride or SymInt as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return sympy.sympify(size.node.expr)
    return sympy.sympify(size)


class Sizes:
    """The size symbols of a graph and where each is read from: a dimension or stride of an input, or a SymInt input."""

    def __init__(self, inputs: Sequence[Any]):
        self.names: list[str] = []
        self.sources: dict[str, int] = {}  # symbol -> the input that it is read from
        self.used: set[str] = set()  # symbols of what has been compiled so far
        self._readers: list[str] = []
        for number, value in enumerate(inputs):
            if isinstance(value, torch.SymInt):
                self._bind(number, expression(value), "")
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    self._bind(number, expression(size), f".size({dim})")
                for dim, stride in enumerate(value.stride()):
                    self._bind(number, expression(stride), f".stride({dim})")
        body = ", ".join(self._readers)
        self.bind: Callable[[Sequence[Any]], Environment] = eval(f"lambda i: ({body}{',' if self._readers else ''})")
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def _bind(self, number: int, expr: sympy.Expr, attribute: str) -> None:
        """An attribute of input `number` has the value of `expr`: binds its symbol where it is one, or a multiple of one not bound yet."""
        for symbol in expr.free_symbols:
            if symbol.name in self.names or len(expr.free_symbols) > 1:
                continue
            factor = sympy.simplify(expr / symbol)
            if factor.is_Integer and factor > 0:
                self.names.append(symbol.name)
                self.sources[symbol.name] = number
                self._readers.append(f"i[{number}]{attribute}" + ("" if factor == 1 else f" // {factor}"))

    def compile(self, *exprs: Any) -> tuple[int, ...] | Callable[..., tuple[int, ...]]:
        """A tuple of expressions as a tuple of ints where no symbol is in them, else as a function of the environment's values.

        Raises `DsiInternalError` naming a symbol that no input gives.
        """
        wanted = tuple(expression(expr) for expr in exprs)
        if all(expr.is_Integer for expr in wanted):
            return tuple(int(expr) for expr in wanted)
        self.used.update(symbol.name for expr in wanted for symbol in expr.free_symbols)
        if wanted not in self._compiled:
            for symbol in {s for expr in wanted for s in expr.free_symbols}:
                if symbol.name not in self.names:
                    raise DsiInternalError(f"size {symbol} of {', '.join(map(str, wanted))} can be read from no input of the graph")
            text = ", ".join(python(expr) for expr in wanted)
            self._compiled[wanted] = eval(f"lambda {', '.join(self.names)}: ({text},)", {"math": math})
        return self._compiled[wanted]


def python(expr: sympy.Expr) -> str:
    """A sympy integer expression as Python source over the names of its symbols, exact for any size (no floats).

    Raises `DsiInternalError` naming a function that is not known here.
    """
    from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing, PythonMod

    text = python
    if isinstance(expr, sympy.Symbol):
        return expr.name
    if expr.is_Integer:
        return str(int(expr))
    if isinstance(expr, (sympy.ceiling, sympy.floor)):
        above, below = sympy.together(expr.args[0]).as_numer_denom()
        return f"(-(-({text(above)}) // ({text(below)})))" if isinstance(expr, sympy.ceiling) else f"(({text(above)}) // ({text(below)}))"
    kind = type(expr).__name__
    if isinstance(expr, FloorDiv | integers.Quotient) or kind == "CleanDiv":
        return f"(({text(expr.args[0])}) // ({text(expr.args[1])}))"
    if isinstance(expr, CeilDiv):
        return f"(-(-({text(expr.args[0])}) // ({text(expr.args[1])})))"
    if isinstance(expr, ModularIndexing):
        base, divisor, modulus = (text(arg) for arg in expr.args)
        return f"((({base}) // ({divisor})) % ({modulus}))"
    if isinstance(expr, sympy.Mod | PythonMod | integers.Remainder) or kind == "Mod":
        return f"(({text(expr.args[0])}) % ({text(expr.args[1])}))"
    if kind in ("Max", "Min"):
        return f"{kind.lower()}({', '.join(text(arg) for arg in expr.args)})"
    if isinstance(expr, sympy.Add):
        return f"({' + '.join(text(arg) for arg in expr.args)})"
    if isinstance(expr, sympy.Mul):
        above, below = expr.as_numer_denom()
        if below == 1:
            return f"({' * '.join(text(arg) for arg in expr.args)})"
        return f"(({text(above)}) // ({text(below)}))"
    if isinstance(expr, sympy.Pow) and expr.args[1].is_Integer and expr.args[1] > 0:
        return f"({text(expr.args[0])} ** {expr.args[1]})"
    raise DsiInternalError(f"a size is computed by {kind}, which the runtime cannot compute: {expr}")
