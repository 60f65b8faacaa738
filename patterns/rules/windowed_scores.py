"""view(softmax(f(view(a · b, [B, W, H, S, L])), -1), [B·W·H, S, L])   ->   the same of view(a · b, [B·W, H, S, L])

Blocks, windows or streams of a sequence are sequences of their own. Keys that are repeated for the heads of a group are left to the rules
that read them where they are. Seen in: local attention of LongT5 and Pegasus X, Hiera, ProphetNet's streams.
"""

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.permuted_scores import FILLS, between, built, check_terms, terms
from dsi.patterns.vocabulary import OPS
from torch import fx

_PASSED_ON = {target for name in ("view", "clone", "permute", "cast") for target in OPS[name].overloads}


class WindowedScores(Rule):
    literals = {"scale": (0.3, 2.0), "cap": (2.0, 5.0), "fill": FILLS, "first_fill": FILLS}
    dtypes = {"keep": torch.bool, "first": torch.bool}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, a, b, sizes, flat, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow):
        product = op.bmm(a, b).named("x")
        scores = op.view(product, sizes).named("viewed")
        weights = between(op, scores, scale, cap, bias, keep, fill, mask, first, first_fill, wide, narrow)
        return op.view(op.maybe_contiguous(weights), flat)

    def check(self, m):
        viewed, (n, s, length) = m.shape("viewed"), m.shape("x")
        m.require(len(viewed) == 5, f"the scores have {len(viewed)} dimensions, not 5")
        batch, windows, heads, *matrix = viewed
        m.require(m.same((batch * windows * heads, *matrix), (n, s, length)), f"{[n, s, length]} is viewed as {list(viewed)}")
        m.require(m.same(m.output().shape, (n, s, length)), f"the view makes {list(m.output().shape)}, not {[n, s, length]}")
        m.require(not is_repeated(m.b), "the keys are repeated for the heads of a group")
        check_terms(m, viewed)

    def rewrite(self, dsi, m):
        def merged(x):
            sizes = tuple(dsi.value(x).shape)
            if len(sizes) < 4:
                return x
            rest = [dsi.size(x, d) for d in range(len(sizes) - 3, len(sizes))]
            if m.same(sizes[:-3], (1,) * (len(sizes) - 3)):
                return dsi.aten.view(x, [1, *rest])
            every = dsi.aten.expand(x, [*m.sizes[:2], *rest])
            return dsi.aten.view(dsi.aten.clone(every, memory_format=torch.contiguous_format), [-1, *rest])

        scores = dsi.aten.view(dsi.aten.bmm(m.a, m.b), [-1, *m.sizes[2:]])
        return dsi.aten.view(built(dsi, m, scores, merged), m.flat)

    def sample(self, s):
        batch, windows, heads, t, length, d = (s.size(name) for name in "BWHTLD")
        sizes = [batch, windows, heads, t, length]
        shape = s.pick(
            (sizes, [1, windows, 1, t, length], [batch, 1, 1, 1, length], [1, 1, heads, t, length], [windows, 1, t, 1], sizes[2:])
        )
        given = terms(s, sizes[1:])
        return {
            **s.defaults(),
            **given,
            **{name: s.tensor_of(shape) for name in ("bias", "mask")},
            **{name: s.mask_of(shape) for name in ("keep", "first")},
            "a": s.tensor_of([batch * windows * heads, t, d]),
            "b": s.tensor_of([batch * windows * heads, d, length]),
            "sizes": sizes,
            "flat": s.pick(([batch * windows * heads, t, length],) * 3 + ([batch, windows * heads * t, length],)),
        }


def is_repeated(x):
    """Whether a node is an expanded value, viewed, copied, permuted or cast; of a sample there is no telling."""
    while isinstance(x, fx.Node) and x.target in _PASSED_ON:
        x = x.args[0]
    return isinstance(x, fx.Node) and x.target in OPS["expand"].overloads
