"""Modules that hold int8 weights: what takes the place of linears and tables whose floating-point weights are gone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.errors import DsiError
from dsi.ir.quantised_ops import ACTIVATIONS, linear_int8
from torch import Tensor, nn

from .formats import INT8, SCALES, Format
from .int8 import Quantised, quantise, short


class QuantisedLinear(nn.Module):
    """y = x times the transpose of an int8 weight, plus bias: `dsi::linear_int8`.

    `weight` int8 [out_features, in_features] and `scales` (see `ir.quantised_ops`) are buffers, so that no cast of the module touches the
    former; a cast to half precision leaves scales that are fp32 alone. For inference: nothing here has gradients.

    `dtype`: that of the floating-point weight, which casts change as they would have changed the weight. A narrower x is widened to it: T5
    keeps some linears in float32 since their results are beyond float16, and widens x itself only where their weight is floating-point.
    """

    weight: Tensor
    scales: Tensor

    def __init__(
        self,
        quantised: Quantised,
        bias: Tensor | None = None,
        *,
        form: Format = INT8,
        activations: str = "",
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if activations not in ACTIVATIONS:
            raise DsiError(f"activations is one of {', '.join(map(repr, ACTIVATIONS))}, not {activations!r}")
        self.out_features, self.in_features = quantised.weight.shape
        self.group, self.form, self.activations, self.dtype = quantised.group, form, activations, dtype
        self.register_buffer("weight", quantised.weight)
        self.register_buffer("scales", quantised.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        form: Format = INT8,
        kn: bool = False,
        activations: str = "",
        name: str = "weight",
    ) -> QuantisedLinear:
        """From a floating-point weight [N, K], or [K, N] if `kn`. Raises `DsiError` naming `name` where it cannot be quantised."""
        return cls(quantise(weight, form, kn=kn, name=name), bias, form=form, activations=activations, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype, or `dtype` if that is wider.

        Raises `DsiError` for an x that is not floating-point.
        """
        if not x.is_floating_point():  # from a model that casts x to the dtype of the weight: its numbers are lost
            raise DsiError(
                f"{self} was given {short(x.dtype)}: the model casts what it hands to this linear to the dtype of its "
                "weight, which is int8 now; leave it floating-point by its name (skip=[...] of quantise_model)"
            )
        if self.dtype is not None and self.dtype.itemsize > x.dtype.itemsize:
            x = x.to(self.dtype)
        return linear_int8(x, self.weight, self.scales, self.bias, group=self.group, activations=self.activations)

    @property
    def quantised(self) -> Quantised:
        """The int8 form that it holds."""
        return Quantised(self.weight, self.scales, self.group)

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers' tie_weights() does this to a head, whose scales would then multiply the floats of the table.
        if name == "weight" and isinstance(value, Tensor) and value.dtype != torch.int8:
            raise DsiError(
                f"{self} holds an int8 weight, which a {short(value.dtype)} one cannot replace: put a linear there, and quantise that"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedLinear:
        # `model.half()` must not round scales, nor `model.type(dtype)` make floats of int8: they follow to a device, in their own dtypes.
        before = self.weight, self.scales
        super()._apply(fn, recurse)
        if self.weight.dtype != before[0].dtype:
            self.weight = before[0].to(self.weight.device)
        if self.scales.dtype != before[1].dtype:
            self.scales = before[1].to(self.scales.device)
        if self.dtype is not None:
            self.dtype = _cast(fn, self.dtype, self.scales)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Copying would truncate floats to int8, and round scales to the dtype of those that are here.
        weight, scales = (state_dict.get(prefix + name) for name in ("weight", "scales"))
        if isinstance(weight, Tensor) and weight.dtype != torch.int8:
            args[-1].append(
                f"{prefix}weight is {short(weight.dtype)} in the state dict and int8 in the model: load it before the model is quantised"
            )
            return
        if isinstance(scales, Tensor) and scales.dtype != self.scales.dtype and scales.dtype in SCALES:
            self.scales = self.scales.to(scales.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        rounded = ", int8 activations" if self.activations else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.form}{rounded}"


class QuantisedEmbedding(nn.Module):
    """Rows of a head's int8 weight [V, E], each times its scale, in `dtype`: the table that the head shares. The int8 is the head's."""

    def __init__(self, head: QuantisedLinear, dtype: torch.dtype, *, padding_idx: int | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.weight.shape
        self.padding_idx, self.dtype = padding_idx, dtype
        object.__setattr__(self, "head", head)  # no child of this module: it is one of another

    head: QuantisedLinear

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., E]."""
        rows = F.embedding(ids, self.head.weight).float() * F.embedding(ids, self.head.scales[:, None]).float()
        return rows.to(self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedEmbedding:
        # What a cast of the model makes of floats is what rows are handed out in.
        self.dtype = _cast(fn, self.dtype, self.head.weight)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {INT8}, {short(self.dtype)}"


def refuse_save_pretrained(model: nn.Module) -> None:
    """Has `save_pretrained` of `model`, and of what in it has one, raise where it would write int8 weights."""
    for module in model.modules():
        if callable(getattr(module, "save_pretrained", None)) and any(isinstance(part, QuantisedLinear) for part in module.modules()):
            module.save_pretrained = _not_written  # type: ignore[assignment]


def _not_written(*args: Any, **kwargs: Any) -> None:
    raise DsiError(
        "save_pretrained would write int8 weights under the names of floating-point ones, and from_pretrained read them as such: write "
        "this model with dsi.save_quantised(model, path), and its configuration and tokenizer with their own save_pretrained"
    )


def _cast(fn: Any, dtype: torch.dtype, beside: Tensor) -> torch.dtype:
    """What `fn`, which a module applies to its tensors, makes of a `dtype`."""
    return fn(torch.empty(0, dtype=dtype, device=beside.device)).dtype
