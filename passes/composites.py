"""Composites: torch's own fused transformer functions, taken apart into the functions that lift knows.

    torch._transformer_encoder_layer_fwd(x, …)      -> layer_norm, linear, scaled_dot_product_attention, add, …
    torch._native_multi_head_attention(x, x, x, …)  -> linear, scaled_dot_product_attention, linear
    F.multi_head_attention_forward(q, k, v, …)      -> the same, with the further keys that it may have

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call them; no graph below Dynamo's shows what is inside, or not on every device.
For the first two a mask hides where it is not zero, whatever its dtype, as in torch's kernels; the third adds a float mask.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.context import Context
from dsi.ir.errors import Refusal
from dsi.ir.source import source_line
from torch import fx

ENCODER_LAYER = "lift.encoder_layer"
MULTI_HEAD_ATTENTION = "lift.multi_head_attention"


def take_apart(gm: fx.GraphModule, context: Context) -> None:
    """Replace every composite of `gm` (Dynamo's graph, values in meta["example_value"]) in place; what is not understood is left."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _COMPOSITES:
            continue
        name, parameters, apart = _COMPOSITES[node.target]
        given = _arguments(node, parameters())
        reason = "its arguments do not fit its signature" if given is None else _why_not(node, given)
        if reason is not None:
            refusal = Refusal(f"{node.target.__name__} not taken apart: {reason}", node.name, source_line(node), name)
            context.report.unfused.append(refusal)
            context.report.misses.setdefault(name, refusal)
        elif context.fuel.take(f"{name}: {node.name} at {source_line(node) or 'an unknown line'}"):
            _replace(node, given or {}, apart, name)
            context.report.hits[name] += 1


_NOTHING = object()


def _schema_of(name: str) -> Callable[[], list[tuple[str, Any]]]:
    """The parameters of an ATen operator, and their defaults."""
    return lambda: [
        (a.name, a.default_value if a.has_default_value() else _NOTHING) for a in getattr(torch.ops.aten, name).default._schema.arguments
    ]


def _signature_of(function: Callable[..., Any]) -> Callable[[], list[tuple[str, Any]]]:
    """The parameters of a Python function, and their defaults."""
    empty = inspect.Parameter.empty
    return lambda: [(p.name, _NOTHING if p.default is empty else p.default) for p in inspect.signature(function).parameters.values()]


def _arguments(node: fx.Node, parameters: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """The call's arguments by name, defaults filled in; None if they do not fit."""
    names = [name for name, _ in parameters]
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    given = dict(parameters) | dict(zip(names, node.args, strict=False)) | node.kwargs
    return None if any(value is _NOTHING for value in given.values()) else given


def _why_not(node: fx.Node, given: dict[str, Any]) -> str | None:
    """Why the call cannot be taken apart; None if it can."""
    x = given.get("src", given.get("query"))
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() not in ((2, 3) if "add_zero_attn" in given else (3,)):
        return "its input is no plain tensor of three dimensions"
    for name in ("embed_dim", "num_heads", "num_head", "embed_dim_to_check"):
        if name in given and not isinstance(given[name], int):
            return f"{name} is computed in the graph"
    if given.get("mask") is not None and given["mask_type"] not in (0, 1, 2):
        return f"its mask has the type {given['mask_type']}"
    if "query" not in given:
        return None
    if "in_proj_weight" not in given and (given["key"] is not given["query"] or given["value"] is not given["query"]):
        return "query, key and value differ"
    for name in ("static_k", "static_v", "training"):
        if given.get(name) not in (None, False):
            return f"{name} is given"
    if given.get("add_zero_attn") not in (None, True, False) or any(size == 0 for size in given["key"].meta["example_value"].shape):
        return "its keys are none, or it depends on the graph which they are"
    if any(user.target is not operator.getitem for user in node.users):
        return "its two results are read as one"
    if not isinstance(given["need_weights"], bool) or any(user.args[1] != 0 and user.users for user in node.users):
        return "the attention weights are asked for"
    return None


def _attention(x: Any, heads: int, given: dict[str, Any]) -> Any:
    """Self-attention of x [B, S, E] with one weight for q, k and v [3·E, E], and the projection after it."""
    size = given["embed_dim"] // heads
    qkv = F.linear(x, given["qkv_weight"], given["qkv_bias"]).unflatten(-1, (3, heads, size))
    q, k, v = (qkv.select(2, i).transpose(1, 2) for i in range(3))
    keep = None
    if given["mask"] is not None:
        keep = given["mask"].to(torch.bool).logical_not()
        if given["mask_type"] == 1:  # [B, S], of keys
            keep = keep.unsqueeze(1).unsqueeze(1)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    return F.linear(attended.transpose(1, 2).flatten(-2), given["proj_weight"], given["proj_bias"])


def _forward(given: dict[str, Any]) -> Any:
    """F.multi_head_attention_forward of query [L, N, E], key and value [S, N, E], or without N, without weights among its results."""
    if given["batched"]:
        return _batched(given)
    padding = given["key_padding_mask"]
    more = {name: given[name].unsqueeze(1) for name in ("query", "key", "value")}
    return _batched({**given, **more, "key_padding_mask": None if padding is None else padding.unsqueeze(0)}).squeeze(1)


def _batched(given: dict[str, Any]) -> Any:
    heads = given["num_heads"]
    q, k, v = _projected(given)
    padding, mask, causal = given["key_padding_mask"], given["attn_mask"], bool(given["is_causal"])
    if causal and padding is None and not given["need_weights"]:
        mask = None  # it is only a hint of what is_causal says
    else:
        causal = False
    terms = []
    if padding is not None:
        terms.append(_added(padding, given, "key_padding_mask").unsqueeze(1).unsqueeze(1))
    if mask is not None:
        mask = _added(mask, given, "attn_mask")
        terms.append(mask.unflatten(0, (-1, heads)) if given["rank"] == 3 else mask)
    added = terms[0] + terms[1] if len(terms) == 2 else terms[0] if terms else None
    for of_keys, of_values in _further(given, k, v):
        k, v = torch.cat([k, of_keys], 2), torch.cat([v, of_values], 2)
        if added is not None:  # it hides none of them
            added = torch.cat([added, torch.zeros_like(added[..., :1])], -1)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=causal)
    return F.linear(attended.permute(2, 0, 1, 3).flatten(-2), given["out_proj_weight"], given["out_proj_bias"])


def _projected(given: dict[str, Any]) -> list[Any]:
    """q [N, H, L, D], k and v [N, H, S, D], by one linear where they are made of one input by one weight."""
    width, heads = given["embed_dim_to_check"], given["num_heads"]
    weight, bias, inputs = given["in_proj_weight"], given["in_proj_bias"], [given[name] for name in ("query", "key", "value")]

    def project(x: Any, first: int, count: int) -> list[Any]:
        part = slice(first * width, (first + count) * width)
        whole = count == 3
        if given["use_separate_proj_weight"]:
            own = given["qkv"[first] + "_proj_weight"]
        else:
            own = weight if whole else weight[part]
        y = F.linear(x, own, bias if whole or bias is None else bias[part])
        y = y.unflatten(-1, (count, heads, width // heads))  # [L, N, count, H, D]
        return [y.select(2, i).permute(1, 2, 0, 3) for i in range(count)]

    if given["use_separate_proj_weight"] or given["same"] == "none":
        return [project(x, i, 1)[0] for i, x in enumerate(inputs)]
    if given["same"] == "all":
        return project(inputs[0], 0, 3)
    return project(inputs[0], 0, 1) + project(inputs[1], 1, 2)


def _further(given: dict[str, Any], k: Any, v: Any) -> list[tuple[Any, Any]]:
    """Keys and values [N, H, 1, D] behind those of the sequence: one that is learned, and one of zeros."""
    further = []
    if given["bias_k"] is not None:
        size = given["embed_dim_to_check"] // given["num_heads"]
        learned = (given[name].view(1, given["num_heads"], 1, size) for name in ("bias_k", "bias_v"))
        further.append(tuple(x.expand_as(like[:, :, :1]) for x, like in zip(learned, (k, v), strict=True)))
    if given["add_zero_attn"]:
        further.append((torch.zeros_like(k[:, :, :1]), torch.zeros_like(v[:, :, :1])))
    return further


def _added(mask: Any, given: dict[str, Any], name: str) -> Any:
    """A mask as it is added to the scores: a bool one hides where it is True."""
    if not given[f"{name} is bool"]:
        return mask
    return torch.zeros_like(mask, dtype=given["dtype"]).masked_fill(mask, float("-inf"))


def _facts(given: dict[str, Any]) -> dict[str, Any]:
    """What `_forward` asks of the values themselves."""
    query, key, value = (given[n] for n in ("query", "key", "value"))
    facts: dict[str, Any] = {"dtype": query.meta["example_value"].dtype}
    facts["same"] = "all" if query is key is value else "key and value" if key is value else "none"
    for name in ("key_padding_mask", "attn_mask"):
        mask = given[name]
        facts[f"{name} is bool"] = mask is not None and mask.meta["example_value"].dtype == torch.bool
    facts["batched"] = query.meta["example_value"].dim() == 3
    facts["rank"] = 0 if given["attn_mask"] is None else given["attn_mask"].meta["example_value"].dim()
    return facts


def _multi_head_attention(given: dict[str, Any]) -> Any:
    return _attention(given["query"], given["num_head"], given)


def _encoder_layer(given: dict[str, Any]) -> Any:
    def norm(x: Any, number: int) -> Any:
        return F.layer_norm(x, (given["embed_dim"],), given[f"norm_weight_{number}"], given[f"norm_bias_{number}"], given["eps"])

    def feed_forward(x: Any) -> Any:
        inner = F.linear(x, given["ffn_weight_1"], given["ffn_bias_1"])
        return F.linear(F.gelu(inner) if given["use_gelu"] else F.relu(inner), given["ffn_weight_2"], given["ffn_bias_2"])

    x, heads = given["src"], given["num_heads"]
    if given["norm_first"]:
        x = x + _attention(norm(x, 1), heads, given)
        return x + feed_forward(norm(x, 2))
    x = norm(x + _attention(x, heads, given), 1)
    return norm(x + feed_forward(x), 2)


_COMPOSITES: dict[Any, tuple[str, Callable[[], list[tuple[str, Any]]], Callable[[dict[str, Any]], Any]]] = {
    torch._transformer_encoder_layer_fwd: (ENCODER_LAYER, _schema_of("_transformer_encoder_layer_fwd"), _encoder_layer),
    torch._native_multi_head_attention: (MULTI_HEAD_ATTENTION, _schema_of("_native_multi_head_attention"), _multi_head_attention),
    F.multi_head_attention_forward: (MULTI_HEAD_ATTENTION, _signature_of(F.multi_head_attention_forward), _forward),
}


def _mode_of(node: fx.Node) -> Any:
    """The fake mode that Dynamo traced `node` under, which need not be the one of its tracing context any more."""
    return next((mode for n in node.all_input_nodes if (mode := getattr(n.meta.get("example_value"), "fake_mode", None)) is not None), None)


def inserted(node: fx.Node, name: str, apart: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
    """The node of what `apart` computes of `args` and `kwargs`, recorded in front of `node` by the rule `name`."""
    graph = node.graph
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxy(read: fx.Node) -> Any:
        return fx.Proxy(read, tracer)

    args, kwargs = fx.node.map_arg((args, kwargs), proxy)
    before = node.prev
    with graph.inserting_before(node):
        result = apart(*args, **kwargs).node
    each = before.next
    while each is not node:
        reads, names = fx.node.map_arg((each.args, each.kwargs), lambda n: n.meta["example_value"])
        with torch.no_grad(), _mode_of(node) or contextlib.nullcontext():
            value = getattr(reads[0], str(each.target))(*reads[1:], **names) if each.op == "call_method" else each.target(*reads, **names)  # type: ignore[operator]
        each.meta |= {k: node.meta[k] for k in ("stack_trace", "source_fn_stack", "nn_module_stack") if k in node.meta}
        each.meta |= {"example_value": value, "dsi_provenance": (name, node.name)}
        each = each.next
    return result


def _replace(node: fx.Node, given: dict[str, Any], apart: Callable[[dict[str, Any]], Any], name: str) -> None:
    """Record `apart` in front of `node` and let it take the place of the result, or of the first of two."""
    graph = node.graph
    if apart is _forward:
        given = given | _facts(given)
    result = inserted(node, name, apart, (given,), {})
    if apart is not _encoder_layer:  # a result and None
        for item in list(node.users):
            item.replace_all_uses_with(result)  # of the other, nothing is used
            graph.erase_node(item)
    else:
        node.replace_all_uses_with(result)
    if not node.users:
        graph.erase_node(node)
