"""Which nodes draw random numbers, and which only could: of Dynamo's graph and of the ATen graph that is made of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

# Functions that draw only if told to: (parameter of the probability, parameter that switches it on or None), positions included.
_DROPOUTS: dict[Any, tuple[tuple[str, int, Any], tuple[str, int, Any] | None]] = {
    F.dropout: (("p", 1, 0.5), ("training", 2, True)),
    F.dropout1d: (("p", 1, 0.5), ("training", 2, True)),
    F.dropout2d: (("p", 1, 0.5), ("training", 2, True)),
    F.dropout3d: (("p", 1, 0.5), ("training", 2, True)),
    F.alpha_dropout: (("p", 1, 0.5), ("training", 2, False)),
    F.feature_alpha_dropout: (("p", 1, 0.5), ("training", 2, False)),
    torch.dropout: (("p", 1, 0.5), ("train", 2, True)),
    F.scaled_dot_product_attention: (("dropout_p", 4, 0.0), None),
    F.multi_head_attention_forward: (("dropout_p", 9, 0.0), ("training", 12, True)),
    torch.lstm: (("dropout", 5, 0.0), ("train", 6, True)),
    torch.gru: (("dropout", 5, 0.0), ("train", 6, True)),
    torch.rnn_tanh: (("dropout", 5, 0.0), ("train", 6, True)),
    torch.rnn_relu: (("dropout", 5, 0.0), ("train", 6, True)),
    F.rrelu: (("upper", 2, 1 / 3), ("training", 3, False)),
}


def is_random(node: fx.Node) -> bool:
    """Whether `node`, of a torch-level or an ATen graph, draws random numbers as it is called.

    In a torch-level graph a function may hide what it draws; nothing hides it in the ATen graph that is made of it.
    """
    if node.target is F.gumbel_softmax:
        return True
    if node.op == "call_function" and node.target in _DROPOUTS:
        probability, switch = _DROPOUTS[node.target]
        return _argument(node, probability) != 0 and (switch is None or _argument(node, switch) is not False)
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return _seeded(node.target) and not _switched_off(node, node.target)
    if node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        packet = getattr(torch.ops.aten, name, None) if name not in _SWITCHED else None
        if isinstance(packet, torch._ops.OpOverloadPacket):  # `torch.ops.aten` also has the attributes of any object
            return any(_seeded(getattr(packet, overload)) for overload in packet.overloads())
    return False


# ATen names that are tagged random, where a torch-level function of that name has its row in the table above.
_SWITCHED = {
    "dropout",
    "scaled_dot_product_attention",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "rrelu",
    "alpha_dropout",
    "feature_alpha_dropout",
}


def _seeded(overload: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags


def _switched_off(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """Whether an operator that may draw says by its arguments that it does not (an attention kernel with dropout_p 0)."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout", "train", "training"):
            value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else argument.default_value)
            if value is False or (argument.name not in ("train", "training") and isinstance(value, (int, float)) and value == 0):
                return True
    return False


def _argument(node: fx.Node, parameter: tuple[str, int, Any]) -> Any:
    name, position, default = parameter
    return node.kwargs.get(name, node.args[position] if position < len(node.args) else default)
