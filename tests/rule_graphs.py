"""Small graphs for tests of the rule engine, and what became of them."""

from __future__ import annotations

import aten_graphs
import torch
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.ir.spec import check_graph
from dsi.patterns.engine import apply_rules
from dsi.patterns.rule import Rule
from torch import fx


class SiluTanh(Rule):
    """silu(tanh(x)), of which the replacement computes the same in the other spelling."""

    dims = {"x": "..."}

    def pattern(self, op, x):
        return op.silu(op.tanh(x))

    def rewrite(self, dsi, m):
        inner = dsi.activation(m.x, "tanh")
        return dsi.activation(inner, "silu")


def rewritten(rule: type[Rule], fn, *args, symbolic: bool = False) -> tuple[fx.GraphModule, Context, int]:
    """The graph after one rule, checked against the IR's specification and against `fn` on the inputs."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    hits = apply_rules(gm, (rule,), context)
    check_graph(gm, "aten", context.fake_mode)
    torch.testing.assert_close(gm(*args), fn(*args))
    return gm, context, hits[rule.name()]


def faked(graph: fx.Graph, *inputs: torch.Tensor) -> tuple[fx.GraphModule, Context]:
    """A GraphModule with fake values for the given inputs."""
    gm = fx.GraphModule(torch.nn.Module(), graph)
    mode = torch._subclasses.FakeTensorMode()
    values = iter(inputs)
    with mode:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = mode.from_tensor(next(values))
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    context = Context(Options())
    context.fake_mode = mode
    return gm, context
