"""convolution of one entry, over channels that lie last in memory   ->   dsi.linear, channels last, seen as channels first

Only where the input is rows of channels already, seen from the side: an image, channels first, is left to torch's convolution.
Seen in: Conformers, speech models' feed-forward layers, gMLP: `conv(x.transpose(1, 2)).transpose(1, 2)`.
"""

import torch
from dsi.patterns.rule import Rule


class PointwiseConvolution(Rule):
    stage = "normalise"

    def pattern(self, op, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
        def convolution(bias):
            more = (stride, padding, dilation, transposed, output_padding, groups)
            return lambda: op.call(torch.ops.aten.convolution.default, x, weight, bias, *more)

        return op.either("bias", given=convolution(bias), absent=convolution(None))

    def check(self, m):
        kernel = m.shape("weight")[2:]
        m.require(all(m.same(size, 1) for size in kernel), f"the kernel is of {list(kernel)} entries")
        m.require(m.transposed is False and m.groups == 1, "it is transposed, or of groups")
        m.require(all(step == 1 for step in m.stride) and not any(m.padding), f"its steps are {m.stride}, its padding is {m.padding}")
        m.require(m.rank("x") == m.rank("weight"), f"the input has {m.rank('x')} dimensions, the weight {m.rank('weight')}")
        dtypes = {m.dtype(name) for name in ("x", "weight", "bias") if m.present(name)}
        m.require(len(dtypes) == 1 and m.dtype("x").is_floating_point, f"its operands are of {', '.join(map(str, dtypes))}")
        m.require(m.same(m.value("x").stride(1), 1), "the channels do not lie last in memory")
        m.require(not m.same(m.shape("x")[1], 0), "there are no channels")

    def rewrite(self, dsi, m):
        last = m.rank("x") - 1
        weight = m.weight
        for dim in range(last, 1, -1):
            weight = dsi.aten.select(weight, dim, 0)
        rows = dsi.aten.permute(m.x, [0, *range(2, last + 1), 1])
        return dsi.aten.permute(dsi.linear(rows, weight, m.bias), [0, last, *range(1, last)])

    def sample(self, s):
        dims = s.pick((1, 2))
        b, k, n = s.size("B"), s.size("K"), s.size("N")
        spatial = [s.size("T"), s.size("U")][:dims]
        x = s.tensor_of([b, *spatial, k])
        return {
            "x": x.permute(0, dims + 1, *range(1, dims + 1)),
            "weight": s.tensor_of([n, k, *[1] * dims]),
            "bias": s.tensor_of([n]),
            "stride": [1] * dims,
            "padding": [0] * dims,
            "dilation": [1] * dims,
            "transposed": False,
            "output_padding": [0] * dims,
            "groups": 1,
        }
