"""What the model calls the inputs of a graph that keep their place between calls: its parameters and buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from dsi.runtime.inductor_api import static_input_indices
from torch import fx

_STEP = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")


def names_of_inputs(gm: fx.GraphModule) -> list[str]:
    """A name for each input of Dynamo's graph: the dotted path of a parameter or buffer in the module that owns it, else the node's."""
    return [_path(node) or node.name for node in gm.graph.find_nodes(op="placeholder")]


def _path(node: fx.Node) -> str:
    """The path in Dynamo's name of a source, "L['self']._modules['lm_head']._parameters['weight']": "lm_head.weight"."""
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name: Any = getattr(source, "name", "")
    return ".".join(_STEP.findall(str(name() if callable(name) else name)))


def weights_of(gm: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> dict[str, str]:
    """Placeholder of AOTAutograd's graph -> name in the model, for tensors that keep their place. `names` are those of Dynamo's inputs;
    where AOTAutograd has dropped some of these and does not say which, a placeholder keeps its own name."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    found = {}
    for number in static_input_indices():
        if number < len(placeholders) and isinstance(inputs[number], torch.Tensor):
            node = placeholders[number]
            described = getattr(node.meta.get("desc"), "idx", None)
            origin = described if isinstance(described, int) else number if len(placeholders) == len(names) else None
            found[node.name] = names[origin] if origin is not None and origin < len(names) else node.name
    return found
