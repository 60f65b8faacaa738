"""activation(gate) * up   ->   dsi.gated

Seen in: Llama, Mistral, Qwen (silu); Gemma (gelu_tanh).
"""

from dsi.ir.ops import ACTIVATIONS
from dsi.patterns.rule import Rule


class Gated(Rule):
    dims = {"gate": "... N", "up": "... N"}
    literals = {"kind": tuple(ACTIVATIONS)}
    same_rounding = True

    def pattern(self, op, gate, up, kind):
        return op.dsi.activation(gate, kind) * up

    def check(self, m):
        m.require(m.dtype("gate") == m.dtype("up"), f"the gate is {m.dtype('gate')} and the other factor {m.dtype('up')}")

    def rewrite(self, dsi, m):
        return dsi.gated(m.gate, m.up, m.kind)
