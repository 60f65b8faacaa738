"""From regions back to a flat ATen graph, for executors that have no kernel for a region.

A semantic operator expands to its reference unless the table below names a form that runs better and means exactly the same. Every node of
the expanded graph carries its `Provenance`; a node without one is a bug and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from dsi.ir import ops
from dsi.ir.custom import custom_of
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import Region
from torch import Tensor, fx

from . import inductor_api
from .cpu_int8 import linear_int8


class Provenance(NamedTuple):
    """Where a node of the expanded graph came from: the region's name ("" outside regions) and the name of the member (or outer node)."""

    region: str
    member: str


# ------------------------------------------------------------------------------------------------------------ the expansion table


def write_in_place(cache: Tensor, pos: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """`kv_write` into `cache` itself; returns it."""
    index: list[Tensor | None] = [None] * (dim % cache.dim()) + [pos]
    return torch.ops.aten.index_put_(cache, index, new.to(cache.dtype))


def _grouped_attention(
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
    """`dsi.attention` in plain arithmetic: the heads that share a key head are folded into its rows, so that k and v are never repeated."""
    b, h, s, d = q.shape
    hkv, length = k.shape[1], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    folded = q.reshape(b, hkv, h // hkv * s, d).to(wide)
    scores = (folded @ k.to(wide).transpose(-1, -2)).reshape(b, h, s, length) * scale
    weights = ops.attention_weights(scores, mask, bias, sinks, causal=causal, window=window, softcap=softcap)
    weights = weights.reshape(b, hkv, h // hkv * s, length)
    return (weights @ v.to(wide)).reshape(b, h, s, v.shape[3]).to(q.dtype).contiguous()


def attention(
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
    """`dsi.attention` through torch's fused kernel where that kernel takes it and means the same, else `_grouped_attention`."""
    added = _one_mask(q, k, mask, bias, causal, window)
    fused = (
        not softcap
        and sinks is None
        and added is not NotImplemented
        and q.shape[3] == k.shape[3] == v.shape[3]
        and q.dtype == k.dtype == v.dtype
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )
    if not fused:
        return _grouped_attention(q, k, v, mask, bias, sinks, scale=scale, causal=causal, window=window, softcap=softcap)
    alone = causal and added is None
    if added is None and not causal:
        # Without a mask torch's kernel for CPUs gives 0 for a query of NaN, as if there was nothing wrong; with one it is as fast.
        added = q.new_zeros(()).expand(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=added, is_causal=alone, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    ).contiguous()


def _one_mask(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool, window: int) -> Any:
    """Mask, bias, causality and window as the one mask that `scaled_dot_product_attention` takes, None for none of them or causality alone.

    NotImplemented where one mask cannot mean exactly the same: two float terms add up to an infinity that neither is, and a float term
    wider than the scores' dtype would be rounded.
    """
    additive = [term for term in (mask, bias) if term is not None and term.dtype != torch.bool]
    if len(additive) > 1 or any(torch.promote_types(term.dtype, q.dtype) != q.dtype for term in additive):
        return NotImplemented
    boolean = mask if mask is not None and mask.dtype == torch.bool else None
    if window or (causal and (mask is not None or bias is not None)):
        seen = ops.visible(q.shape[2], k.shape[2], causal, window, q.device)
        boolean = boolean & seen if boolean is not None and seen is not None else seen
    if not additive:
        return None if boolean is None else _four_dimensional(boolean)
    total = additive[0].to(q.dtype)
    if boolean is not None:
        total = torch.where(boolean, total, float("-inf"))
    return _four_dimensional(total)


def _four_dimensional(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())]


CPU_EXPANSIONS: Mapping[str, Callable[..., Any]] = {"attention": attention, "linear_int8": linear_int8}


def expansion(target: Any, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """What computes an FX `target`: the table's form of a semantic operator, else its reference, else the target itself."""
    if not ops.is_semantic(target):
        return target
    name = target._schema.name.split("::")[1]
    return table.get(name) or ops.REGISTRY[name].reference


# -------------------------------------------------------------------------------------------------------------------- expanding


def in_place_writes(region: Region) -> dict[fx.Node, int]:
    """The body nodes that lowering allows to overwrite a region input: node -> number of that input.

    Raises `DsiInternalError` if such a node is not a `kv_write` into that input, or if the body reads the input after the write.
    """
    writes: dict[fx.Node, int] = {}
    order = {node: number for number, node in enumerate(region.body.graph.nodes)}
    for output, number in region.in_place.items():
        node, base = region.outputs[output], region.inputs[number]
        if node.target is not ops.kv_write or node.args[0] is not base:
            raise DsiInternalError(
                f"output {output} of region {region.name} may not overwrite input {number}: {node} is no kv_write into {base}"
            )
        late = [user.name for user in base.users if user is not node and order[user] > order[node]]
        if late:
            raise DsiInternalError(f"region {region.name} writes {base} in place at {node}, but {', '.join(late)} reads it afterwards")
        writes[node] = number
    return writes


def constants_of(gm: fx.GraphModule) -> dict[str, Tensor]:
    """The tensors that the graph reads as attributes, in order of first use."""
    found: dict[str, Tensor] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, node.target)
        if isinstance(value, Tensor):
            found[node.target] = value
    return found


def attribute_of(gm: fx.GraphModule, path: str) -> Any:
    """What `gm` holds under a dotted attribute path."""
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


class _Expander:
    """Runs a graph of regions, semantic and ATen operators under a trace, and stamps each node that this makes with its provenance."""

    def __init__(self, table: Mapping[str, Callable[..., Any]], constants: Mapping[str, Any]):
        self.table = table
        self.constants = constants
        self.last: fx.Node | None = None

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any], region: Region | None = None) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        writes = in_place_writes(region) if region is not None else {}

        def arguments(tree: Any) -> Any:
            return fx.node.map_arg(tree, values.__getitem__)

        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "get_attr":
                values[node] = self.constants.get(node.target) if region is None else None
                if values[node] is None:
                    values[node] = attribute_of(gm, node.target)
            elif node.op == "output":
                result = arguments(node.args[0])
                return tuple(result) if isinstance(result, (tuple, list)) else (result,)
            elif node.op == "call_module":
                values[node] = self.run(region_of(node).body, arguments(node.args), region_of(node))
            elif node in writes:
                values[node] = write_in_place(*arguments(node.args), **arguments(node.kwargs))
                self.stamp(node, region)
            else:
                own = custom_of(node.target)
                function = own.reference if own is not None else expansion(node.target, self.table)
                values[node] = function(*arguments(node.args), **arguments(node.kwargs))
                self.stamp(node, region)
        raise DsiInternalError("a graph without an output node")

    def stamp(self, member: fx.Node, region: Region | None) -> None:
        provenance = Provenance(region.name if region is not None else "", member.name)
        trace = member.stack_trace
        for node in reversed(inductor_api.current_graph().nodes):
            if node is self.last or node.op == "placeholder":
                break
            node.meta["provenance"] = provenance
            if trace:
                node.stack_trace = trace
        self.last = next(iter(reversed(inductor_api.current_graph().nodes)))


def region_of(node: fx.Node) -> Region:
    """The region that a `call_module` node of the outer graph calls. Raises `DsiInternalError` if it has none."""
    region = node.meta.get("region")
    if not isinstance(region, Region):
        raise DsiInternalError(f"{node.name} is a call_module without a region")
    return region


def expand(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, table: Mapping[str, Callable[..., Any]] = CPU_EXPANSIONS
) -> fx.GraphModule:
    """The lowered graph `gm` as a flat graph of decomposed ATen operators over the same inputs, KV writes in place where lowering allows
    them.

    `inputs` are the fakes and SymInts of `fake_mode` that `gm` was made for. Raises `DsiInternalError` if a node has no provenance.
    """
    constants = constants_of(gm)
    names = list(constants)

    def run(*flat: Any) -> tuple[Any, ...]:
        expander = _Expander(table, dict(zip(names, flat[len(inputs) :], strict=True)))
        return expander.run(gm, flat[: len(inputs)])

    with fake_mode:
        fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in constants.values()]
    flat = inductor_api.trace(run, [*inputs, *fakes], fake_mode)
    _restore_constants(flat, constants, len(inputs))
    check_provenance(flat)
    return flat


def _restore_constants(flat: fx.GraphModule, constants: Mapping[str, Tensor], first: int) -> None:
    placeholders = flat.graph.find_nodes(op="placeholder")
    for number, (node, value) in enumerate(zip(placeholders[first:], constants.values(), strict=True)):
        name = f"_constant_{number}"
        flat.register_buffer(name, value, persistent=False)
        with flat.graph.inserting_before(placeholders[-1].next):
            attribute = flat.graph.get_attr(name)
            # The one operator that Inductor lets read a real tensor where every other one is fake.
            constant = flat.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (attribute,))
        for each in (attribute, constant):
            each.meta.update(node.meta)
            each.meta["provenance"] = Provenance("", name)
        node.replace_all_uses_with(constant)
        flat.graph.erase_node(node)
    if constants:
        flat.recompile()


def check_provenance(gm: fx.GraphModule) -> None:
    """Raises `DsiInternalError`, naming the node, unless every operator of an expanded graph says which region and member it came from."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and not isinstance(node.meta.get("provenance"), Provenance):
            raise DsiInternalError(f"node {node.name} ({node.target}) of the expanded graph has no provenance")
