"""std(x, d)   ->   sqrt(var(x, d))

So that deviations have one spelling. Seen in: layer norms written with `x.std(-1, keepdim=True)`.
"""

import torch
from dsi.patterns.rule import Rule


class StdSpelling(Rule):
    literals = {"axis": (-1, 1), "correction": (0, 1), "kept": (True, False)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, axis, correction, kept):
        return op.call(torch.ops.aten.std.correction, x, [axis], correction=correction, keepdim=kept)

    def check(self, m):
        m.require(m.dtype("x") in (torch.float32, torch.float64), f"a variance of {m.dtype('x')} is rounded before its root")

    def rewrite(self, dsi, m):
        return dsi.aten.sqrt(dsi.aten.var(m.x, [m.axis], correction=m.correction, keepdim=m.kept))

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor_of([s.size("A"), 3, 5])}
