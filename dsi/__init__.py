"""dsi: a compiler of transformer models for inference.

    torch.compile(model, backend="dsi")

needs no import of this package. `init_inference` is DeepSpeed's call; the rest is for looking into the compiler and extending it. Names are
imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsi.compiler.explain import Explanation, explain
    from dsi.compiler.registry import register, unregister
    from dsi.engine.config import InferenceConfig
    from dsi.engine.errors import ConfigError
    from dsi.engine.inference import init_inference
    from dsi.engine.layout import lay_out
    from dsi.engine.wrapper import InferenceEngine
    from dsi.ir.context import Report
    from dsi.ir.custom import CustomOp, custom_op
    from dsi.ir.errors import DsiError, DsiInternalError
    from dsi.ir.options import Options
    from dsi.patterns.rule import Rule
    from dsi.patterns.verify import VerificationError, verify
    from dsi.quantize.files import load_quantised, save_quantised
    from dsi.quantize.model import quantise_model
    from dsi.runtime.packs import refresh

_HOMES = {
    "Options": "dsi.ir.options",
    "DsiError": "dsi.ir.errors",
    "DsiInternalError": "dsi.ir.errors",
    "Rule": "dsi.patterns.rule",
    "CustomOp": "dsi.ir.custom",
    "custom_op": "dsi.ir.custom",
    "VerificationError": "dsi.patterns.verify",
    "verify": "dsi.patterns.verify",
    "register": "dsi.compiler.registry",
    "unregister": "dsi.compiler.registry",
    "Report": "dsi.ir.context",
    "Explanation": "dsi.compiler.explain",
    "explain": "dsi.compiler.explain",
    "init_inference": "dsi.engine.inference",
    "lay_out": "dsi.engine.layout",
    "InferenceConfig": "dsi.engine.config",
    "InferenceEngine": "dsi.engine.wrapper",
    "ConfigError": "dsi.engine.errors",
    "quantise_model": "dsi.quantize.model",
    "save_quantised": "dsi.quantize.files",
    "load_quantised": "dsi.quantize.files",
    "refresh": "dsi.runtime.packs",
}

__all__ = [
    "ConfigError",
    "CustomOp",
    "DsiError",
    "DsiInternalError",
    "Explanation",
    "InferenceConfig",
    "InferenceEngine",
    "Options",
    "Report",
    "Rule",
    "VerificationError",
    "__version__",
    "custom_op",
    "explain",
    "init_inference",
    "lay_out",
    "load_quantised",
    "quantise_model",
    "refresh",
    "register",
    "save_quantised",
    "unregister",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("dsi")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'dsi' has no attribute {name!r} (public names: {', '.join(__all__)})")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
