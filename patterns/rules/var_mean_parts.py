"""var_mean(x, d)[0], var_mean(x, d)[1]   ->   var(x, d), mean(x, d)

So that statistics have one spelling. Seen in: layer norms written with `torch.var_mean`.
"""

import torch
from dsi.patterns.rule import Rule


class VarMeanParts(Rule):
    literals = {"axis": (-1, 1), "correction": (0, 1), "kept": (True, False), "index": (0, 1)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, axis, correction, kept, index):
        both = op.call(torch.ops.aten.var_mean.correction, x, [axis], correction=correction, keepdim=kept)
        return op.item(both, index), both

    def rewrite(self, dsi, m):
        if m.index == 0:
            return dsi.aten.var(m.x, [m.axis], correction=m.correction, keepdim=m.kept), dsi.keep
        return dsi.aten.mean(m.x, [m.axis], m.kept), dsi.keep

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor_of([s.size("A"), 3, 5])}
