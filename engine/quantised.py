"""int8 weights: the one place where the engine meets `dsi.quantize`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import QuantizationSetting
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


def quantise(module: nn.Module, setting: QuantizationSetting | None) -> None:
    """Replace the linears of `module` by int8 ones in place; their originals are freed.

    What stays floating-point keeps its dtype, except that float32 on a GPU becomes float16, as in DeepSpeed.
    """
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is not None and first.is_cuda and first.dtype == torch.float32:
        cast(module, torch.float16)
    setting = setting or QuantizationSetting()
    quantiser()(module, groups=setting.groups, mlp_extra_grouping=setting.mlp_extra_grouping, skip=())
