"""a view of x with the shape, strides and offset of x   ->   x

Seen in: `expand` to the size that is there, `x[..., :size]`, `x.view(*x.shape)`, `reshape(B, -1, S, D)` after attention.
"""

from dsi.patterns.dims import same_shape, same_size
from dsi.patterns.rule import Rule
from dsi.patterns.strides import same_strides


class NoOpView(Rule):
    literals = {"start": (0, 1), "dim": (0, 1, 2)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, sizes, order, dim, start, end):
        return op.either(
            "spelling",
            view=lambda: op.view(x, sizes),
            expand=lambda: op.expand(x, sizes),
            permute=lambda: op.permute(x, order),
            slice=lambda: op.slice(x, dim, start, end),
        )

    def check(self, m):
        before, after = m.value("x"), m.output()
        m.require(same_shape(before.shape, after.shape), f"it changes the shape {list(before.shape)} to {list(after.shape)}")
        m.require(same_strides(before, after), f"it changes the strides {list(before.stride())} to {list(after.stride())}")
        m.require(same_size(before.storage_offset(), after.storage_offset()), "it starts elsewhere in memory")

    def rewrite(self, dsi, m):
        return m.x

    def sample(self, s):
        same = [s.size("A"), s.size("B"), s.size("C")]
        other = [1, *same] if s.chosen("spelling") == "expand" else [s.size("A") * s.size("B"), 1, s.size("C")]
        sizes = s.pick((same, other))
        return {**s.defaults(), "x": s.tensor("A B C"), "sizes": sizes, "order": s.pick(([0, 1, 2], [1, 0, 2])), "end": s.pick((2, 10**9))}
