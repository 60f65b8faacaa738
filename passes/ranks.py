"""Attention over three dimensions, or over more than four, as attention over four: what lift and ATen's kernels know.

scaled_dot_product_attention(q [N, S, D], …)          -> of q [N, 1, S, D], without the head again
scaled_dot_product_attention(q [A, B, H, S, D], …)    -> of q [A·B, H, S, D], with A and B told apart again
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dsi.ir.context import Context
from dsi.ir.source import source_line
from dsi.patterns.strides import memory_order, same_strides
from torch import fx

from .composites import inserted

RULE = "lift.attention_rank"


def attention_of_four_dimensions(gm: fx.GraphModule, context: Context) -> None:
    """Write, in Dynamo's graph, attention of other ranks as views around attention of rank 4; what is not understood is left to lift."""
    for node in list(gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)):
        lead = _leading(node)
        if lead is not None and context.fuel.take(f"{RULE}: {node.name} at {source_line(node) or 'an unknown line'}"):
            _rewrite(node, lead)
            context.report.hits[RULE] += 1


def _rewrite(node: fx.Node, lead: tuple[int, ...]) -> None:
    """What is behind `node` may rely on its strides, which torch chooses by the rank."""
    result = inserted(node, RULE, partial(_of_four, lead), node.args, node.kwargs)
    order = memory_order(_value(node))
    assert order is not None  # or the call would have stayed
    if not same_strides(_value(result), _value(node)):
        result = inserted(node, RULE, partial(_laid_out, order), (result,), {})
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _laid_out(order: list[int], x: Any) -> Any:
    return x.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _leading(node: fx.Node) -> tuple[int, ...] | None:
    """The sizes that become one: of the dimensions before the heads, () where there are no heads; None where the call stays."""
    if len(node.args) < 3:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    values = [_value(node.args[n]) for n in range(3)]
    if not all(isinstance(v, torch.Tensor) for v in values) or memory_order(_value(node)) is None:
        return None
    rank = values[0].dim()
    if rank < 3 or rank == 4 or any(v.dim() != rank for v in values) or not (mask is None or _mask_fits(mask, rank)):
        return None
    if rank == 3:
        # The one dimension is a batch here, not heads: nothing of it is repeated.
        return None if node.kwargs.get("enable_gqa") or any(v.shape[0] != values[0].shape[0] for v in values) else ()
    leads = [tuple(v.shape[: rank - 3]) for v in values]
    return leads[0] if all(isinstance(n, int) for lead in leads for n in lead) and len(set(leads)) == 1 else None


def _mask_fits(mask: Any, rank: int) -> bool:
    """Whether a mask is one for all of what becomes one dimension, or of rank 3 beside tensors without heads."""
    value = _value(mask)
    return isinstance(value, torch.Tensor) and (value.dim() == 2 or (rank == 3 and value.dim() == 3))


def _value(x: Any) -> Any:
    return x.meta.get("example_value") if isinstance(x, fx.Node) else x


def _of_four(lead: tuple[int, ...], q: Any, k: Any, v: Any, attn_mask: Any = None, *more: Any, **kwargs: Any) -> Any:
    if lead:
        q, k, v = (x.flatten(0, len(lead) - 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask, *more, **kwargs).unflatten(0, lead)
    if attn_mask is not None and attn_mask.node.meta["example_value"].dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask, *more, **kwargs).squeeze(1)
