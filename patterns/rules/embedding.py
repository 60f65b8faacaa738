"""embedding(table, ids)   ->   dsi.embedding

The padding index has no part in the forward pass. Seen in: every language model.
"""

import torch
from dsi.patterns.rule import Rule


class Embedding(Rule):
    dims = {"table": "V E", "ids": "..."}
    literals = {"padding": (-1, 0)}
    same_rounding = True

    def pattern(self, op, table, ids, padding):
        return op.embedding(table, ids, padding)

    def check(self, m):
        m.require(m.dtype("ids") in (torch.int64, torch.int32), f"the ids are {m.dtype('ids')}")

    def rewrite(self, dsi, m):
        return dsi.embedding(m.table, m.ids)

    def sample(self, s):
        return {**s.defaults(), "ids": s.integers("B T", s.size("V"))}
