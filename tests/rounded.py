"""The oracle of int8 models: the same model, its linears' weights replaced by what int8 makes of them."""

from __future__ import annotations

from dsi.quantize.formats import INT8, Format
from dsi.quantize.int8 import quantise
from torch import nn


def rounded(model: nn.Module, form: Format = INT8, keep: tuple[str, ...] = ()) -> nn.Module:
    """`model`, changed in place. A head that shares its weight with the embedding gets one of its own; linears named in `keep` stay."""
    for name, module in model.named_modules():
        conv1d = type(module).__name__ == "Conv1D"
        if (isinstance(module, nn.Linear) or conv1d) and name not in keep:
            wide = quantise(module.weight, form, kn=conv1d).dequantise()
            module.weight = nn.Parameter((wide.t().contiguous() if conv1d else wide).to(module.weight.dtype), requires_grad=False)
    return model
