"""x / (vector_norm(x) · factor) [* weight]   ->   dsi.rms_norm

The root mean square as the length of x by the root of its size; another factor is left after the norm. An epsilon is added to the length,
or is the least that it may be, or there is none. Seen in: norms by `x.norm(dim=-1, keepdim=True)`; `F.normalize` (cosine attention, CLIP).
"""

import math

import torch
from dsi.patterns.rule import Rule

vector_norm = torch.ops.aten.linalg_vector_norm.default
aten = torch.ops.aten


class RmsNormLength(Rule):
    dims = {"x": "... D", "weight": "D"}
    literals = {"eps": (1e-12, 1e-3, 0.5)}

    def pattern(self, op, x, weight, factor, eps, sizes):
        length = op.call(vector_norm, x, 2, [-1], True)
        root = op.either("factor", mul=lambda: length * factor, div=lambda: length / factor, none=lambda: length)
        bounded = op.either(
            "eps",
            beside=lambda: root + eps,
            least=lambda: op.either(
                "bound", clamp_min=lambda: op.call(aten.clamp_min.default, root, eps), clamp=lambda: op.call(aten.clamp.default, root, eps)
            ),
            none=lambda: root,
        )
        plain = x / op.either("spread", spread=lambda: op.expand(bounded, sizes), none=lambda: bounded)
        return op.either("affine", scaled=lambda: plain * weight, none=lambda: plain)

    def check(self, m):
        x, size = m.dtype("x"), m.size("D")
        m.require(x in (torch.float32, torch.float64), f"a length of {x} is rounded elsewhere than the operator rounds")
        m.require(isinstance(size, int), "the number of channels is symbolic")
        m.require(m.output().dtype == x and m.same(m.output().shape, m.shape("x")), f"the result is {list(m.output().shape)}")
        m.require(m.tag("factor") == "none" or m.is_number("factor"), f"the factor {m.factor} of the length is no literal number")
        m.require(m.tag("factor") == "none" or 1e-30 < m.factor < 1e30, f"the length times {m.factor} is no length")
        m.require(m.tag("eps") == "none" or (m.is_number("eps") and m.eps >= 0), f"the epsilon is {m.eps}")
        m.require(not m.present("weight") or m.dtype("weight") == x, f"x is {x} and the weight is not")

    def rewrite(self, dsi, m):
        scale = scale_of(m)
        place = {"eps": m.eps * scale, "place": m.tag("eps")} if m.tag("eps") != "none" else {"eps": 0.0}
        if math.isclose(scale, 1.0, rel_tol=1e-15):
            return dsi.rms_norm(m.x, m.weight, cast="none", **place)
        plain = dsi.aten.mul(dsi.rms_norm(m.x, None, cast="none", **place), scale)
        return dsi.aten.mul(plain, m.weight) if m.present("weight") else plain

    def sample(self, s):
        values = s.defaults()
        x = values["x"]
        root = s.pick((x.shape[-1], x.shape[-1], 3)) ** (0.5 if s.chosen("factor") == "div" else -0.5)
        return {**values, "factor": root, "sizes": list(x.shape)}


def scale_of(m):
    """The factor of the normalised x: 1 where the length is divided by the root of the size."""
    factor = {"mul": lambda: m.factor, "div": lambda: 1 / m.factor, "none": lambda: 1.0}[m.tag("factor")]()
    return 1 / (factor * math.sqrt(m.size("D")))
