"""The semantic operators: what a transformer computes, one node each.

Every operator is a plain torch function (its *reference*, which is also its definition), a *fake* that states shape, dtype and strides
without computing, and a schema registered as `torch.ops.dsi.<name>`. Attributes carry whatever differs between models (where a cast
happens, which GELU, the softmax scale), so that no kernel ever has to guess.

Conventions shared by all operators:

* they are functional: a result never aliases an argument (`kv_write_`, which writes in place, exists only after lowering);
* results are contiguous unless the docstring says otherwise;
* B is batch, S query length, L key length, H query heads, HKV key/value heads, D head size, K and N the inner and outer size of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import DsiError

_LIBRARY = torch.library.Library("dsi", "DEF")


@dataclass(frozen=True)
class SemanticOp:
    """One registered operator: its overload, its reference and its fake, with one schema for all three."""

    name: str
    overload: torch._ops.OpOverload
    reference: Callable[..., Tensor | None]
    fake: Callable[..., Tensor | None]


REGISTRY: dict[str, SemanticOp] = {}


def define(schema: str, reference: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Registers `torch.ops.dsi.<name>`, the name being that of `schema`, and returns its overload."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    # `Library.impl` rather than `custom_op`: half the host time a call.
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsi::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.dsi, name).default
    REGISTRY[name] = SemanticOp(name, overload, reference, fake)
    return overload


def is_semantic(target: object) -> bool:
    """Whether an FX node's target is a semantic operator."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "dsi"


# --------------------------------------------------------------------------------------------------------------------- linear


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kn: bool = False) -> Tensor:
    """x [..., K] times a weight stored [N, K] (`kn=False`, torch's Linear) or [K, N] (`kn=True`, Conv1D), plus bias [N] -> [..., N]."""
    return F.linear(x, weight.t() if kn else weight, bias)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kn: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if kn else 0]))


linear = define("linear(Tensor x, Tensor weight, Tensor? bias=None, *, bool kn=False) -> Tensor", linear_reference, _linear_fake)


def embedding_reference(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of table [V, E] picked by integer ids [...] -> [..., E]."""
    return F.embedding(ids, table)


embedding = define(
    "embedding(Tensor table, Tensor ids) -> Tensor",
    embedding_reference,
    lambda table, ids: table.new_empty((*ids.shape, table.shape[1])),
)

# ---------------------------------------------------------------------------------------------------------------------- norms


EPS_PLACES = ("under", "beside", "least")


def root_of(mean_square: Tensor, eps: float, place: str) -> Tensor:
    """What a norm divides by, of the mean of squares m: sqrt(m + eps) ("under"), sqrt(m) + eps ("beside"), max(sqrt(m), eps) ("least")."""
    if place == "under":
        return torch.sqrt(mean_square + eps)
    if place not in EPS_PLACES:
        raise DsiError(f"an epsilon is not {place!r} a root (known: {', '.join(EPS_PLACES)})")
    return torch.sqrt(mean_square) + eps if place == "beside" else torch.sqrt(mean_square).clamp(min=eps)


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, place: str = "under") -> Tensor:
    """Layer normalisation over the last dimension; statistics in fp32, result in x's dtype. `place` of eps as in `root_of`."""
    if place == "under":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred / root_of(centred.square().mean(-1, keepdim=True), eps, place)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype).contiguous()


layer_norm = define(
    'layer_norm(Tensor x, Tensor? weight, Tensor? bias, *, float eps, str place="under") -> Tensor',
    layer_norm_reference,
    lambda x, weight, bias, *, eps, place="under": x.new_empty(x.shape),
)

RMS_CASTS = ("none", "before", "after")


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, *, eps: float, offset: float = 0.0, cast: str = "none", place: str = "under"
) -> Tensor:
    """x / sqrt(mean(x², last) + eps) * (offset + weight).

    `cast` says where rounding to x's dtype happens: "before" normalises in fp32, rounds, then multiplies by the weight in x's dtype
    (Llama); "after" multiplies in fp32 and rounds once (Gemma, with offset 1); "none" computes in x's dtype throughout. `place` of eps as
    in `root_of`.
    """
    wide = x if cast == "none" else x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    y = wide * torch.rsqrt(mean_square + eps) if place == "under" else wide / root_of(mean_square, eps, place)
    if cast == "before":
        y = y.to(x.dtype)
    if weight is not None:
        scale = weight.float() if cast == "after" else weight
        y = y * (scale + offset if offset else scale)
    return y.to(x.dtype).contiguous()


rms_norm = define(
    'rms_norm(Tensor x, Tensor? weight, *, float eps, float offset=0.0, str cast="none", str place="under") -> Tensor',
    rms_norm_reference,
    lambda x, weight, *, eps, offset=0.0, cast="none", place="under": x.new_empty(x.shape),
)

# ---------------------------------------------------------------------------------------------------------------- activations

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu_squared": lambda x: F.relu(x).square(),
}


def _activation(kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in ACTIVATIONS:
        raise DsiError(f"{kind!r} is no activation that dsi has (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[kind]


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """An elementwise activation named in `ACTIVATIONS`, any shape."""
    return _activation(kind)(x).contiguous()


activation = define("activation(Tensor x, str kind) -> Tensor", activation_reference, lambda x, kind: x.new_empty(x.shape))


def gated_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up, both of one shape (SwiGLU, GeGLU)."""
    return (_activation(kind)(gate) * up).contiguous()


gated = define("gated(Tensor gate, Tensor up, str kind) -> Tensor", gated_reference, lambda gate, up, kind: gate.new_empty(gate.shape))

# ----------------------------------------------------------------------------------------------------------------------- rope

ROPE_STYLES = ("half", "interleaved")


def rotate(x: Tensor, style: str) -> Tensor:
    """The quarter turn of rotary embedding on the last dimension: half-split (Llama, NeoX) or interleaved pairs (GPT-J)."""
    if style == "half":
        lower, upper = x.chunk(2, -1)
        return torch.cat([-upper, lower], -1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([-odd, even], -1).flatten(-2)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, style: str) -> Tensor:
    """Rotary embedding of the first R entries of x [..., D], where cos and sin are [..., R] and broadcast; entries R..D pass through."""
    r = cos.shape[-1]
    head, tail = x[..., :r], x[..., r:]
    turned = head * cos + rotate(head, style) * sin
    return torch.cat([turned, tail], -1).contiguous() if tail.shape[-1] else turned.contiguous()


rope = define(
    "rope(Tensor x, Tensor cos, Tensor sin, *, str style) -> Tensor",
    rope_reference,
    lambda x, cos, sin, *, style: x.new_empty(x.shape),
)

# ------------------------------------------------------------------------------------------------------------------ attention


def visible(s: int, length: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """The bool mask [S, L] that `causal` and `window` stand for, None where every key is visible. Query i sits at key position i."""
    if not causal and not window:
        return None
    i = torch.arange(s, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    seen = torch.ones(s, length, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (j <= i)
    if window:
        seen = seen & (j > i - window)
    return seen


def attention_weights(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None = None, *, causal: bool, window: int, softcap: float
) -> Tensor:
    """The weights [B, H, S, L] that `attention` gives to the keys, from scaled scores of that shape. A row that sees no key is 0."""
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    seen = visible(scores.shape[2], scores.shape[3], causal, window, scores.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(total.dtype)[:, None, None] - top.masked_fill(top == float("-inf"), 0.0))
    return weights / total.masked_fill(total == 0, 1.0)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(cap(q kᵀ · scale) + bias + mask) v, softmax in fp32.

    q [B, H, S, D], k [B, HKV, L, D], v [B, HKV, L, DV], H a multiple of HKV (head h reads key head h // (H / HKV)) -> [B, H, S, DV].
    `mask` (bool, True = visible; or float, added) and `bias` (float, added; ALiBi) broadcast to [B, H, S, L]. `causal` and `window` place
    query i at key position i; `window` w hides keys at i - w and before. `softcap` c maps scores to c·tanh(scores / c). `sinks` (float [H])
    are scores of one more key a head, whose value is 0: it takes part in the softmax alone. A row that sees no key is 0.
    """
    b, h, s, d = q.shape
    hkv = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    qg = q.reshape(b, hkv, h // hkv, s, d).to(wide)
    scores = (qg @ k[:, :, None].to(wide).transpose(-1, -2)).reshape(b, h, s, k.shape[2]) * scale
    weights = attention_weights(scores, mask, bias, sinks, causal=causal, window=window, softcap=softcap)
    weights = weights.reshape(b, hkv, h // hkv, s, k.shape[2])
    return (weights @ v[:, :, None].to(wide)).reshape(b, h, s, v.shape[3]).to(q.dtype).contiguous()


def _attention_fake(q, k, v, mask=None, bias=None, sinks=None, *, scale, causal=False, window=0, softcap=0.0) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? bias=None, Tensor? sinks=None, *, float scale, bool causal=False, "
    "int window=0, float softcap=0.0) -> Tensor",
    attention_reference,
    _attention_fake,
)


def kv_write_reference(cache: Tensor, pos: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """A copy of `cache` whose entries pos[i] (int64 [S]) along `dim` are replaced by entry i of `new`. Has the strides of `cache`."""
    return torch.index_copy(cache, dim, pos, new)


kv_write = define(
    "kv_write(Tensor cache, Tensor pos, Tensor new, *, int dim) -> Tensor",
    kv_write_reference,
    lambda cache, pos, new, *, dim: torch.empty_like(cache),
)


def kv_write_in_place_reference(cache: Tensor, pos: Tensor, new: Tensor, *, dim: int) -> None:
    """`kv_write` into `cache` itself. Made by lowering only, where no later reader needs the old values."""
    cache.index_copy_(dim, pos, new)


kv_write_ = define(
    "kv_write_(Tensor(a!) cache, Tensor pos, Tensor new, *, int dim) -> ()",
    kv_write_in_place_reference,
    lambda cache, pos, new, *, dim: None,
)

# ----------------------------------------------------------------------------------------------------------------- collective


def all_reduce_reference(x: Tensor, group: str) -> Tensor:
    """The sum of x over the ranks of the process group named `group`. Regions never cross it."""
    from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

    name: Any = group  # torch 2.13 has a type of its own for it
    return functional_all_reduce(x, "sum", name).clone(memory_format=torch.contiguous_format)


all_reduce = define("all_reduce(Tensor x, str group) -> Tensor", all_reduce_reference, lambda x, group: x.new_empty(x.shape))
