"""Modules inside of what only compiles or serves them, and their names without what such a wrapper adds."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_INSIDE = "_orig_mod"  # where `torch.compile(module)` holds the module


def bare(module: Any) -> Any:
    """The module inside of `torch.compile(module)`, or of a class that names the attribute with its module as `_wraps` (an engine)."""
    while True:
        inside = _INSIDE if isinstance(module, OptimizedModule) else getattr(type(module), "_wraps", None)
        if inside is None:
            return module
        module = getattr(module, inside)


def own_name(name: str) -> str:
    """The dotted `name` of a module or tensor as it is where nothing in the model is compiled."""
    return ".".join(part for part in name.split(".") if part != _INSIDE)


def named_modules(model: nn.Module, *, remove_duplicate: bool = False) -> dict[str, nn.Module]:
    """Own name -> module, by every name that it has, or by its first; of one that is compiled, the module inside."""
    return {own_name(name): module for name, module in model.named_modules(remove_duplicate=remove_duplicate)}


def put(parent: nn.Module, attribute: str, module: nn.Module) -> None:
    """Have `module` take the place of what `parent` holds as `attribute`, compiled as that was."""
    old = getattr(parent, attribute)
    if isinstance(old, OptimizedModule):
        module = type(old)(module, old.dynamo_ctx)
    setattr(parent, attribute, module)
