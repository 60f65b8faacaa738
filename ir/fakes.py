"""Fakes of results, found out once for each operator and kind of arguments: a model of equal layers asks the same again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

_NAMESPACES = ("aten", "prims", "dsi")
_DEPENDS = (  # on more than the kinds of the arguments
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
Kind = tuple[Any, ...]


class Fakes:
    """What operators give in one fake mode.

    Remembered where the result is one new tensor: no view, nothing written, all sizes numbers. A tensor without dimensions among the
    arguments may be a number in disguise, or have a known value: then nothing is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, Kind] = {}

    def result(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """What `compute()` gives, which calls `target` with these arguments on fakes, without gradients: that, or an equal fake."""
        if not makes_one(target):
            return compute()
        tensors: list[FakeTensor] = []
        try:
            key = (target, _kind(args, tensors), _kind(tuple(sorted(kwargs.items())), tensors))
            known = self._known.get(key)
        except (_Unknown, TypeError):  # or an argument that cannot be a key
            return compute()
        if known is not None:
            return _fake(known, tensors[0].fake_mode)
        value = compute()
        if tensors and _is_new(value, tensors):
            self._known[key] = value.shape, value.stride(), value.dtype, value.device
        return value


class _Unknown(Exception):
    """An argument of which not all is known that decides what the result is."""


@cache
def makes_one(target: Any) -> bool:
    """Whether an operator, as far as its schema says, gives one new tensor whose kind follows from the kinds of its arguments."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _NAMESPACES or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType) and returns[0].alias_info is None
    return single and not any(tag in target.tags for tag in _DEPENDS)


def _kind(value: Any, tensors: list[FakeTensor]) -> Any:
    """What a result can depend on of an argument. The tensors in it are added to `tensors`."""
    if isinstance(value, FakeTensor):
        if value._has_symbolic_sizes_strides or not value.ndim or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _Unknown
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, (tuple, list)):
        return type(value), *(_kind(item, tensors) for item in value)
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _Unknown
    return type(value), value


def _is_new(value: Any, tensors: Sequence[FakeTensor]) -> bool:
    """Whether a result is a tensor of fixed sizes in memory of its own, and all its tensors are of one mode."""
    if type(value) is not FakeTensor or value._has_symbolic_sizes_strides or value.layout is not torch.strided:
        return False
    if value.constant is not None or value.storage_offset() or value.is_conj() or value.is_neg() or value.requires_grad:
        return False
    memory = value.untyped_storage()._cdata
    return all(tensor.untyped_storage()._cdata != memory and tensor.fake_mode is value.fake_mode for tensor in tensors)


def _fake(kind: Kind, mode: Any) -> FakeTensor:
    shape, stride, dtype, device = kind
    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
