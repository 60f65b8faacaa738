"""softmax(maximum(x + mask, lowest))   ->   softmax(x + maximum(mask, lowest))

Where `lowest` is so low that nothing is left of a score that is added to it, and x is a product: scores that are -inf before the mask
are bounded, too. Seen in: XGLM; `clamp(min=torch.finfo(dtype).min)`.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.vocabulary import OPS
from torch import fx

# What is added to a number below this leaves it as it is: fp32 has 24 bits.
_DROWNS = -1e30

_PRODUCTS = {target for name in ("bmm", "mm") for target in OPS[name].overloads}
_PASSED_ON = {target for name in ("view", "clone", "permute", "cast", "mul", "div") for target in OPS[name].overloads}


class LowestBound(Rule):
    dims = {"x": "... C", "mask": "~... C"}
    literals = {"lowest": (torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e31, -5.0)}
    stage = "normalise"

    def pattern(self, op, x, mask, lowest, wide):
        scores = x + mask
        bounded = op.either(
            "spelling",
            maximum=lambda: op.maximum(scores, lowest),
            clamp=lambda: op.call(torch.ops.aten.clamp.default, scores, lowest),
            clamp_min=lambda: op.call(torch.ops.aten.clamp_min.default, scores, lowest),
        )
        return op.softmax(op.maybe_cast(bounded, wide, tag="wide"), -1)

    def check(self, m):
        x = m.dtype("x")
        m.require(x in (torch.float32, torch.bfloat16) and m.dtype("mask") == x, f"x is {x} and the mask {m.dtype('mask')}")
        m.require(m.is_number("lowest") and m.lowest <= _DROWNS, f"a score of {m.lowest} is not below all others")
        m.require(m.lowest >= torch.finfo(x).min, f"{x} does not hold {m.lowest}")
        m.require(is_product(m.x), "scores that are no product may be -inf before the mask")

    def rewrite(self, dsi, m):
        scores = dsi.aten.add(m.x, dsi.call(torch.ops.aten.clamp.default, m.mask, m.lowest))
        return dsi.aten.softmax(dsi.aten.cast(scores, m.wide) if m.cast("wide") is not None else scores, -1)

    def sample(self, s):
        values = s.defaults()
        mask = values["mask"]
        hidden = s.mask_of(mask.shape) if s.pick((True, True, False)) else torch.zeros(mask.shape, dtype=torch.bool)
        return {**values, "mask": mask.masked_fill(~hidden, float("-inf")), "wide": torch.float32}


def is_product(x):
    """Whether a node is a product of matrices, viewed, cast or times a number; of a sample there is no telling."""
    while isinstance(x, fx.Node) and x.target in _PASSED_ON and len(x.all_input_nodes) == 1:
        (x,) = x.all_input_nodes
    return not isinstance(x, fx.Node) or x.target in _PRODUCTS
