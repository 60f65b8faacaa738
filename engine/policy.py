"""`injection_policy`: which linears' results are summed over GPUs. On one GPU nothing is summed, so it is checked and no more."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from .errors import ConfigError


def check_policy(module: nn.Module, policy: Mapping[type, tuple[str, ...]]) -> None:
    """Raise `ConfigError`, naming the nearest there is, for a class or a name ending that `policy` names and `module` lacks."""
    for part, endings in policy.items():
        found = [child for child in module.modules() if isinstance(child, part)]
        if not found:
            near = _near(part.__name__, {type(child).__name__ for child in module.modules()})
            raise ConfigError(f"dsi: injection_policy: {type(module).__name__} has no {part.__name__}{near}")
        names = {name for child in found for name, _ in child.named_modules() if name}
        for ending in endings:
            if not any(f".{name}".endswith(f".{ending.removeprefix('.')}") for name in names):
                near = _near(ending, {name.split(".", cut)[-1] for name in names for cut in range(name.count(".") + 1)})
                raise ConfigError(f"dsi: injection_policy: no module in {part.__name__} has a name that ends with {ending!r}{near}")


def _near(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
