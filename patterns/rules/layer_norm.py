"""native_layer_norm(x, [D], weight, bias, eps)[0]   ->   dsi.layer_norm

Seen in: GPT-2, OPT, BERT, GPT-NeoX, BLOOM, Falcon.
"""

from dsi.patterns.rule import Rule


class LayerNorm(Rule):
    dims = {"x": "... D", "weight": "D", "bias": "D"}
    literals = {"eps": (1e-5, 1e-12)}
    same_rounding = True

    def pattern(self, op, x, shape_of_norm, weight, bias, eps):
        def norm(w, b):
            return op.either(
                "spelling",
                native=lambda: op.item(op.native_layer_norm(x, shape_of_norm, w, b, eps), 0),
                composite=lambda: op.layer_norm(x, shape_of_norm, w, b, eps),
            )

        return op.either(
            "affine",
            both=lambda: norm(weight, bias),
            weight=lambda: norm(weight, None),
            bias=lambda: norm(None, bias),
            none=lambda: norm(None, None),
        )

    def check(self, m):
        m.require(len(m.shape_of_norm) == 1, f"it normalises over {len(m.shape_of_norm)} dimensions")
        for name in ("weight", "bias"):
            m.require(not m.present(name) or m.dtype(name) == m.dtype("x"), f"x is {m.dtype('x')} and the {name} is not")

    def rewrite(self, dsi, m):
        return dsi.layer_norm(m.x, m.weight, m.bias, eps=m.eps)

    def sample(self, s):
        return {**s.defaults(), "shape_of_norm": [s.size("D")]}
