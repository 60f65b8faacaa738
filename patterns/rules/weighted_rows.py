"""(softmax(x) * factor) v, with one factor a query or a head   ->   softmax(x) v * factor

Weights that are scaled or dropped together scale or drop what they sum. Seen in: masks of heads (BERT, GPT-2: `head_mask`), Flamingo, whose
text before the first picture attends to nothing, decoders whose padded queries are dropped.
"""

import torch
from dsi.patterns.rule import Rule


class WeightedRows(Rule):
    literals = {"nothing": (0.0, 0)}
    dtypes = {"keep": torch.bool}
    stage = "normalise"

    def pattern(self, op, x, v, factor, keep, nothing, narrow, flat, restored):
        plain = op.maybe_cast(op.softmax(x, -1), narrow, tag="narrow").named("weights")
        weights = op.either(
            "form",
            mul=lambda: plain * factor,
            masked_fill=lambda: op.masked_fill(plain, keep, nothing),
            where=lambda: op.where(keep, plain, nothing),
        )
        rows = op.view(op.maybe_contiguous(weights.named("weighted")), flat).named("rows")
        return op.view(op.bmm(rows, v), restored)

    def check(self, m):
        weights, result = m.shape("weights"), tuple(m.output().shape)
        name = "factor" if m.tag("form") == "mul" else "keep"
        m.require(isinstance(m.value(name), torch.Tensor), f"the {name} is {m.value(name)}, a number")
        shape = m.shape(name)
        m.require(len(weights) == 4 and len(result) == 4, f"the weights are {list(weights)}, the result {list(result)}")
        m.require(m.same(result[:3], weights[:3]) and m.same(m.shape("rows")[1:], weights[2:]), "batch, heads and queries are not kept")
        m.require(shape and m.same(shape[-1], 1), f"the {name} {list(shape)} differs from key to key")
        m.require(m.broadcasts(shape, (*weights[:3], 1)), f"the {name} {list(shape)} does not surely broadcast to {list(weights)}")
        m.require(m.dtype("weighted") == m.dtype("weights") == m.output().dtype, f"the {name} makes weights of {m.dtype('weighted')}")
        if name == "keep":
            m.require(m.is_number("nothing") and m.nothing == 0, f"the weights become {m.nothing}")
            m.require(m.dtype("keep") == torch.bool, f"the choice is made by {m.dtype('keep')}")
        else:
            m.require(m.dtype("factor") == m.dtype("weights"), f"the factor is {m.dtype('factor')}, the weights {m.dtype('weights')}")

    def rewrite(self, dsi, m):
        weights = dsi.aten.softmax(m.x, -1)
        if m.cast("narrow") is not None:
            weights = dsi.aten.cast(weights, m.cast("narrow"))
        result = dsi.aten.view(dsi.aten.bmm(dsi.aten.view(weights, m.flat), m.v), m.restored)
        if m.tag("form") == "mul":
            return dsi.aten.mul(result, m.factor)
        if m.tag("form") == "masked_fill":
            return dsi.aten.masked_fill(result, m.keep, 0.0)
        return dsi.call(torch.ops.aten.where.ScalarOther, m.keep, result, 0.0)

    def sample(self, s):
        b, h, t, length, d = (s.size(name) for name in "BHTLD")
        shape = s.pick(([b, 1, t, 1], [1, h, 1, 1], [b, h, t, 1], [h, 1, 1]))
        return {
            **s.defaults(),
            "narrow": s.dtype,
            "x": s.tensor_of([b, h, t, length]),
            "v": s.tensor_of([b * h, length, d]),
            "factor": s.tensor_of(shape),
            "keep": s.tensor_of(shape, torch.bool),
            "flat": [b * h, t, length],
            "restored": [b, h, t, d],
        }
