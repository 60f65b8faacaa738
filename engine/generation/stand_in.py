"""A module with another forward: the same parts, weights and attributes, seen through a class of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def stand_in_class(module: nn.Module, forward: Callable[..., Any], **members: Any) -> type:
    """A class with the name of the module's, which libraries look at. Seen as one of it, `module` runs `forward` when it is called; what
    is copied from that is a module of its own, and runs its own."""
    base: Any = type(module)

    def run(self: Any) -> Any:
        own = vars(self)
        return forward if own is vars(module) else own.get("forward") or base.forward.__get__(self)

    # A property comes before what is in an instance's dict, where a wrapped forward may be.
    made = {"forward": property(run), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**members, **made})


def stand_in(module: nn.Module, kind: type) -> Any:
    """`module` seen as one of `kind`. What a method sets on it is set on `module`, whose forward may read it."""
    made = type(module).__new__(type(module))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "__class__", kind)
    return made
