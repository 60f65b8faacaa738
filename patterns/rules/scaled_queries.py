"""(q kᵀ) * t, where t is the same for all keys   ->   (q * t) kᵀ

A factor of attention's scores that is a tensor: one number, or one a head or a query. One that divides likewise.
Seen in: `scores / torch.sqrt(torch.tensor(d))`, scales kept in buffers, learned temperatures (Swin v2).
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.vocabulary import OPS
from torch import fx

_PASSED_ON = {target for name in ("view", "clone", "cast", "slice", "masked_fill") for target in OPS[name].overloads}


class ScaledQueries(Rule):
    stage = "normalise"

    def pattern(self, op, q, columns, factor, flat, sizes):
        rows = op.view(op.maybe_contiguous(q, tag="copy"), flat).named("rows")
        scores = op.either(
            "scores",
            viewed=lambda: op.view(op.bmm(rows, columns), sizes),
            matrices=lambda: op.bmm(q, columns),
        ).named("scores")
        return op.either("factor", mul=lambda: scores * factor, div=lambda: scores / factor)

    def check(self, m):
        scores, factor = m.shape("scores"), m.shape("factor")
        m.require(m.dtype("q").is_floating_point and m.dtype("factor").is_floating_point, "it is of integers")
        m.require(not is_softmax(m.q), "it scales what attention gives, not its scores")
        m.require(m.output().dtype == m.dtype("q"), f"q is {m.dtype('q')}, the scaled scores are {m.output().dtype}")
        m.require(m.broadcasts(factor, scores), f"the factor {list(factor)} does not surely broadcast to {list(scores)}")
        if is_one(m):
            return
        m.require(m.same(factor[-1], 1), f"the factor {list(factor)} is not the same for all keys")
        if m.tag("scores") == "viewed":
            q = m.shape("q")
            m.require(
                len(q) == len(scores) and m.same(q[:-1], scores[:-1]) and m.same(m.shape("rows")[1:], q[-2:]),
                f"q is {list(q)}, the scores are {list(scores)}: they are not viewed alike",
            )

    def rewrite(self, dsi, m):
        factor = dsi.aten.view(m.factor, []) if is_one(m) else m.factor
        q = getattr(dsi.aten, m.tag("factor"))(m.q, factor)
        if m.tag("scores") == "matrices":
            return dsi.aten.bmm(q, m.columns)
        if m.tag("copy") != "plain":
            q = dsi.aten.clone(q, memory_format=torch.contiguous_format)
        return dsi.aten.view(dsi.aten.bmm(dsi.aten.view(q, m.flat), m.columns), m.sizes)

    def sample(self, s):
        b, h, t, length, d = (s.size(name) for name in "BHTLD")
        viewed = s.chosen("scores") == "viewed"
        factor = s.pick(([], [1], [h, 1, 1], [b, h, t, 1], [1, length]) if viewed else ([], [1], [t, 1], [1, length]))
        return {
            "q": s.tensor_of(s.pick(([b, h, t, d], [b, t, h, d])) if viewed else [b, t, d]),
            "columns": s.tensor_of([b * h if viewed else b, d, length]),
            "factor": s.tensor_of(factor).abs() + 0.5,
            "flat": [b * h, t, d],
            "sizes": [b, h, t, length],
        }


def is_softmax(x):
    """Whether a node is the weights of attention, copied or cast; of a sample there is no telling."""
    while isinstance(x, fx.Node) and x.target in _PASSED_ON:
        x = x.args[0]
    return isinstance(x, fx.Node) and x.target in OPS["softmax"].overloads


def is_one(m):
    """Whether the factor is one number."""
    return all(m.same(size, 1) for size in m.shape("factor"))
