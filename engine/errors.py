"""Errors and warnings of the engine's face: sentences, blamed on the caller's line."""

from __future__ import annotations

import sys
import warnings

from dsi.ir.errors import DsiError


class ConfigError(DsiError, ValueError):
    """A mistake in what `init_inference` was given, found before the model is touched. A ValueError too: scripts may catch that."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on behalf of the first caller outside of dsi and of pydantic, whose frames lie between a key and its reader."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("dsi", "pydantic"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
