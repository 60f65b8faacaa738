"""cast(cast(x, wide), dtype)   ->   cast(x, to)

The first cast must keep every value of x: it widens. Casting there and back is then casting nowhere.
Seen in: a norm's `.float()` behind another one's `.to(dtype)`.
"""

import torch
from dsi.patterns.rule import Rule

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of dtype `narrow` is exact in dtype `wide`."""
    if narrow == wide:
        return True
    if narrow in (torch.float16, torch.bfloat16):
        return wide in (torch.float32, torch.float64)
    return narrow == torch.float32 and wide == torch.float64


class CastChain(Rule):
    dims = {"x": "..."}
    literals = {"wide": (torch.float32, torch.float16), "to": (torch.float32, torch.float16, torch.bfloat16)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, wide, to):
        inner = op.cast(x, wide).named("inner")
        return op.cast(inner, to), inner

    def check(self, m):
        m.require(m.dtype("x") in _FLOATS, f"x is {m.dtype('x')}")
        m.require(widens(m.dtype("x"), m.dtype("inner")), f"the cast from {m.dtype('x')} to {m.dtype('inner')} rounds")
        m.require(m.output().dtype in _FLOATS, f"the second cast is to {m.output().dtype}")

    def rewrite(self, dsi, m):
        if m.output().dtype == m.dtype("x"):
            return m.x, dsi.keep
        return dsi.aten.cast(m.x, m.output().dtype), dsi.keep
