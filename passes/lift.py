"""Lift: torch functions that AOTAutograd would take apart become semantic operators, by the identity of the function.

    torch.nn.functional.linear(x, w, b)                      -> dsi::linear(x, w, b)
    scaled_dot_product_attention(q, repeat(k), repeat(v), …) -> dsi::attention(q, k, v, …)

What scaled_dot_product_attention turns into in ATen depends on the device and on the kernel that torch picks, so a graph recognised after
that would differ between a test on a CPU and production on a GPU. `repeat` is the chain by which models copy key/value heads before
attention (unsqueeze or `[:, :, None]`, expand, reshape): it is absorbed, and the copy of the whole cache with it.

A lifted operator has no gradient: the guard has made sure before that none is wanted. Whatever is not exactly understood is left, and
reported.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from dsi.ir import ops
from dsi.ir.context import Context
from dsi.ir.errors import Refusal, Refused, refuse
from dsi.ir.source import source_line
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .autocast import idle_autocast_gone
from .composites import take_apart
from .dropout import idle_dropout_gone
from .ranks import attention_of_four_dimensions
from .specialise import specialise
from .writes import may_write

LINEAR = "lift.linear"
ATTENTION = "lift.attention"

# Function -> the ATen overload whose schema names its arguments.
_LINEAR_FUNCTIONS = {F.linear, torch.ops.aten.linear.default}
_ATTENTION_FUNCTIONS = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def lift(gm: fx.GraphModule, context: Context) -> None:
    """Replace every liftable call of `gm` (Dynamo's graph, values in meta["example_value"]) in place."""
    specialise(gm)
    idle_autocast_gone(gm)
    idle_dropout_gone(gm)
    take_apart(gm, context)
    attention_of_four_dimensions(gm, context)
    missed: dict[str, Refusal] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _LINEAR_FUNCTIONS:
            name, build = LINEAR, _linear
        elif node.target in _ATTENTION_FUNCTIONS:
            name, build = ATTENTION, _attention
        else:
            continue
        try:
            target, args, kwargs, dead = build(node)
            restride = _restride(node)
        except Refused as refused:
            missed.setdefault(name, refused.refusal)
            context.report.unfused.append(refused.refusal)
            continue
        if not context.fuel.take(
            f"{name}: {node.name} at {source_line(node) or 'an unknown line'} (passes/lift.py:{build.__code__.co_firstlineno})"
        ):
            break
        _replace(node, target, args, kwargs, restride, name)
        _erase_dead(dead)
        context.report.hits[name] += 1
    for name, refusal in missed.items():
        if not context.report.hits[name]:
            context.report.misses[name] = refusal
    gm.graph.lint()
    gm.recompile()


Built = tuple[Any, tuple, dict[str, Any], list[fx.Node]]


def _linear(node: fx.Node) -> Built:
    """dsi::linear's target, arguments and the nodes that may have become dead."""
    given = _arguments(node, torch.ops.aten.linear.default)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    _same_float(node, x, weight, *(() if bias is None else (bias,)))
    if _value(weight).dim() != 2:
        raise _refuse(node, f"the weight has rank {_value(weight).dim()}, a linear's has 2")
    if bias is not None and _value(bias).dim() != 1:
        raise _refuse(node, f"the bias has rank {_value(bias).dim()}, a linear's has 1")
    if _value(x).dim() == 0:
        raise _refuse(node, "the input is a scalar")
    return ops.linear, (x, weight, bias), {}, []


def _attention(node: fx.Node) -> Built:
    """dsi::attention's target, arguments and the nodes that may have become dead."""
    given = _arguments(node, torch.ops.aten.scaled_dot_product_attention.default)
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    for key in ("dropout_p", "is_causal", "enable_gqa"):
        if isinstance(given[key], fx.Node):
            raise _refuse(node, f"{key} is computed in the graph")
    if given["dropout_p"]:
        raise _refuse(node, f"dropout_p is {given['dropout_p']}")
    if given["is_causal"] and mask is not None:
        raise _refuse(node, "it has both a mask and is_causal")
    _same_float(node, q, k, v)
    if any(_value(t).dim() != 4 for t in (q, k, v)):
        raise _refuse(node, "query, key and value are not all of rank 4")
    b, h, s, d = _value(q).shape
    length = _value(k).shape[2]
    if not (_same(_value(k).shape[0], b) and _same(_value(v).shape[0], b)):
        raise _refuse(node, "query, key and value differ in batch")
    if not (_same(_value(k).shape[3], d) and _demanded(_value(v).shape[2], length)):
        raise _refuse(node, "the shapes of query, key and value do not fit each other")
    if _same(length, 0):
        raise _refuse(node, "there are no keys")
    if not _same(_value(v).shape[1], _value(k).shape[1]):
        raise _refuse(node, "key and value differ in heads")

    dead: list[fx.Node] = []
    narrow_k, narrow_v = _before_repeat(k, node), _before_repeat(v, node)
    if narrow_k is not None and narrow_v is not None and _same(_value(narrow_k).shape[1], _value(narrow_v).shape[1]):
        dead, k, v = [k, v], narrow_k, narrow_v
    heads_kv = _value(k).shape[1]
    if not isinstance(h, int) or not isinstance(heads_kv, int):
        if not _same(h, heads_kv):
            raise _refuse(node, "the number of heads is symbolic, and not surely that of keys and values")
    elif heads_kv == 0 or h % heads_kv:
        raise _refuse(node, f"{h} query heads are no multiple of {heads_kv} key/value heads")
    # One key/value head is broadcast to all query heads without being asked to.
    if not _same(h, heads_kv) and heads_kv != 1 and not dead and not given["enable_gqa"]:
        raise _refuse(node, f"{h} query heads and {heads_kv} key/value heads without enable_gqa")
    scale = given["scale"]
    if scale is None:
        if not isinstance(d, int) or d == 0:
            raise _refuse(node, "the head size, and so the scale, is symbolic or 0")
        scale = d**-0.5
    if not isinstance(scale, (int, float)):
        raise _refuse(node, "the scale is computed in the graph")
    if mask is not None:
        _check_mask(node, mask, _value(q), (b, h, s, length))
    return ops.attention, (q, k, v, mask), {"scale": float(scale), "causal": bool(given["is_causal"])}, dead


def _check_mask(node: fx.Node, mask: fx.Node, q: torch.Tensor, scores: tuple) -> None:
    """Refuse a mask that does not broadcast to the scores [B, H, S, L] as torch and dsi::attention both understand it."""
    value = _value(mask)
    if value.dtype not in (torch.bool, q.dtype):
        raise _refuse(node, f"the mask has dtype {value.dtype}, the query {q.dtype}")
    if not 2 <= value.dim() <= 4:
        raise _refuse(node, f"the mask has rank {value.dim()}")
    if value.device != q.device:
        raise _refuse(node, f"the mask is on {value.device}, the query on {q.device}")
    for size, full in zip(reversed(value.shape), reversed(scores), strict=False):
        if not (_same(size, 1) or _demanded(size, full)):
            raise _refuse(node, f"the mask's shape {tuple(value.shape)} does not surely broadcast to the scores' {tuple(scores)}")


# -------------------------------------------------------------------------------------------------------------- the repeat chain


def _before_repeat(node: Any, reader: fx.Node) -> fx.Node | None:
    """The [B, HKV, L, D] value that `node` [B, HKV * n, L, D] repeats n times per head, if the chain is exactly that; else None.

    `reader` will read the value in place of the copy, so nothing may write to it in between.
    """
    if not _is_call(node, ("reshape", "flatten", "view"), (torch.reshape, torch.flatten)):
        return None
    expand = node.args[0]
    if not _is_call(expand, ("expand",), ()):
        return None
    spread = expand.args[0]
    if not _is_call(spread, ("unsqueeze",), (torch.unsqueeze, operator.getitem)):
        return None
    source = spread.args[0]
    if not isinstance(source, fx.Node) or any(may_write(between) for between in _between(node, reader)):
        return None
    values = [v for n in (source, spread, expand, node) if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    if len(values) != 4:
        return None
    before, middle, wide, after = values
    if before.dim() != 4 or middle.dim() != 5 or wide.dim() != 5 or after.dim() != 4:
        return None
    b, g, length, d = before.shape
    # The new axis must be the one after the heads: `unsqueeze(1)` repeats whole groups of heads instead, which is another order.
    if not _spreads_after_heads(spread):
        return None
    n = wide.shape[2]
    if not isinstance(n, int) or not isinstance(g, int):
        return None
    expected = ((b, g, 1, length, d), (b, g, n, length, d), (b, g * n, length, d))
    if not all(_same_shape(v.shape, e) for v, e in zip((middle, wide, after), expected, strict=True)):
        return None
    return source


def _spreads_after_heads(spread: fx.Node) -> bool:
    """Whether `spread` of a rank-4 value puts its new axis at position 2 and changes nothing else."""
    if spread.target is operator.getitem:
        index = spread.args[1]
        full = slice(None, None, None)
        if not isinstance(index, tuple) or any(isinstance(i, fx.Node) for i in index):
            return False
        return index[:3] == (full, full, None) and all(i == full or i is Ellipsis for i in index[3:])
    (dim,) = (*spread.args[1:], *spread.kwargs.values())
    return dim in (2, -3)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _is_call(node: Any, methods: tuple[str, ...], functions: tuple[Any, ...]) -> TypeGuard[fx.Node]:
    if not isinstance(node, fx.Node):
        return False
    known = (node.op == "call_method" and node.target in methods) or (node.op == "call_function" and node.target in functions)
    return known and bool(node.args)


def _erase_dead(candidates: list[fx.Node]) -> None:
    """Erase the repeat chains above `candidates` as far as nothing else uses them. Their nodes are views and copies: pure."""
    for last in dict.fromkeys(candidates):
        node: Any = last
        for _ in range(3):  # reshape, expand, unsqueeze
            if node.users:
                break
            above = node.args[0]
            node.graph.erase_node(node)
            node = above


# ------------------------------------------------------------------------------------------------------------------- the replacement


def _restride(node: fx.Node) -> tuple[int, ...] | None:
    """The order of dimensions in memory of `node`'s value, outermost first; None where contiguity is all that its users can see.

    Semantic operators return contiguous values; torch's attention kernels return [B, S, H, D] seen as [B, H, S, D]. A user's `.view` or a
    returned stride may rely on that, so it is restored unless every user makes the value contiguous before anything else looks.
    """
    value = _value(node)
    identity = tuple(range(value.dim()))
    if _contiguous_in(value, identity) or all(_forgets_strides(user) for user in node.users):
        return None
    for order in itertools.permutations(identity):
        if _contiguous_in(value, order):
            return order
    raise _refuse(node, f"its result has the strides {tuple(value.stride())}, which no permutation of a contiguous value has")


def _contiguous_in(value: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether `value.permute(order)` is surely contiguous. Asks no question that would add a guard on a symbolic size."""
    expected: Any = 1
    for i in reversed(order):
        size = value.shape[i]
        if not _same(size, 1) and not _same(value.stride(i), expected):
            return False
        expected = expected * size
    return True


def _forgets_strides(user: fx.Node) -> bool:
    """Whether `user` is `.contiguous()`, or a transposition or a reshape that changes nothing, of which all users are so."""
    if user.op != "call_method":
        return False
    if user.target == "contiguous":
        return len(user.args) == 1 and not user.kwargs
    passes_on = user.target in ("transpose", "permute") or (
        user.target in ("reshape", "view") and _same_shape(_value(user).shape, _value(user.args[0]).shape)
    )
    return passes_on and bool(user.users) and all(_forgets_strides(u) for u in user.users)


def _replace(node: fx.Node, target: Any, args: tuple, kwargs: dict[str, Any], order: tuple[int, ...] | None, rule: str) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
        made = [new]
        if order is not None:
            inverse = tuple(order.index(i) for i in range(len(order)))
            made.append(graph.call_method("permute", (new, order)))
            made.append(graph.call_method("contiguous", (made[-1],)))
            made.append(graph.call_method("permute", (made[-1], inverse)))
    value = _value(node)
    values = [value]
    if order is not None:
        contiguous = value.new_empty(value.shape)
        values = [contiguous, contiguous.permute(order), value.permute(order), value]
    for each, its_value in zip(made, values, strict=True):
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack"):
            if key in node.meta:
                each.meta[key] = node.meta[key]
        each.meta["example_value"] = its_value
        each.meta["dsi_provenance"] = (rule, node.name)
    node.replace_all_uses_with(made[-1])
    graph.erase_node(node)


# -------------------------------------------------------------------------------------------------------------------------- helpers


def _arguments(node: fx.Node, overload: torch._ops.OpOverload) -> dict[str, Any]:
    """`node`'s arguments by the names of the overload's schema, defaults filled in."""
    schema = overload._schema.arguments
    positional = [a.name for a in schema if not a.kwarg_only]
    if len(node.args) > len(positional) or not set(node.kwargs) <= {a.name for a in schema}:
        raise _refuse(node, "its arguments do not fit torch's schema")
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given.update(zip(positional, node.args, strict=False))
    given.update(node.kwargs)
    missing = [a.name for a in schema if a.name not in given]
    if missing:
        raise _refuse(node, f"it is called without {', '.join(missing)}")
    return given


def _value(node: Any) -> torch.Tensor:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise _refuse(node, "it is no tensor whose shape is known")
    return value


def _same_float(node: fx.Node, *tensors: fx.Node) -> None:
    values = [_value(t) for t in tensors]
    if values[0].dtype not in _FLOATS or len({v.dtype for v in values}) != 1:
        raise _refuse(node, f"its operands have the dtypes {', '.join(str(v.dtype) for v in values)}; one floating dtype is understood")
    if len({v.device for v in values}) != 1:
        raise _refuse(node, "its operands are on different devices")


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _demanded(a: Any, b: Any) -> bool:
    """Whether two sizes are equal that torch demands to be: symbols of their own (keys and values of a cache that grows) become one by a
    guard, which no call fails that eager would not."""
    return _same(a, b) or (isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and bool(a == b))


def _same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _refuse(node: Any, reason: str) -> Refused:
    if not isinstance(node, fx.Node):
        return refuse(f"not lifted: {reason}", rule="lift")
    return refuse(
        f"{getattr(node.target, '__name__', node.target)} not lifted: {reason}", node=node.name, where=source_line(node), rule="lift"
    )
