"""Graphs as Python that a person can read: one line a node, each with its value and the model's line that it comes from."""

from __future__ import annotations

import os
from typing import Any

import torch
from dsi.ir.region import Region
from dsi.ir.source import source_frame
from torch import fx


def graph_text(gm: fx.GraphModule, name: str = "forward") -> str:
    """`gm` as a Python function, after it one function for the body of each region that it calls."""
    parts = [_function(gm, name)]
    for node in gm.graph.nodes:
        region = node.meta.get("region")
        if isinstance(region, Region):
            title = f"# {region.kind} region: {region.label}" if region.label else f"# {region.kind} region"
            parts.append(f"{title}\n{_function(region.body, str(node.target), region.roles)}")
    return "\n\n".join(parts)


def _function(gm: fx.GraphModule, name: str, roles: dict[str, str] | None = None) -> str:
    lines = [f"def {name}("]
    body = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"    {node.name},  # {value_text(_value(node))}")
        elif node.op == "output":
            body.append(f"    return {_argument(node.args[0])}")
        else:
            role = (roles or {}).get(node.name, "")
            comments = [c for c in (value_text(_value(node)), role, _source(node)) if c]
            body.append(f"    {node.name} = {_call(node)}{'  # ' + '  '.join(comments) if comments else ''}")
    return "\n".join([*lines, "):", *body, ""])


def _source(node: fx.Node) -> str:
    file, line, code = source_frame(node)
    return f"{os.path.basename(file)}:{line}: {code}" if file else ""


def _call(node: fx.Node) -> str:
    arguments = ", ".join([*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())])
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_method":
        first, *rest = (*map(_argument, node.args),)
        keywords = [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
        return f"{first}.{node.target}({', '.join([*rest, *keywords])})"
    if node.op == "call_module":
        return f"self.{node.target}({arguments})"
    return f"{target_text(node.target)}({arguments})"


def target_text(target: Any) -> str:
    """The name by which a target can be found in torch."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    module = (getattr(target, "__module__", "") or "").replace("_operator", "operator")
    name = getattr(target, "__name__", str(target))
    return f"{module}.{name}" if module and module != "builtins" else name


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
    if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
        return f'float("{value}")'
    return repr(value)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def value_text(value: Any) -> str:
    """A value's dtype and shape, its strides where it is not contiguous: "float32[2, 8, 64]"."""
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{_sizes(value.shape)}"
        if not _plain_strides(value):
            text += f" strides {_sizes(value.stride())}"
        return text if value.device.type == "cpu" else f"{text} {value.device}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(value_text(v) for v in value) + ")"
    if value is None:
        return ""
    return f"{type(value).__name__} {value}"


def _sizes(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _plain_strides(value: torch.Tensor) -> bool:
    # Compared as text: a question about symbolic sizes could leave a guard behind.
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(size) != "1" and str(stride) != str(expected):
            return False
        expected = expected * size
    return True
