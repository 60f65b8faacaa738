"""`dsi.init_inference`: DeepSpeed's call."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .config import InferenceConfig
from .errors import warn
from .later import refuse
from .prepare import check, prepare, unwrapped
from .quantised import compiler_options
from .wrapper import InferenceEngine

_ENGINES: weakref.WeakSet[InferenceEngine] = weakref.WeakSet()


def init_inference(
    model: nn.Module, config: InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None, **kwargs: Any
) -> InferenceEngine:
    """An engine around `model`, with DeepSpeed's arguments (docs/engine.md has the table).

    model: any module; one of transformers' gets `generate` too. It is prepared in place: put into eval mode, cast to `dtype` (float16 if
    that is not given), and, where there is a GPU and it is on the CPU, moved there.
    config, kwargs: `InferenceConfig`'s keys, as a dict or the path of a JSON file, and as keyword arguments.

    Raises `dsi.ConfigError` (a ValueError) for a mistake in the keys or a module that cannot be taken, and NotImplementedError for what
    is not there yet, both before anything is changed.
    """
    settings = InferenceConfig.parse(config, **kwargs)
    refuse(settings)
    module = model.module if isinstance(model, InferenceEngine) else unwrapped(model)
    device = check(module, settings)
    _say_what_is_idle(settings, module, device)
    for other in list(_ENGINES):
        if other.module is module and settings.dtype not in (None, other.dtype):
            warn(
                f"dsi: this module is in an engine made as {other.dtype} already; it is cast to {settings.dtype} there too, since both "
                "hold the same weights (copy.deepcopy the module to keep them apart)"
            )
    prepare(module, settings, device)
    engine = InferenceEngine(module, settings)
    _ENGINES.add(engine)
    return engine


def _say_what_is_idle(config: InferenceConfig, module: nn.Module, device: torch.device) -> None:
    """Warn of keys that were given and that the others, or the device, leave without effect; and of a slow default."""
    given = config.model_fields_set
    idle = {"base_dir": "no checkpoint is read"}
    if config.dtype != torch.int8:
        idle["quantization_setting"] = "weights are quantised with dtype=torch.int8 only"
    if not config.replace_with_kernel_inject:
        reason = "without replace_with_kernel_inject=True the module is only wrapped, and nothing is compiled"
        idle |= dict.fromkeys(("max_out_tokens", "min_out_tokens", "enable_cuda_graph", "options"), reason)
    elif device.type != "cuda" and config.enable_cuda_graph:
        idle["enable_cuda_graph"] = f"the module is on {device}"
    for key in sorted(given & set(idle)):
        if key == "options" and not compiler_options(config):
            continue
        if getattr(config, key) != InferenceConfig.model_fields[key].get_default(call_default_factory=True):
            warn(f"dsi: {key!r} has no effect here: {idle[key]}")
    if "dtype" not in given and device.type == "cpu" and any(p.is_floating_point() for p in module.parameters()):
        warn(
            "dsi: dtype is not given, so that weights become torch.float16, as in DeepSpeed; on a CPU torch.float32 and torch.bfloat16 "
            "are faster (dtype=None keeps the module's own)"
        )
