"""dropout(x, p, train) with p = 0 or train = False   ->   x

Seen in: models traced with their dropout in evaluation mode.
"""

from dsi.patterns.rule import Rule


class NoOpDropout(Rule):
    dims = {"x": "..."}
    literals = {"p": (0.0, 0.5), "train": (False, True)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, p, train):
        return op.either(
            "spelling",
            native=lambda: op.item(op.native_dropout(x, p, train), 0),
            composite=lambda: op.dropout(x, p, train),
        )

    def check(self, m):
        m.require(m.train is False or m.p == 0, f"dropout with p = {m.p} in training mode is random")

    def rewrite(self, dsi, m):
        return m.x
