"""x / sqrt(sum(x²) + eps)   ->   x / sqrt(mean(x²) + eps / D) · D^-½

A row of length 1 is one of a root mean square of 1 but for a factor. The epsilon may be added to the root, or not be there.
Seen in: the queries and keys of gated delta nets (Qwen3-Next, OLMo hybrid), nGPT.
"""

import math

import torch
from dsi.patterns.rule import Rule


class NormOfSum(Rule):
    dims = {"x": "... D"}
    literals = {"eps": (1e-6, 1e-2)}
    stage = "normalise"

    def pattern(self, op, x, eps):
        total = op.sum(op.square(x), [-1], True)
        under = op.either("eps", added=lambda: total + eps, none=lambda: total)
        return op.either(
            "root",
            rsqrt=lambda: x * op.reciprocal_root(under),
            divided=lambda: x / op.sqrt(under),
            beside=lambda: x / (op.sqrt(total) + eps),
        )

    def check(self, m):
        m.require(m.dtype("x") in (torch.float32, torch.float64), f"a sum of {m.dtype('x')} is rounded before its root")
        m.require(isinstance(m.size("D"), int) and m.size("D") > 0, "the number of channels is symbolic")
        m.require(not m.present("eps") or m.is_float("eps"), f"eps is {m.eps}, not a float")

    def rewrite(self, dsi, m):
        size = m.size("D")
        mean = dsi.aten.mean(dsi.aten.mul(m.x, m.x), [-1], True)
        if m.tag("root") == "beside":
            value = dsi.aten.div(m.x, dsi.aten.add(dsi.aten.sqrt(mean), m.eps / math.sqrt(size)))
        else:
            root = dsi.aten.rsqrt(dsi.aten.add(mean, m.eps / size if m.tag("eps") == "added" else 0.0))
            value = dsi.aten.mul(m.x, root)
        return dsi.aten.mul(value, size**-0.5)
