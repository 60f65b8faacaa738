"""softmax(x) v * sigmoid(logsumexp(x) - sink)   ->   softmax([x, sink])[.., :-1] v

A sink that scales what attention gives is one more key in its softmax, whose value is 0. Seen in: Granite with sliding windows.
"""

import torch
from dsi.patterns.rule import Rule

logsumexp = torch.ops.aten.logsumexp.default


class SinkAfter(Rule):
    stage = "normalise"

    def pattern(self, op, x, v, sinks, column, narrow, flat, restored):
        length = op.call(logsumexp, x, [-1])
        less = op.maybe_cast(length - op.view(sinks, column).named("sink"), torch.float32, tag="less wide")
        factor = op.maybe_cast(op.unsqueeze(op.sigmoid(less), -1), narrow, tag="factor")
        weights = op.maybe_cast(op.softmax(op.maybe_cast(x, torch.float32, tag="wide"), -1), narrow, tag="weights")
        product = op.view(op.bmm(op.view(weights, flat).named("rows"), v), restored)
        return product * factor

    def check(self, m):
        x, v = m.shape("x"), m.dtype("v")
        m.require(len(x) == 4 and m.same(m.shape("rows")[1:], x[2:]), f"the scores {list(x)} are viewed as {list(m.shape('rows'))}")
        m.require(m.rank("sinks") == 1 and m.same(m.shape("sinks")[0], x[1]), f"{list(m.shape('sinks'))} sinks of {x[1]} heads")
        m.require(m.same(m.shape("sink"), (1, x[1], 1)), f"the sinks are viewed as {list(m.shape('sink'))}")
        m.require(m.same(m.output().shape[:3], x[:3]) and len(m.output().shape) == 4, f"the result is {list(m.output().shape)}")
        m.require(m.dtype("x").is_floating_point and m.dtype("sinks") == m.dtype("x") == v, "scores, sinks and values differ in dtype")
        m.require(m.dtype("rows") == v == m.output().dtype, f"v is {v}, the result {m.output().dtype}")

    def rewrite(self, dsi, m):
        b, h, s, _ = dsi.sizes(m.x)
        sink = dsi.aten.expand(dsi.aten.view(m.sinks, [1, h, 1, 1]), [b, h, s, 1])
        weights = dsi.aten.slice(dsi.aten.softmax(dsi.aten.cat([m.x, sink], -1), -1), -1, 0, -1)
        weights = dsi.aten.clone(weights, memory_format=torch.contiguous_format)
        return dsi.aten.view(dsi.aten.bmm(dsi.aten.view(weights, m.flat), m.v), m.restored)

    def sample(self, s):
        b, h, t, length, d = (s.size(name) for name in "BHTLD")
        return {
            "x": s.tensor_of([b, h, t, length]),
            "v": s.tensor_of([b * h, length, d]),
            "sinks": s.tensor_of([h]),
            "column": [1, h, 1],
            "narrow": s.dtype,
            "flat": [b * h, t, length],
            "restored": s.pick(([b, h, t, d], [b, h, t, d], [b, h * t, d])),
        }
