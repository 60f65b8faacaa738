"""cat(rope(x[..., :R]), x[..., R:])   ->   dsi.rope(x) with tables of R channels

Seen in: GPT-NeoX, Phi, GPT-J.
"""

from dsi.ir.ops import ROPE_STYLES
from dsi.patterns.rule import Rule


class PartialRope(Rule):
    dims = {"x": "... D", "cos": "~... R", "sin": "~... R"}
    literals = {"style": ROPE_STYLES}
    same_rounding = True

    def pattern(self, op, x, cos, sin, style, turned, end):
        head = op.dsi.rope(op.slice(x, -1, 0, turned), cos, sin, style=style)
        return op.cat([head, op.slice(x, -1, turned, end)], -1)

    def check(self, m):
        m.require(
            m.is_int("turned") and m.same(m.turned, m.shape("cos")[-1]),
            f"{m.turned} channels are turned by a table of {m.shape('cos')[-1]}",
        )
        d = m.shape("x")[-1]
        m.require(isinstance(d, int) and m.is_int("end") and m.end >= d, f"the tail ends at {m.end}, x at {d}")

    def rewrite(self, dsi, m):
        return dsi.rope(m.x, m.cos, m.sin, style=m.style)

    def sample(self, s):
        b, h, t, r = s.size("B"), s.size("H"), s.size("T"), 2 * s.size("P")
        return {
            **s.defaults(),
            "x": s.tensor_of([b, h, t, r + s.size("Q")]),
            "cos": s.tensor_of([b, 1, t, r]),
            "sin": s.tensor_of([t, r]),
            "turned": r,
            "end": s.pick((r + s.size("Q"), 10**9, r + 1)),
        }
