"""softmax(view(x, sizes), -1)   ->   view(softmax(x, -1), sizes)

Where the view only merges leading dimensions of x, batch and heads into one for a product, say. Seen in: TrOCR, SpeechT5, LED.
"""

from dsi.patterns.rule import Rule
from dsi.patterns.vocabulary import OPS
from torch import fx


class SoftmaxView(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, sizes):
        return op.softmax(op.view(x, sizes).named("merged"), -1)

    def check(self, m):
        x, merged = m.shape("x"), m.shape("merged")
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")
        chain = isinstance(m.x, fx.Node) and m.x.target in OPS["view"].overloads
        m.require(not chain, "x is a view: views of views become one first, or none")
        m.require(len(x) > len(merged) > 1, f"the view of {list(x)} as {list(merged)} merges nothing")
        m.require(m.same(x[-1], merged[-1]), f"the softmax is over {merged[-1]} of the {x[-1]} entries of x's last dimension")

    def rewrite(self, dsi, m):
        return dsi.aten.view(dsi.aten.softmax(m.x, -1), m.sizes)

    def sample(self, s):
        b, h, t, c = s.size("B"), s.size("H"), s.size("T"), s.size("C")
        return {
            "x": s.tensor_of([b, h, t, c]),
            "sizes": s.pick(([b * h, t, c], [b, h * t, c], [b * h * t, c], [b, h, t * c], [b * h, t * c])),
        }
