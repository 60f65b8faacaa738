"""How weights lie in memory: what one output reads, side by side.

transformers' `Conv1D` (GPT-2) stores its weight [K, N], so that a program which computes a few outputs reads short runs far apart. One
token at a time such a product takes up to twice as long (measured on an H200: GPT-2's linears in 16 us a layer, 8 us laid out). The values
and the shape of a laid out weight are the same, only its strides differ.
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def lay_out(model: nn.Module) -> list[str]:
    """Lay out the [K, N] weights of `model` in place, such that the K elements of one output are contiguous; returns their names.

    One weight is copied at a time, so that no second copy of the model is ever held. Weights that lie so already, and those of other
    modules, stay as they are. Call it before compiling: a compiled model is compiled anew for other strides. `init_inference` does it on
    a GPU by itself.
    """
    loaded = sys.modules.get("transformers.pytorch_utils")
    if loaded is None:  # then no module is one of its classes
        return []
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, loaded.Conv1D) and isinstance(weight, nn.Parameter) and weight.stride(-1) == 1 and weight.stride(0) != 1:
            with torch.no_grad():
                weight.data = weight.data.t().contiguous().t()
            found.append(f"{name}.weight" if name else "weight")
    return found
