"""What a click on an item shows: places in the model, matched nodes, kernels and figures, as plain data for the template."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dsi.codegen.devices import Device
from dsi.ir.region import Region
from dsi.ir.source import source_frame
from torch import fx

from ..figures import Figures, microseconds, percent, quantity, variants
from ..printing import target_text, value_text
from ..record import Node
from .model import CUSTOM, INPUT, OUTPUT, REDUCE, GraphModel, Item


@dataclass
class Member:
    """One operator of a region: its part in it, where it is from, and what the graph had in its place."""

    name: str
    operator: str
    role: str
    value: str
    place: str
    replaced: list[str] = field(default_factory=list)


@dataclass
class Detail:
    """One section of the page. `sources`: (place, code) of the model's lines; `kernels`: (title, highlighted source)."""

    id: str
    kind: str
    title: str
    subtitle: str = ""
    also: list[str] = field(default_factory=list)
    sources: list[tuple[str, str, str]] = field(default_factory=list)
    figures: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    kernels: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""


def details(model: GraphModel, prefix: str, device: Device, custom: Mapping[str, Any]) -> list[Detail]:
    """A section for every item of the picture after that a click can open."""
    by_name = {node.name: node for node in model.record.recognised}
    return [
        _region(item, item.region, model, by_name, prefix, device) if item.region is not None else _other(item, model, prefix, custom)
        for item in model.after.items.values()
        if item.kind not in (INPUT, OUTPUT)
    ]


def _region(item: Item, region: Region, model: GraphModel, by_name: Mapping[str, Node], prefix: str, device: Device) -> Detail:
    detail = Detail(f"{prefix}{item.name}", item.kind, region.label or region.kind, region.name, model.folded.get(item.name, []))
    detail.inputs = [(node.name, _value(node)) for node in region.inputs]
    detail.outputs = [(node.name, _value(node)) for node in region.outputs]
    seen: dict[tuple[str, str], str] = {}
    for node in region.members:
        file, line, code = source_frame(node)
        place = f"{os.path.basename(file)}:{line}" if file else ""
        known = by_name.get(node.name)
        if place:
            seen.setdefault((place, code), known.module if known else "")
        replaced = [
            f"{rewrite.rule} ({rewrite.place}): {', '.join(_spelled(name, model.record.matched) for name in rewrite.replaced)}"
            for rewrite in (known.rewrites if known else ())
        ]
        detail.members.append(
            Member(
                node.name,
                target_text(node.target).removeprefix("torch.ops."),
                region.roles.get(node.name, ""),
                _value(node),
                place,
                replaced,
            )
        )
    detail.sources = [(place, highlighted(code), module) for (place, code), module in seen.items()]
    detail.figures = [_figures(found, device) for found in variants(region, device)]
    for kernel in region.kernels:
        rows = "any number of rows" if kernel.max_rows is None else f"at most {kernel.max_rows} rows"
        title = f"{kernel.schedule}, {rows}" if len(region.kernels) > 1 else kernel.schedule
        detail.kernels.append((title, highlighted(kernel.source)))
    refusal = model.refusals.get(region.name)
    if refusal is not None:
        detail.reason = str(refusal)
    return detail


def _other(item: Item, model: GraphModel, prefix: str, custom: Mapping[str, Any]) -> Detail:
    node = item.node
    detail = Detail(f"{prefix}{item.name}", item.kind, item.lines[0], item.name, model.folded.get(item.name, []))
    if node.file:
        detail.sources = [(f"{os.path.basename(node.file)}:{node.line}", highlighted(node.code), node.module)]
    detail.outputs = [(node.name, node.value)] if node.value else []
    detail.inputs = [(name, "") for name in node.inputs]
    for rewrite in node.rewrites:
        what = f"{rewrite.rule} ({rewrite.place}): {', '.join(_spelled(name, model.record.matched) for name in rewrite.replaced)}"
        detail.members.append(Member(node.name, node.target, "", node.value, "", [what]))
    if item.kind == CUSTOM:
        operator = custom[item.lines[0]]
        detail.reason = "An operator of your own: on a CUDA device its kernel runs, elsewhere its reference."
        detail.kernels = [(title, highlighted(text)) for title, text in operator.sources()]
    elif item.kind == REDUCE:
        detail.reason = "An all-reduce: no region crosses it (region rule 10)."
    else:
        refusal = model.refusals.get(item.name)
        detail.reason = str(refusal) if refusal is not None else "It is left to ATen."
    return detail


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val")).removesuffix(" meta")


def _spelled(name: str, matched: Mapping[str, Node]) -> str:
    node = matched.get(name)
    return f"{name} = {node.target}" if node is not None else name


def _figures(found: Figures, device: Device) -> tuple[str, list[tuple[str, str]]]:
    title = f"{found.schedule} on {device.name}" + (f", {found.assumed}" if found.assumed else "")
    return title, [
        ("bytes", quantity(found.bytes, "B")),
        ("operations", quantity(found.flops, "FLOP")),
        ("intensity", f"{found.intensity:.3g} FLOP/B"),
        ("predicted", microseconds(found.seconds)),
        ("roofline", f"{microseconds(found.floor)}, bound by {found.limit}"),
        ("share of roofline", percent(found.share)),
    ]


_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)|(?P<string>\"\"\".*?\"\"\"|\"[^\"\n]*\"|'[^'\n]*')"
    r"|(?P<keyword>\b(?:def|return|for|in|if|else|elif|while|import|from|as|class|and|or|not|is|None|True|False|lambda|with)\b)"
    r"|(?P<number>\b\d[\d_.]*(?:e[-+]?\d+)?\b)|(?P<decorator>@[\w.]+)",
    re.DOTALL,
)


def highlighted(source: str) -> str:
    """Python as HTML with a few classes to colour."""
    parts, at = [], 0
    for match in _TOKEN.finditer(source):
        parts += [escape(source[at : match.start()]), f'<span class="{match.lastgroup}">{escape(match.group())}</span>']
        at = match.end()
    return "".join([*parts, escape(source[at:])])
