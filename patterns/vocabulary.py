"""The operators that a pattern may be written in, and how a call of one is spelled in a graph.

An entry names every overload that computes the same function with the same leading arguments; the first one also computes it eagerly. A
rule that needs an operator outside this list says `op.call(overload, ...)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from dsi.ir.ops import REGISTRY

aten = torch.ops.aten
prims = torch.ops.prims

Target = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One word of the vocabulary.

    `overloads` take the pattern's arguments in schema order; `commutative`: the first two arguments may be swapped; `fixed`: arguments that
    have no default in some overload and must have this value there; `compute` replaces the first overload where that one does not run
    everywhere.
    """

    name: str
    overloads: tuple[Target, ...]
    commutative: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    compute: Target | None = None

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the operator on tensors."""
        if self.compute is not None:
            return self.compute(*args, **kwargs)
        return invoke(self.overloads[0], args, {**kwargs, **self._fixed_of(self.overloads[0])})

    def _fixed_of(self, target: Target) -> dict[str, Any]:
        known = {p.name for p in parameters(target)}
        return {k: v for k, v in self.fixed.items() if k in known}


@dataclass(frozen=True)
class Parameter:
    """One argument of an overload, as its schema states it."""

    name: str
    required: bool
    default: Any
    keyword_only: bool


@cache
def parameters(target: Target) -> tuple[Parameter, ...]:
    """The arguments of an overload in schema order, out of its schema."""
    if target is operator.getitem:
        return (Parameter("self", True, None, False), Parameter("index", True, None, False))
    schema = target._schema  # type: ignore[attr-defined]
    return tuple(
        Parameter(a.name, not a.has_default_value(), a.default_value if a.has_default_value() else None, a.kwarg_only)
        for a in schema.arguments
    )


def invoke(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `target` with `args` in schema order, passing by name what the schema takes by name only."""
    positional, named = spell(target, args, kwargs)
    return target(*positional, **named)


def spell(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits arguments given in schema order into the positional and the keyword-only ones."""
    params = parameters(target)
    positional = tuple(a for a, p in zip(args, params, strict=False) if not p.keyword_only)
    named = {p.name: a for a, p in zip(args, params, strict=False) if p.keyword_only}
    return positional, {**named, **kwargs}


def _op(name: str, *overloads: Target, commutative: bool = False, compute: Target | None = None, **fixed: Any) -> Op:
    return Op(name, overloads, commutative, fixed, compute)


def _softmax_to_float(x: torch.Tensor, dim: int) -> torch.Tensor:
    # The overload itself runs on CUDA only.
    return torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), dim)


def _maximum(x: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    return torch.maximum(x, other if isinstance(other, torch.Tensor) else torch.tensor(other, dtype=x.dtype))


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        # arithmetic
        _op("add", aten.add.Tensor, aten.add.Scalar, commutative=True),
        _op("sub", aten.sub.Tensor, aten.sub.Scalar),
        _op("rsub", aten.rsub.Scalar),
        _op("mul", aten.mul.Tensor, aten.mul.Scalar, commutative=True),
        _op("div", aten.div.Tensor, aten.div.Scalar),
        _op("neg", aten.neg.default),
        _op("pow", aten.pow.Tensor_Scalar),
        _op("sqrt", aten.sqrt.default),
        _op("rsqrt", aten.rsqrt.default),
        _op("reciprocal", aten.reciprocal.default),
        _op("exp", aten.exp.default),
        _op("erf", aten.erf.default),
        _op("sin", aten.sin.default),
        _op("cos", aten.cos.default),
        _op("maximum", aten.maximum.default, commutative=True, compute=_maximum),
        # activations
        _op("tanh", aten.tanh.default),
        _op("sigmoid", aten.sigmoid.default),
        _op("relu", aten.relu.default),
        _op("silu", aten.silu.default),
        _op("gelu", aten.gelu.default),
        # reductions
        _op("mean", aten.mean.dim),
        _op("sum", aten.sum.dim_IntList),
        _op("var", aten.var.correction),
        _op("amax", aten.amax.default),
        _op("max", aten.max.dim),
        _op("softmax", aten._softmax.default, aten.softmax.int, half_to_float=False),
        _op("softmax_to_float", aten._softmax.default, compute=_softmax_to_float, half_to_float=True),
        # dtype, copies, views
        _op("cast", aten._to_copy.default, prims.convert_element_type.default),
        _op("clone", aten.clone.default),
        _op("alias", aten.alias.default),
        _op("detach", aten.detach.default),
        _op("lift_fresh_copy", aten.lift_fresh_copy.default),
        _op("view", aten.view.default, aten._unsafe_view.default, aten.reshape.default),
        _op("unsafe_view", aten._unsafe_view.default),
        _op("expand", aten.expand.default),
        _op("permute", aten.permute.default),
        _op("transpose", aten.transpose.int),
        _op("t", aten.t.default),
        _op("unsqueeze", aten.unsqueeze.default),
        _op("squeeze", aten.squeeze.dim),
        _op("slice", aten.slice.Tensor),
        _op("select", aten.select.int),
        _op("split", aten.split.Tensor),
        _op("split_with_sizes", aten.split_with_sizes.default),
        _op("unbind", aten.unbind.int),
        _op("cat", aten.cat.default),
        _op("stack", aten.stack.default),
        _op("item", operator.getitem),
        # contractions
        _op("mm", aten.mm.default),
        _op("bmm", aten.bmm.default),
        _op("matmul", aten.matmul.default),
        _op("addmm", aten.addmm.default),
        _op("baddbmm", aten.baddbmm.default),
        # norms
        _op("native_layer_norm", aten.native_layer_norm.default),
        _op("layer_norm", aten.layer_norm.default),
        _op("fused_rms_norm", aten._fused_rms_norm.default),
        _op("aten_rms_norm", aten.rms_norm.default),
        # choice and gather
        _op("where", aten.where.self, compute=torch.where),
        _op("masked_fill", aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        _op("embedding", aten.embedding.default),
        _op("index_copy", aten.index_copy.default),
        _op("index_put", aten.index_put.default),
        _op("copy_", aten.copy_.default),
        # random
        _op("dropout", aten.dropout.default),
        _op("native_dropout", aten.native_dropout.default),
        # collective
        _op("all_reduce", torch.ops._c10d_functional.all_reduce.default),
    )
}

SEMANTIC: dict[str, Op] = {name: Op(name, (op.overload,)) for name, op in REGISTRY.items()}

# Arguments that number a dimension; they are compared modulo the rank of the tensor that they index.
DIMENSION_ARGUMENTS = frozenset({"dim", "dims", "dim0", "dim1"})
