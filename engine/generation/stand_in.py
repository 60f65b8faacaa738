"""A module with another forward: the same parts, weights and attributes, seen through a class of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def stand_in_class(base: type, forward: Callable[..., Any], **members: Any) -> type:
    """A class with the name of `base`, which libraries look at, whose modules run `forward` when they are called."""
    # A property comes before what is in an instance's dict, where a wrapped forward may be.
    own = {"forward": property(lambda self: forward), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**members, **own})


def stand_in(module: nn.Module, kind: type) -> Any:
    """`module` seen as one of `kind`. What a method sets on it is set on `module`, whose forward may read it."""
    made = type(module).__new__(type(module))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "__class__", kind)
    return made
