"""[view] -> mm(x, w) or addmm(bias, x, w) -> [view]   ->   dsi.linear(x, w, bias)

A weight that is transposed for the product is stored [N, K]; one that is not is stored [K, N] (`kn`). The views around the product go with
it where they only flatten the leading dimensions and restore them. Seen in: GPT-2's Conv1D (addmm, [K, N]); `x @ w.T`; `torch.matmul` with
a parameter.
"""

from dsi.patterns.rule import Rule


class Linear(Rule):
    """The product of two matrices. Where x was flattened to rows for it, the result is flattened instead."""

    dims = {"bias": "N"}

    def pattern(self, op, x, w, bias, flat):
        stored = op.either("stored", nk=lambda: op.permute(w, [1, 0]), kn=lambda: w)
        rows = op.either("rows", flattened=lambda: op.view(x, flat), plain=lambda: x).named("rows")
        return op.either("bias", given=lambda: op.addmm(bias, rows, stored), absent=lambda: op.mm(rows, stored))

    def check(self, m):
        check_linear(m, bias=True)
        if m.tag("rows") == "flattened":
            m.require(
                m.rank("x") > 2 and m.same(m.shape("x")[-1], m.shape("rows")[-1]),
                f"{list(m.shape('x'))} is not flattened to rows, but regrouped",
            )
            m.require(isinstance(m.output().shape[-1], int), "the size of the result is symbolic")

    def rewrite(self, dsi, m):
        result = dsi.linear(m.x, m.w, m.bias, kn=m.tag("stored") == "kn")
        return dsi.aten.view(result, [-1, m.output().shape[-1]]) if m.tag("rows") == "flattened" else result

    def sample(self, s):
        kn = s.chosen("stored") == "kn"
        b, t, k = s.size("B"), s.size("T"), s.size("K")
        x = s.pick(([b, t, k], [b, k, t])) if s.chosen("rows") == "flattened" else [b * t, k]
        return {"x": s.tensor_of(x), "w": s.tensor("K N" if kn else "N K"), "bias": s.tensor("N"), "flat": [b * t, k]}


class LinearFlattened(Rule):
    """The same with leading dimensions that are flattened to rows before and restored after: x keeps them."""

    dims = {"bias": "N"}

    def pattern(self, op, x, w, bias, flat, sizes):
        stored = op.either("stored", nk=lambda: op.permute(w, [1, 0]), kn=lambda: w)
        rows = op.either("rows", flattened=lambda: op.view(x, flat), plain=lambda: x).named("rows")
        product = op.either("bias", given=lambda: op.addmm(bias, rows, stored), absent=lambda: op.mm(rows, stored))
        return op.view(product.named("product"), sizes)

    def check(self, m):
        check_linear(m, bias=True)
        out, product = m.output().shape, m.shape("product")
        m.require(len(out) > 2, f"the view after the product makes {list(out)}: there are no leading dimensions to restore")
        m.require(
            m.same(out[-1], product[-1]), f"the view after the product makes {list(out)} of {list(product)}, which cuts the last dimension"
        )

    def rewrite(self, dsi, m):
        *leading, _ = m.output().shape
        x = m.x
        if not m.same(m.shape("x"), (*leading, m.shape("rows")[-1])):
            # The sizes as the graph spells them; a symbolic one is a node.
            inner = m.flat[-1] if m.tag("rows") == "flattened" else dsi.size(x, 1)
            x = dsi.aten.view(x, [*m.sizes[:-1], inner])
        return dsi.linear(x, m.w, m.bias, kn=m.tag("stored") == "kn")

    def sample(self, s):
        kn = s.chosen("stored") == "kn"
        b, t, k, n = s.size("B"), s.size("T"), s.size("K"), s.size("N")
        x = [b * t, k] if s.chosen("rows") == "plain" else s.pick(([b, t, k], [b, k, t]))
        return {
            "x": s.tensor_of(x),
            "w": s.tensor("K N" if kn else "N K"),
            "bias": s.tensor("N"),
            "flat": s.pick(([b * t, k], [-1, k])),
            "sizes": s.pick(([b, t, n], [b, -1, n], [t, b, n], [b * t, n])),
        }


class LinearBatched(Rule):
    """The product of x [B, S, K] with one matrix repeated B times: torch's `matmul` of operands that it cannot flatten."""

    dims = {"x": "B S K"}

    def pattern(self, op, x, w, sizes):
        stored = op.either("stored", nk=lambda: op.permute(w, [1, 0]), kn=lambda: w)
        return op.bmm(x, op.expand(stored, sizes).named("repeated"))

    def check(self, m):
        check_linear(m, bias=False)

    def rewrite(self, dsi, m):
        return dsi.linear(m.x, m.w, None, kn=m.tag("stored") == "kn")

    def sample(self, s):
        kn = s.chosen("stored") == "kn"
        return {**s.defaults(), "w": s.tensor("K N" if kn else "N K"), "sizes": [s.size("B"), s.size("K"), s.size("N")]}


class LinearOfOne(Rule):
    """The product of a batch of one with a matrix of the same: `torch.einsum` with a weight of heads, [K, H, D] or [H, D, K]."""

    def pattern(self, op, x, w, flat, flat_w, order):
        rows = op.either("rows", flattened=lambda: op.view(x, flat), plain=lambda: x).named("rows")
        stored = op.either(
            "stored",
            nk=lambda: op.view(op.permute(w, order), flat_w),
            kn=lambda: op.view(w, flat_w),
            matrix=lambda: w,
        ).named("stored")
        return op.bmm(rows, stored)

    def check(self, m):
        rows, stored = m.shape("rows"), m.shape("stored")
        m.require(m.same(rows[0], 1), f"{rows[0]} products of {list(stored[1:])}")
        m.require(m.dtype("x").is_floating_point and m.dtype("w") == m.dtype("x"), f"x is {m.dtype('x')} and the weight {m.dtype('w')}")
        m.require(all(isinstance(size, int) for size in stored), "the size of the weight is symbolic")
        if m.tag("stored") == "nk":
            last = m.rank("w") - 1
            m.require(m.rank("w") > 1 and [d % (last + 1) for d in m.order] == [last, *range(last)], f"the weight is permuted by {m.order}")
            m.require(m.same(m.shape("w")[-1], stored[1]), f"the weight {list(m.shape('w'))} is regrouped to {list(stored[1:])}")

    def rewrite(self, dsi, m):
        _, k, n = m.shape("stored")
        w = dsi.aten.view(m.w, [n, k] if m.tag("stored") == "nk" else [k, n])
        keeps = m.tag("rows") == "flattened" and m.rank("x") > 1 and m.same(m.shape("x")[-1], k)
        x = m.x if keeps else dsi.aten.view(m.x, [m.flat[1] if m.tag("rows") == "flattened" else dsi.size(m.x, 1), k])
        return dsi.aten.view(dsi.linear(x, w, None, kn=m.tag("stored") != "nk"), [1, -1, n])

    def sample(self, s):
        b, t, k, h, d = (s.size(name) for name in "BTKHD")
        weights = {
            "nk": s.pick(([h, d, k], [h * d, k], [d, k, h])),
            "kn": s.pick(([k, h, d], [k, h * d], [h, d, k])),
            "matrix": [1, k, h * d],
        }
        w = weights[s.chosen("stored")]
        return {
            "x": s.tensor_of(s.pick(([b, t, k], [b, k, t], [b * t * k])) if s.chosen("rows") == "flattened" else [1, b * t, k]),
            "w": s.tensor_of(w),
            "flat": [1, b * t, k],
            "flat_w": [1, k, h * d],
            "order": s.pick(([len(w) - 1, *range(len(w) - 1)], [*range(len(w))])),
        }


def check_linear(m, bias):
    """What all three have in common: one floating dtype, and a weight that is a matrix."""
    m.require(m.rank("w") == 2, f"the weight has rank {m.rank('w')}")
    m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")
    m.require(m.dtype("w") == m.dtype("x"), f"x is {m.dtype('x')} and the weight {m.dtype('w')}")
    inner, stored = m.shape("rows" if bias else "x")[-1], m.shape("w")[0 if m.tag("stored") == "kn" else 1]
    m.require(m.same(inner, stored), f"the rows have {inner} channels and the weight {stored}: it is repeated along them")
    if bias and m.present("bias"):
        m.require(m.dtype("bias") == m.dtype("x"), f"x is {m.dtype('x')} and the bias {m.dtype('bias')}")
