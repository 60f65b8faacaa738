"""softmax(x - t, d), where t is the same along d   ->   softmax(x, d)

The same weights: a softmax is less the greatest already. Seen in: models that subtract the maximum themselves (MiMo, early GPT code).
"""

import torch
from dsi.patterns.rule import Rule


class ShiftedSoftmax(Rule):
    literals = {"dim": (-1, 1)}
    stage = "normalise"

    def pattern(self, op, x, shift, dim, wide):
        greatest = op.either(
            "shift", max=lambda: op.item(op.max(x, dim, True), 0), amax=lambda: op.amax(x, [dim], True), other=lambda: shift
        )
        return op.softmax(op.maybe_cast(x - greatest.named("shift_value"), wide, tag="wide"), dim)

    def check(self, m):
        x, shift = m.shape("x"), m.shape("shift_value")
        m.require(m.dtype("x").is_floating_point and m.dtype("shift_value") == m.dtype("x"), "it is not of one floating dtype")
        m.require(m.is_int("dim") and len(shift) == len(x) > 0, f"{list(shift)} is subtracted from {list(x)}")
        m.require(m.same(shift[m.dim], 1) and m.broadcasts(shift, x), f"{list(shift)} is not the same along dimension {m.dim} of {list(x)}")

    def rewrite(self, dsi, m):
        return dsi.aten.softmax(dsi.aten.cast(m.x, m.wide) if m.cast("wide") is not None else m.x, m.dim)

    def sample(self, s):
        values, sizes = s.defaults(), [s.size("A"), 1 + s.size("B"), s.size("C")]
        shift = list(sizes)
        shift[s.pick((values["dim"], values["dim"], 0))] = 1
        return {**values, "x": s.tensor_of(sizes), "shift": s.tensor_of(shift), "wide": torch.float32}
