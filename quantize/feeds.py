"""Which linears of a model feed an activation or are fed by one, found by running it once: what `mlp_extra_grouping` is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.errors import DsiError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_ACTIVATIONS = {"gelu", "silu", "relu", "relu_", "tanh", "sigmoid", "mish", "elu", "leaky_relu", "hardswish", "relu6", "softplus", "erf"}
_THROUGH = {
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "chunk",
        "split",
        "squeeze",
        "unsqueeze",
        "flatten",
        "to",
        "type",
        "__getitem__",
    ),
    *(
        "float",
        "half",
        "bfloat16",
        "clone",
        "dropout",
        "add",
        "__add__",
        "__radd__",
        "mul",
        "__mul__",
        "__rmul__",
        "pow",
        "__pow__",
        "square",
    ),
}


def mlp_weights(model: nn.Module, example: Mapping[str, Any] | None = None) -> set[int]:
    """The `id`s of weights whose linear feeds an activation, or multiplies what an activation gave, or reads it.

    The model is run once, on `example` (its keyword arguments), else on what a transformers model calls its `dummy_inputs`. Raises
    `DsiError` where there is neither.
    """
    inputs = example if example is not None else getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        raise DsiError(
            f"mlp_extra_grouping asks which linears of {type(model).__name__} are next to an activation, which a run of it shows: give "
            "example={'name': input, ...}, arguments that its forward takes, to quantise_model"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, dict(inputs))
    watch = _Watch()
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), watch:
            model(**given)
    finally:
        model.train(training)
    return watch.found


class _Watch(TorchFunctionMode):
    """Follows values from linears to activations and from activations to linears."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._weights: WeakIdKeyDictionary = WeakIdKeyDictionary()  # value -> ids of the weights that it came from, pointwise
        self._active: WeakIdKeyDictionary = WeakIdKeyDictionary()  # values that came from an activation, pointwise

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        operands = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func in (F.linear, torch.addmm):
            x, weight = (args[0], args[1]) if func is F.linear else (args[1], args[2])
            if x in self._active:
                self.found.add(id(weight))
            self._weights[result] = {id(weight)}
        elif name in _ACTIVATIONS:
            self._reached(operands)
            self._mark(result, set(), True)
        elif name in _THROUGH:
            active = [value for value in operands if value in self._active]
            if active and len(operands) > 1 and "mul" in name:
                self._reached([value for value in operands if value not in self._active])  # the other half of a gate
            weights = set().union(*(self._weights.get(value, set()) for value in operands))
            self._mark(result, weights, bool(active))
        return result

    def _reached(self, values: list[Tensor]) -> None:
        for value in values:
            self.found |= self._weights.get(value, set())

    def _mark(self, result: Any, weights: set[int], active: bool) -> None:
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                if active:
                    self._active[value] = True
                elif weights:
                    self._weights[value] = weights
