"""What a side does to the weights of a model before it is compiled: lays them out by output, or makes int8 of them, ours or another's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import path

LEVELS = 127  # of a symmetric int8 weight, on either side of 0


def rows_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as int8 [N, K] and scales [N], fp32: the largest of each row becomes 127."""
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LEVELS
    return (wide / scale[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


class Int8Linear(nn.Module):
    """The recipe that PyTorch's users write: int8 weights a row, cast where they are multiplied, and the scale after it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = rows_to_int8(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor) and isinstance(self.scale, Tensor)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def recipe(model: nn.Module) -> nn.Module:
    """Every `nn.Linear` an `Int8Linear`, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


def torchao(model: nn.Module) -> nn.Module:
    """Every `nn.Linear` by torchao's int8 weight-only quantisation, in place. Raises ImportError where it is not installed."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def laid_out(model: nn.Module) -> nn.Module:
    """Weights stored [K, N] by output, as the engine has them, in place."""
    path.backend()
    import dsi

    dsi.lay_out(model)
    return model


def rounded(model: nn.Module) -> nn.Module:
    """Every linear's weight as its int8 form stands for it, in place: what int8 sides are held against. A head that shares its weight with
    an embedding gets one of its own."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight, scale = rows_to_int8(module.weight)
            module.weight = nn.Parameter((weight.float() * scale[:, None]).to(module.weight.dtype), requires_grad=False)
    return model


PREPARATIONS: dict[str, Callable[[Any], Any]] = {"laid out": laid_out, "recipe": recipe, "torchao": torchao}


def prepared(name: str, function: Any) -> Any:
    """A copy of a model, prepared; the model itself where `name` is "". Raises ValueError for what is no model."""
    if not name:
        return function
    if not isinstance(function, nn.Module):
        raise ValueError(f"weights are {name} in a model only, and this is a {type(function).__name__}")
    return PREPARATIONS[name](copy.deepcopy(function))
