"""How weights lie in memory: what one output reads, side by side.

transformers' `Conv1D` (GPT-2) stores its weight [K, N], and so does a module of one's own that computes `x @ w`: a program that computes a
few outputs reads short runs far apart. One token at a time such a product takes up to twice as long (measured on an H200: GPT-2's linears
in 16 us a layer, 8 us laid out). The values and the shape of a laid out weight are the same, only its strides differ.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from dsi.compiler.explain import explain
from dsi.ir.errors import DsiError
from torch import nn


def lay_out(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Lay out the weights of `model` that lie across, in place, so that the K elements of one output are contiguous; returns their names.

    With inputs (`args`, `kwargs`), the model is compiled and run once for them, and the graph says which weights those are: parameters and
    buffers [K, N] that are contracted along K, in whatever module, and read in no other way. Without, those of transformers' `Conv1D`
    are. One weight is copied at a time, so that no second copy of the model is ever held; weights that lie by output already stay as they
    are. Call it before compiling: a compiled model is compiled anew for other strides. `init_inference` does it for `Conv1D` on a GPU
    by itself. Raises `DsiError` for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise DsiError(f"dsi.lay_out takes a torch.nn.Module, whose weights it lays out, not {type(model).__name__}")
    names = explain(model, *args, **kwargs).across if args or kwargs else _conv1d_weights(model)
    tensors = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    found = []
    for name in names:
        weight = tensors.get(name)
        if weight is not None and weight.dim() == 2 and 1 in weight.stride():
            with torch.no_grad():
                weight.data = weight.data.t().contiguous().t() if weight.stride(1) == 1 else weight.data.contiguous()
            found.append(name)
    return found


def _conv1d_weights(model: nn.Module) -> list[str]:
    """The weights of `Conv1D` modules that are stored [K, N]."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    if loaded is None:  # then no module is one of its classes
        return []
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, loaded.Conv1D) and isinstance(weight, nn.Parameter) and weight.stride(-1) == 1 and weight.stride(0) != 1:
            found.append(f"{name}.weight" if name else "weight")
    return found
