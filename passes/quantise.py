"""Quantise: linears whose weight is a parameter read it as int8.

    y = dsi.linear(x, w, b)   ->   q, s = dsi.quantize_weight(w);   y = dsi.linear_int8(x, q, s, b)

This comes before regions are made, so that an int8 linear is an anchor like any other, and grows the same prologue and epilogue. The
runtime computes `quantize_weight` once a weight, not once a call (`runtime/packs.py`). Only weights are quantised: inputs that keep their
place between calls and that the graph does not write to. What is kept, and why, is in the report.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from dsi.ir import ops
from dsi.ir.context import Context, QuantisedWeight
from dsi.ir.errors import DsiError, Refusal
from dsi.ir.options import Options
from dsi.ir.pull import args_of
from dsi.ir.quantised_ops import linear_int8
from dsi.ir.source import captured_as, module_path, source_line
from dsi.quantize.formats import ROW, Format, Grouping
from dsi.quantize.ops import quantize_weight
from torch import fx

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EMBEDDINGS = (ops.embedding, aten.embedding.default)
_ACTIVATIONS = (ops.activation, ops.gated)
_CONTRACTIONS = (ops.linear, linear_int8, ops.attention, ops.layer_norm, ops.rms_norm)


def quantise(gm: fx.GraphModule, context: Context) -> None:
    """Rewrite the linears of `gm` as the options say. Without a quantised dtype every weight stays as it is."""
    options: Options = context.options
    if options.dtype == "int8":
        _Stage(gm, context).run()
    if options.activations == "int8":
        found = gm.graph.find_nodes(op="call_function", target=linear_int8)
        for node in found:
            if not _is_head(node):
                node.kwargs = {**node.kwargs, "activations": "int8"}
        if not found:
            context.report.notes.append(
                "activations='int8' changes nothing here: no weight of this graph is int8 (dtype='int8' makes them)"
            )
    gm.recompile()


def _is_head(linear: fx.Node) -> bool:
    """Whether a linear's result leaves the graph as it is, but for views and operators on it alone (a cap of logits): nothing after it
    evens out what rounding its input would do."""
    readers = list(linear.users)
    while readers:
        reader = readers.pop()
        if reader.op == "output":
            continue
        if len(reader.all_input_nodes) != 1 or reader.target in _CONTRACTIONS:
            return False
        readers.extend(reader.users)
    return True


def grouping_of(options: Options) -> Grouping:
    """How the options group the entries of a weight."""
    if options.quantize_groups is not None:
        return Grouping("flat", options.quantize_groups)
    return Grouping("inner", options.group_size) if options.group_size else ROW


class _Stage:
    def __init__(self, gm: fx.GraphModule, context: Context):
        self.graph, self.context, self.options = gm.graph, context, context.options
        self.grouping = grouping_of(context.options)
        self.packs: dict[tuple[fx.Node, bool, Grouping], tuple[fx.Node, fx.Node, int]] = {}
        self.unused = dict.fromkeys(context.options.quantize_skip)
        self.last: fx.Node | None = next(iter(reversed(gm.graph.find_nodes(op="placeholder"))), None)  # behind it comes the next pack
        self.written = {n.args[0] for n in gm.graph.nodes if _writes(n)}

    def run(self) -> None:
        for linear in self.graph.find_nodes(op="call_function", target=ops.linear):
            reason = self._why_kept(linear)
            weight = args_of(linear)[1]
            if reason is None:
                what = f"quantise.int8: {linear.name} at {source_line(linear) or 'an unknown line'} ({self.context.weights[weight.name]})"
                if not self.context.fuel.take(what):
                    reason = "the fuel is spent (DSI_FUEL)"
            if reason is not None:
                self.context.report.kept.append(Refusal(reason, self._name(weight), source_line(linear), "quantise"))
                continue
            self._rewrite(linear)
            self.context.report.hits["quantise.int8"] += 1
        self.context.report.notes += [f"quantize_skip: {pattern!r} is the name of no weight in this graph" for pattern in self.unused]

    def _name(self, weight: Any) -> str:
        return self.context.weights.get(weight.name, weight.name)

    def _why_kept(self, linear: fx.Node) -> str | None:
        weight = args_of(linear)[1]
        if weight.op != "placeholder":
            return "it is computed in the graph, no weight"
        if weight.name not in self.context.weights:
            return "it is an input of the call, no weight of the model"
        if weight in self.written:
            return "the graph writes to it"
        if weight.meta["val"].dtype not in DTYPES:
            return f"its dtype is {str(weight.meta['val'].dtype).removeprefix('torch.')}"
        if not weight.meta["val"].numel():
            return "it has no entries"
        if pattern := self._skipped(linear, weight):
            return f"its name is skipped ({pattern!r})"
        if self.options.tied_head == "keep" and any(user.target in _EMBEDDINGS for user in weight.users):
            return "it is the table of an embedding, too (tied_head='keep')"
        return None

    def _skipped(self, linear: fx.Node, weight: fx.Node) -> str | None:
        """The pattern of the options that the weight's name or its module's matches. A tied head has the table's name, so the module that
        calls the linear counts as well."""
        name = self.context.weights[weight.name]
        names = [name, name.rpartition(".")[0], module_path(linear), f"{module_path(linear)}.weight"]
        found = None
        for pattern in self.options.quantize_skip:
            if any(fnmatchcase(each, pattern) for each in names if each):
                self.unused.pop(pattern, None)
                found = found or pattern
        return found

    def _rewrite(self, linear: fx.Node) -> None:
        weight, kn = args_of(linear)[1], bool(linear.kwargs.get("kn", False))
        bias = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
        entries, scales, group = self._pack(linear, weight, kn)
        with self.graph.inserting_before(linear):
            new = self.graph.call_function(linear_int8, (linear.args[0], entries, scales, bias), {"group": group} if group else {})
        new.meta = {**linear.meta, "dsi_provenance": ("quantise.int8", linear.name)}
        linear.replace_all_uses_with(new)
        self.graph.erase_node(linear)
        new.name = linear.name

    def _pack(self, linear: fx.Node, weight: fx.Node, kn: bool) -> tuple[fx.Node, fx.Node, int]:
        grouping = self.grouping.doubled() if self.options.mlp_extra_grouping and _is_mlp(linear) else self.grouping
        fake = weight.meta["val"]
        k, n = fake.shape if kn else fake.shape[::-1]
        try:
            group = grouping.inner_group(n, k, kn=kn)
        except DsiError as error:
            self.context.report.notes.append(f"{self._name(weight)} has a scale a row instead: {error}")
            grouping, group = ROW, 0
        key = (weight, kn, grouping)
        self.context.int8_reads.append((captured_as(linear), (kn, grouping)))
        if key not in self.packs:
            given: dict[str, Any] = {"kn": True} if kn else {}
            if grouping != ROW:
                given |= {"grouping": grouping.kind, "size": grouping.size}
            pack = self._append(quantize_weight, (weight,), given)
            parts = [self._append(operator.getitem, (pack, i), {}) for i in range(2)]
            with self.context.faking():
                pack.meta["val"] = quantize_weight(fake, **given)
            for node, value in zip((pack, *parts), (pack.meta["val"], *pack.meta["val"]), strict=True):
                node.meta |= {"val": value, "dsi_provenance": ("quantise.int8", weight.name), "dsi_weight": self._name(weight)}
            self.packs[key] = parts[0], parts[1], group
            after = sum(value.nbytes for value in pack.meta["val"])
            self.context.report.quantised.append(
                QuantisedWeight(self._name(weight), tuple(fake.shape), str(Format(grouping)), fake.nbytes, after)
            )
        return self.packs[key]

    def _append(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        assert self.last is not None
        with self.graph.inserting_after(self.last):
            self.last = self.graph.call_function(target, args, kwargs)
        return self.last


def _writes(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and isinstance(node.target, torch._ops.OpOverload)
        and (node.target.is_view or node.target is aten._unsafe_view.default)
    )


def _is_mlp(linear: fx.Node) -> bool:
    """Whether a linear feeds a recognised activation or is fed by one, through views."""
    before = linear.args[0]
    while _is_view(before):
        before = before.args[0]  # type: ignore[union-attr]
    return getattr(before, "target", None) in _ACTIVATIONS or any(reader.target in _ACTIVATIONS for reader in _readers(linear))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_view(user) or (user.target is operator.getitem):
            yield from _readers(user)
        else:
            yield user
