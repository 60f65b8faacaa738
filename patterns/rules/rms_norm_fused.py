"""rms_norm(x, [D], weight, eps), _fused_rms_norm(...)[0]   ->   dsi.rms_norm

torch computes half precision in fp32, multiplies there and rounds once; fp64 stays fp64. Seen in: models on `torch.nn.RMSNorm`.
"""

import torch
from dsi.patterns.rule import Rule


class RmsNormFused(Rule):
    dims = {"x": "... D", "weight": "D"}
    literals = {"eps": (1e-6, 1e-5)}
    same_rounding = True

    def pattern(self, op, x, normalised, weight, eps):
        def norm(w):
            return op.either(
                "spelling",
                fused=lambda: op.item(op.fused_rms_norm(x, normalised, w, eps), 0),
                composite=lambda: op.aten_rms_norm(x, normalised, w, eps),
            )

        return op.either("affine", scaled=lambda: norm(weight), none=lambda: norm(None))

    def check(self, m):
        m.require(len(m.normalised) == 1, f"it normalises over {len(m.normalised)} dimensions")
        m.require(not m.present("weight") or m.dtype("weight") == m.dtype("x"), f"x is {m.dtype('x')} and the weight is not")

    def rewrite(self, dsi, m):
        return dsi.rms_norm(m.x, m.weight, eps=m.eps, cast="none" if m.dtype("x") == torch.float64 else "after")

    def sample(self, s):
        return {**s.defaults(), "normalised": [s.size("D")]}
