"""sum(x, d) / n, where d has n entries   ->   mean(x, d)

In fp32 and fp64: in half precision the sum is rounded, and overflows, before it is divided. Seen in: norms written out.
"""

import torch
from dsi.patterns.rule import Rule


class SumOfMean(Rule):
    literals = {"axis": (-1, 1), "count": (3, 5, 7.0)}
    stage = "normalise"

    def pattern(self, op, x, axis, count):
        total = op.either("kept", kept=lambda: op.sum(x, [axis], True), dropped=lambda: op.sum(x, [axis]))
        return total / count

    def check(self, m):
        m.require(m.dtype("x") in (torch.float32, torch.float64), f"a sum of {m.dtype('x')} is rounded before it is divided")
        m.require(m.is_int("axis") and m.is_number("count"), "the dimension or the count is computed in the graph")
        m.require(m.rank("x") > 0 and m.same(m.shape("x")[m.axis], m.count), f"a sum over {list(m.shape('x'))} is divided by {m.count}")

    def rewrite(self, dsi, m):
        return dsi.aten.mean(m.x, [m.axis], m.tag("kept") == "kept")

    def sample(self, s):
        values = s.defaults()
        count = int(values["count"])
        sizes = s.pick(([2, count, count], [2, count, 4] if values["axis"] == 1 else [2, 4, count], [2, 4, 6]))
        return {**values, "x": s.tensor_of(sizes)}
