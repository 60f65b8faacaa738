"""A backend for torch.compile that keeps what the stages make of a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.fuse import unfuse
from dsi.passes.pipeline import PIPELINE
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd


class Capture:
    """A backend that runs the stages with their specification, keeps the graph before and after lowering, and executes it flat."""

    def __init__(self) -> None:
        self.context = Context(Options())
        self.graph: Any = None

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        for stage in PIPELINE:
            if stage.level == "dynamo":
                stage.run(gm, self.context)
        return aot_autograd(fw_compiler=self.compile, keep_inference_input_mutations=True)(gm, example_inputs)

    def compile(self, gm: fx.GraphModule, _: list[Any]) -> Any:
        assert self.graph is None, "one graph"
        self.context.fake_mode = torch._guards.TracingContext.get().fake_mode
        aliases = output_aliases(gm)
        for stage in PIPELINE:
            if stage.level != "dynamo":
                stage.run(gm, self.context)
                assert stage.leaves is not None
                check_graph(gm, stage.leaves, self.context.fake_mode, aliases)
        self.graph = gm
        new = fx.Graph()
        new.output(new.graph_copy(gm.graph, {}))
        flat = fx.GraphModule(gm, new)
        unfuse(flat)
        check_graph(flat, "aten", self.context.fake_mode, aliases)
        return make_boxed_func(flat.forward)

    @property
    def regions(self):
        return self.context.report.regions

    def outer(self) -> list[str]:
        found = [n for n in self.graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        return sorted({str(n.target).split(".")[1] for n in found})


def compiled(model: Any, dynamic: tuple[int, ...] = (), **inputs: Any) -> tuple[Capture, Any]:
    """What the stages made of `model`'s one graph for `inputs`, and what it returned."""
    capture = Capture()
    for dim in dynamic:
        torch._dynamo.mark_dynamic(inputs["input_ids"], dim)
    with torch.no_grad():
        return capture, torch.compile(model, backend=capture, fullgraph=True)(**inputs)
