"""int8 weights: the one place where the engine meets `dsi.quantize`."""

from __future__ import annotations

from typing import Any

import torch
from dsi.ir.options import Options
from dsi.quantize.formats import INT8, Format, Grouping
from torch import nn

from .config import InferenceConfig, QuantizationSetting
from .dtypes import cast


def quantiser() -> Any:
    """`dsi.quantize.quantise_model`. Raises NotImplementedError where this version has none."""
    from dsi import quantize

    found = getattr(quantize, "quantise_model", None)
    if found is None:
        raise NotImplementedError(
            "dsi: dtype=torch.int8: int8 weights are not there yet; give dtype=torch.float16 or torch.bfloat16 until they are"
        )
    return found


FORMAT_KEYS = ("dtype", "group_size", "quantize_groups", "mlp_extra_grouping", "quantize_skip", "tied_head")
"""Options of the compiler that say how weights become int8. In an engine of int8 they are followed where its linears are replaced."""


def quantise(module: nn.Module, config: InferenceConfig) -> None:
    """Replace the linears of `module` by int8 ones in place, as `config` has it; their originals are freed.

    What stays floating-point keeps its dtype, except that float32 on a GPU becomes float16, as in DeepSpeed.
    """
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is not None and first.is_cuda and first.dtype == torch.float32:
        cast(module, torch.float16)
    given = Options.parse({key: value for key, value in config.options.items() if key in FORMAT_KEYS} | {"dtype": "int8"})
    setting = config.quantization_setting or QuantizationSetting(given.quantize_groups, given.mlp_extra_grouping)
    quantiser()(
        module,
        groups=setting.groups,
        mlp_extra_grouping=setting.mlp_extra_grouping,
        skip=given.quantize_skip,
        format=Format(Grouping("inner", given.group_size)) if given.group_size else INT8,
        tied="keep" if given.tied_head == "keep" else "head",
    )


def compiler_options(config: InferenceConfig) -> dict[str, Any]:
    """What is left of `config.options` for the compiler, which must not round again what was left out."""
    return {key: value for key, value in config.options.items() if config.dtype != torch.int8 or key not in FORMAT_KEYS}
