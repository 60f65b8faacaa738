"""Regions: the unit of fusion. One region becomes one kernel (decode attention: at most two)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .tile import KernelSpec, Plan

REGION_CUT = "dsi_region_cut"
"""Key of a node's meta: a rule's hint that a region ends at its value. The value says which rule's."""

STORED = "dsi_stored"
"""Key of a `copy_`'s meta: the kernel of its source's region may store the value in the input itself (set by lowering)."""

REGION_KINDS = ("linear", "attention", "embedding", "row")


@dataclass
class Region:
    """A convex set of nodes with one anchor group, outlined into a graph of its own.

    In the outer graph a region is one `call_module` node whose `meta["region"]` is this object; its value is always a tuple, taken apart by
    `operator.getitem`. `body` is a GraphModule of semantic and ATen operators: placeholders are the region's inputs in order (tensors, and
    SymInts where a size cannot be read off a tensor), its output node returns the tuple.
    """

    name: str
    kind: str
    body: fx.GraphModule
    plan: Plan | None
    roles: dict[str, str] = field(default_factory=dict)  # body node name -> "prologue" | "anchor" | "epilogue"
    label: str = ""  # e.g. "rms_norm + 3 linear + rope + kv_write"
    key: str = ""  # equal keys: equal kernels
    in_place: dict[int, int] = field(default_factory=dict)  # output number -> input number it may overwrite (set by lowering)
    spec: KernelSpec | None = None  # what code generation is given (set by lowering)
    kernels: list[Any] = field(default_factory=list)  # the variants generated for it, smallest row bucket first (dsi.codegen.Kernel)

    @property
    def inputs(self) -> list[fx.Node]:
        """The body's placeholders, in order."""
        return [n for n in self.body.graph.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        """The body's returned nodes, in order."""
        (output,) = (n for n in self.body.graph.nodes if n.op == "output")
        return list(output.args[0])

    @property
    def members(self) -> list[fx.Node]:
        """The operator nodes of the body, in order."""
        return [n for n in self.body.graph.nodes if n.op == "call_function"]


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that states a node's shape, dtype and strides."""
    return node.meta["val"]
