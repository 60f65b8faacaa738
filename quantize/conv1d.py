"""transformers' Conv1D: a linear whose weight is stored [K, N]."""

from __future__ import annotations

import sys
from typing import Any


def is_conv1d(module: Any) -> bool:
    """Whether `module` is one."""
    utils = sys.modules.get("transformers.pytorch_utils")  # a model that has one has imported it
    return utils is not None and type(module) is utils.Conv1D
