"""GELU in its three functions: by erf, by tanh, and x * sigmoid(1.702 x)   ->   dsi.activation

Seen in: BERT, GPT-NeoX, Falcon (erf); GPT-2, GPT-J, Gemma (tanh, spelled out or not); BLOOM (tanh of x * 0.79788456 * (1 + 0.044715 x²));
CLIP (quick).
"""

import math

import torch
from dsi.patterns.rule import Rule


class Gelu(Rule):
    dims = {"x": "..."}
    literals = {
        "root": (math.sqrt(2 / math.pi), 0.79788456),
        "half_root": (math.sqrt(2), 1.41421356),
        "inverse_root": (math.sqrt(0.5), 0.70710678),
    }

    def pattern(self, op, x, root, half_root, inverse_root):
        def tanh():
            inner = op.either(
                "inner",
                cube=lambda: (x + op.cube(x) * 0.044715) * root,
                square=lambda: (
                    (x * root) * (op.either("square", left=lambda: (x * 0.044715) * x, right=lambda: op.square(x) * 0.044715) + 1)
                ),
            )
            return halves(op.tanh(inner) + 1)

        def erf():
            inner = op.either("argument", divided=lambda: x / half_root, times=lambda: x * inverse_root)
            return halves(op.erf(inner) + 1)

        def halves(factor):
            return op.either("half", first=lambda: (x * 0.5) * factor, last=lambda: (x * factor) * 0.5, other=lambda: x * (factor * 0.5))

        return op.either(
            "kind",
            gelu_erf=lambda: op.either("erf", operator=lambda: op.gelu(x, approximate="none"), spelled=erf),
            gelu_tanh=lambda: op.either("tanh", operator=lambda: op.gelu(x, approximate="tanh"), spelled=tanh),
            gelu_quick=lambda: x * op.sigmoid(x * 1.702),
        )

    def check(self, m):
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")
        for name, value in (("root", math.sqrt(2 / math.pi)), ("half_root", math.sqrt(2)), ("inverse_root", math.sqrt(0.5))):
            given = getattr(m, name)
            # As near as people write it: below what the dtype can tell.
            near = 1e-15 if m.dtype("x") == torch.float64 else 1e-8
            m.require(given is None or (m.is_number(name) and abs(given - value) < near * value), f"the factor is {given}, not {value}")

    def rewrite(self, dsi, m):
        return dsi.activation(m.x, m.tag("kind"))
