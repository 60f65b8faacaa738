"""Autocast that is switched off where it is off already (`with torch.autocast("cuda", enabled=False):` around a norm or rope) does nothing.

Its switches go from Dynamo's graph. Every other switch changes what the operators behind it mean, and the guard steps aside.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

_ENTER, _EXIT = "_enter_autocast", "_exit_autocast"


def is_switch(node: fx.Node) -> bool:
    """Whether `node` enters or leaves an autocast region."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in (_ENTER, _EXIT)


def is_idle_switch(node: fx.Node) -> bool:
    """Whether `node` is a switch that changes nothing, given that autocast is off where the graph begins and nothing in it turns it on."""
    entered = node if getattr(node.target, "__name__", "") == _ENTER else node.args[0] if node.args else None
    if not isinstance(entered, fx.Node) or not is_switch(entered):
        return False
    return (entered.kwargs["enabled"] if "enabled" in entered.kwargs else entered.args[2] if len(entered.args) > 2 else None) is False


def idle_autocast_gone(gm: fx.GraphModule) -> None:
    """Erase in place, from Dynamo's graph and those inside it, the switches of autocast regions, all of which are idle."""
    for module, switches in _switches(gm):
        if all(map(is_idle_switch, switches)):
            for node in reversed(switches):  # what leaves a region reads what entered it
                module.graph.erase_node(node)
            module.recompile()


def _switches(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and (switches := [node for node in module.graph.nodes if is_switch(node)]):
            yield module, switches
