"""x / (vector_norm(x) · D^-½) [* weight]   ->   dsi.rms_norm with an epsilon of 0

The root mean square as the length of x by the root of its size. An epsilon that is added to it is added outside of the root, which the
operator has not: that is left. Seen in: norms by `x.norm(dim=-1, keepdim=True)`.
"""

import math

import torch
from dsi.patterns.rule import Rule

vector_norm = torch.ops.aten.linalg_vector_norm.default


class RmsNormLength(Rule):
    dims = {"x": "... D", "weight": "D"}

    def pattern(self, op, x, weight, factor):
        length = op.call(vector_norm, x, 2, [-1], True)
        root = op.either("factor", mul=lambda: length * factor, div=lambda: length / factor)
        plain = x / root
        return op.either("affine", scaled=lambda: plain * weight, none=lambda: plain)

    def check(self, m):
        x, size = m.dtype("x"), m.size("D")
        m.require(x in (torch.float32, torch.float64), f"a length of {x} is rounded elsewhere than the operator rounds")
        m.require(isinstance(size, int), "the number of channels is symbolic")
        m.require(m.is_number("factor"), f"the factor {m.factor} of the length is no literal number")
        root = m.factor if m.tag("factor") == "div" else 1 / m.factor if m.factor else 0.0
        m.require(
            math.isclose(root, math.sqrt(size), rel_tol=1e-15), f"the length is divided by {root}, the root of {size} is another number"
        )
        m.require(not m.present("weight") or m.dtype("weight") == x, f"x is {x} and the weight is not")

    def rewrite(self, dsi, m):
        return dsi.rms_norm(m.x, m.weight, eps=0.0, cast="none")

    def sample(self, s):
        values = s.defaults()
        size = values["x"].shape[-1]
        return {**values, "factor": s.pick((size, size, size, 3)) ** (0.5 if s.chosen("factor") == "div" else -0.5)}
