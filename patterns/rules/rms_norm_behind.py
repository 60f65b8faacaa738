"""linear(x, w) / sqrt(mean(x²) + eps)   ->   dsi.linear(dsi.rms_norm(x), w)

A row's factor commutes with the product. In fp32 only: in half precision the product and the normalised x are rounded at other places.
Seen in: hyper-connections (DeepSeek V4, HunYuan V4), whose mixing weights are made of all streams of a position.
"""

import torch
from dsi.patterns.rule import Rule


class RmsNormBehind(Rule):
    dims = {"x": "... K", "w": "N K"}
    literals = {"eps": (1e-6, 1e-5)}

    def pattern(self, op, x, w, eps):
        return op.dsi.linear(x, w) * op.rsqrt(op.mean(op.square(x), [-1], True) + eps)

    def check(self, m):
        m.require(m.is_float("eps"), f"eps is {m.eps}, not a float")
        m.require(m.dtype("x") == m.output().dtype == torch.float32, f"x is {m.dtype('x')}, the result {m.output().dtype}")

    def rewrite(self, dsi, m):
        return dsi.linear(dsi.rms_norm(m.x, None, eps=m.eps), m.w)
