"""_unsafe_view(x, sizes), reshape(x, sizes)   ->   view(x, sizes)

Where the view exists without a copy. Seen in: `matmul` and `reshape`, whichever way they are traced.
"""

import torch
from dsi.patterns.rule import Rule


class ViewSpelling(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, sizes):
        return op.either(
            "spelling",
            unsafe=lambda: op.unsafe_view(x, sizes),
            reshape=lambda: op.call(torch.ops.aten.reshape.default, x, sizes),
        )

    def rewrite(self, dsi, m):
        return dsi.aten.view(m.x, m.sizes)

    def sample(self, s):
        return {
            **s.defaults(),
            "x": s.tensor("A B C"),
            "sizes": s.pick(([s.size("A") * s.size("B"), s.size("C")], [-1, s.size("B"), s.size("A")])),
        }
