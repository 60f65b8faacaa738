"""Generated kernels as JSON values and back. Expressions are nested lists over a fixed set of classes: nothing read is ever evaluated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import sympy
from dsi.codegen.integers import Quotient, Remainder
from dsi.codegen.kernel import Argument, Kernel, Launch, LibraryCall, View, Workspace
from sympy.functions.elementary.piecewise import ExprCondPair
from sympy.logic.boolalg import BooleanAtom
from torch.utils._sympy import functions as torch_functions

_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(sympy.Add, sympy.Mul, sympy.Pow, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Piecewise, ExprCondPair),
        *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not, Quotient, Remainder),
    )
}
_TORCH = ("FloorDiv", "ModularIndexing", "CleanDiv", "CeilDiv", "PythonMod", "Max", "Min")
_CLASSES |= {f"torch.{name}": getattr(torch_functions, name) for name in _TORCH if hasattr(torch_functions, name)}
_CLASSES |= {"Max": sympy.Max, "Min": sympy.Min}
_ASSUMPTIONS = ("integer", "nonnegative", "positive")


def expression_to_json(expr: sympy.Basic) -> Any:
    """An expression as ints and lists `[class, argument, …]`. Raises `ValueError` naming a class that is not known here."""
    if isinstance(expr, BooleanAtom):
        return ["bool", bool(expr)]
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return ["Rational", int(expr.p), int(expr.q)]
    if isinstance(expr, sympy.Symbol):
        return ["Symbol", expr.name, [name for name in _ASSUMPTIONS if expr.assumptions0.get(name)]]
    for name, cls in _CLASSES.items():
        if type(expr) is cls:
            return [name, *(expression_to_json(arg) for arg in expr.args)]
    raise ValueError(f"an expression of class {type(expr).__name__} cannot be stored: {expr}")


def expression_from_json(value: Any) -> sympy.Basic:
    """The inverse of `expression_to_json`. Raises `ValueError` or `TypeError` for what it cannot have written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return sympy.Integer(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"no expression: {value!r}")
    head, *args = value
    if head == "bool":
        return sympy.true if args[0] else sympy.false
    if head == "Rational":
        return sympy.Rational(int(args[0]), int(args[1]))
    if head == "Symbol":
        return sympy.Symbol(str(args[0]), **{name: True for name in args[1] if name in _ASSUMPTIONS})
    if head not in _CLASSES:
        raise ValueError(f"unknown expression class {head!r}")
    return _CLASSES[head](*(expression_from_json(arg) for arg in args))


def kernel_to_json(kernel: Kernel) -> dict[str, Any]:
    """A kernel without its source text, which is stored by its digest."""
    return {
        "name": kernel.name,
        "digest": kernel.digest,
        "max_rows": kernel.max_rows,
        "schedule": kernel.schedule,
        "workspaces": [{**asdict(workspace), "size": expression_to_json(workspace.size)} for workspace in kernel.workspaces],
        "launches": [_step_to_json(launch) for launch in kernel.launches],
    }


def _step_to_json(launch: Launch | LibraryCall) -> dict[str, Any]:
    if isinstance(launch, LibraryCall):
        return {
            "function": launch.function,
            "operands": [
                [
                    view.kind,
                    view.number,
                    *([expression_to_json(sympy.sympify(expr)) for expr in of] for of in (view.sizes, view.strides)),
                    expression_to_json(sympy.sympify(view.offset)),
                ]
                for view in launch.operands
            ],
            "options": launch.options,
        }
    return {
        "entry": launch.entry,
        "arguments": [[a.kind, a.number, None if a.expr is None else expression_to_json(a.expr)] for a in launch.arguments],
        "constants": launch.constants,
        "grid": [expression_to_json(size) for size in launch.grid],
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "options": launch.options,
        "words": list(launch.words),
    }


def _step_from_json(value: dict[str, Any]) -> Launch | LibraryCall:
    if "function" in value:
        if value["function"] not in ("product", "attention"):
            raise ValueError(f"unknown library function {value['function']!r}")
        views = (
            View(
                kind,
                number,
                tuple(map(expression_from_json, sizes)),
                tuple(map(expression_from_json, strides)),
                expression_from_json(offset),
            )
            for kind, number, sizes, strides, offset in value["operands"]
        )
        return LibraryCall(value["function"], tuple(views), value["options"])
    return Launch(
        entry=value["entry"],
        arguments=tuple(
            Argument(kind, number, None if expr is None else expression_from_json(expr)) for kind, number, expr in value["arguments"]
        ),
        constants=value["constants"],
        grid=tuple(expression_from_json(size) for size in value["grid"]),
        num_warps=value["num_warps"],
        num_stages=value["num_stages"],
        options=value["options"],
        words=tuple(value["words"]),
    )


def kernel_from_json(value: dict[str, Any], source: str) -> Kernel:
    """The inverse of `kernel_to_json`. Raises `KeyError`, `TypeError` or `ValueError` for what it cannot have written."""
    return Kernel(
        name=value["name"],
        source=source,
        digest=value["digest"],
        launches=tuple(map(_step_from_json, value["launches"])),
        max_rows=value["max_rows"],
        schedule=value["schedule"],
        workspaces=tuple(
            Workspace(expression_from_json(workspace["size"]), workspace["dtype"], workspace["zeroed"]) for workspace in value["workspaces"]
        ),
    )
