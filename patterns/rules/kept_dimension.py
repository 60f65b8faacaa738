"""unsqueeze(f(mean(x, d)), d)   ->   f(mean(x, d, keepdim))

A dimension that is reduced and made again is kept. f is what a norm does in between: a factor, an epsilon and a root, each of them or none.
The sum and the variance likewise. Seen in: norms that write `x.pow(2).mean(-1)` and `[..., None]` or `unsqueeze(-1)` later.
"""

from dsi.patterns.rule import Rule


class KeptDimension(Rule):
    literals = {"axis": (-1, 1, 2), "dim": (-1, 2, 1), "number": (0.25, 3), "eps": (1e-5, 1e-3), "correction": (0, 1)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, axis, dim, number, eps, correction):
        reduced = op.either(
            "reduction",
            mean=lambda: op.mean(x, [axis]),
            sum=lambda: op.sum(x, [axis]),
            var=lambda: op.var(x, [axis], correction=correction),
        )
        scaled = op.either("factor", mul=lambda: reduced * number, div=lambda: reduced / number, none=lambda: reduced)
        above = op.either("eps", added=lambda: scaled + eps, none=lambda: scaled)
        root = op.either(
            "root",
            rsqrt=lambda: op.rsqrt(above),
            sqrt=lambda: op.sqrt(above),
            pow=lambda: op.pow(above, -0.5),
            none=lambda: above,
        )
        return op.unsqueeze(root, dim)

    def check(self, m):
        rank = m.rank("x")
        m.require(m.is_int("axis") and m.is_int("dim"), "the dimension is computed in the graph")
        m.require(rank > 0 and m.axis % rank == m.dim % rank, f"dimension {m.axis} of {rank} is reduced and {m.dim} is made")

    def rewrite(self, dsi, m):
        if m.tag("reduction") == "var":
            value = dsi.aten.var(m.x, [m.axis], correction=m.correction, keepdim=True)
        else:
            value = getattr(dsi.aten, m.tag("reduction"))(m.x, [m.axis], True)
        if m.tag("factor") != "none":
            value = getattr(dsi.aten, m.tag("factor"))(value, m.number)
        if m.tag("eps") == "added":
            value = dsi.aten.add(value, m.eps)
        if m.tag("root") == "pow":
            return dsi.aten.pow(value, -0.5)
        return value if m.tag("root") == "none" else getattr(dsi.aten, m.tag("root"))(value)

    def sample(self, s):
        x = s.tensor_of([s.size("A"), s.size("B"), 2 + s.size("C")])
        return {**s.defaults(), "x": x.abs() if s.chosen("root") != "none" else x}
