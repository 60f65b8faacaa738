"""clone(x), alias(x), detach(x)   ->   x

Only where the copy lies in memory as x does. Whether anyone could tell the copy from x (a mutation, the graph's outputs) is the rewriter's
business. Seen in: dropout in evaluation mode (GPT-2, BERT, OPT), `x[:, slice(None), :]`.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.strides import same_strides


class NoOpCopy(Rule):
    dims = {"x": "..."}
    literals = {"memory": (torch.contiguous_format, torch.preserve_format)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, memory):
        return op.either(
            "spelling",
            clone=lambda: op.clone(x),
            clone_as=lambda: op.clone(x, memory_format=memory),
            alias=lambda: op.alias(x),
            detach=lambda: op.detach(x),
            lift=lambda: op.lift_fresh_copy(x),
        )

    def check(self, m):
        m.require(
            same_strides(m.value("x"), m.output()), f"it changes the strides {list(m.value('x').stride())} to {list(m.output().stride())}"
        )

    def rewrite(self, dsi, m):
        return m.x
