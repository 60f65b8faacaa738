"""permute(f(permute(x, order)), back)   ->   f(x), for an activation f

Seen in: feed-forward layers of convolutions, channels first, whose products are linears with channels last.
"""

from dsi.patterns.rule import Rule


class TurnedActivation(Rule):
    literals = {"order": ([0, 2, 1], [2, 0, 1]), "back": ([0, 2, 1], [1, 2, 0]), "approximate": ("none", "tanh")}
    stage = "normalise"

    def pattern(self, op, x, order, back, approximate):
        turned = op.permute(x, order)
        active = op.either(
            "kind",
            relu=lambda: op.relu(turned),
            silu=lambda: op.silu(turned),
            gelu=lambda: op.gelu(turned, approximate=approximate),
            tanh=lambda: op.tanh(turned),
            sigmoid=lambda: op.sigmoid(turned),
        )
        return op.permute(active, back)

    def check(self, m):
        m.require(all(isinstance(d, int) for d in (*m.order, *m.back)), "the order is computed in the graph")
        rank = m.rank("x")
        found = [m.order[d % rank] % rank for d in m.back]
        m.require(found == list(range(rank)), f"it comes back in the order {found}")

    def rewrite(self, dsi, m):
        more = {"approximate": m.approximate} if m.tag("kind") == "gelu" else {}
        return getattr(dsi.aten, m.tag("kind"))(m.x, **more)

    def sample(self, s):
        return {**s.defaults(), "x": s.tensor_of([s.size("A"), s.size("B"), s.size("C")])}
