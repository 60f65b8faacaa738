"""view(view(x, split) + term, back), where the second view undoes the first   ->   x + view(term, ...)

A term that tells dimensions apart which x has in one: a mask a window, a position a row and a column. Where the term is the same along all
that is in one dimension of x, it stays so; else it is repeated there. One term or two.
Seen in: windows of Swin v2, [B, windows, H, S, L] for the mask only; the decomposed positions of ViTDet and SAM.
"""

import torch
from dsi.patterns.rule import Rule


class RegroupedTerm(Rule):
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, x, split, term, second, back):
        apart = op.view(x, split).named("apart")
        once = apart + term
        return op.view(op.either("terms", one=lambda: once, two=lambda: once + second).named("whole"), back)

    def check(self, m):
        x, apart = m.shape("x"), m.shape("apart")
        m.require(m.same(m.output().shape, x), f"{list(apart)} is viewed as {list(m.output().shape)}, not as {list(x)} again")
        # Batch and heads alone are told apart by attention itself, which repeats no mask for that.
        m.require(len(apart) > 4, f"{list(apart)} are batch, heads, queries and keys")
        m.require(len(apart) > len(x) and groups_of(m) is not None, f"{list(apart)} does not only split dimensions of {list(x)}")
        for name in ("term", "second"):
            if m.present(name):
                m.require(m.dtype(name) == m.dtype("x"), f"the term is {m.dtype(name)}, x is {m.dtype('x')}")
                m.require(m.broadcasts(m.shape(name), apart), f"the term {list(m.shape(name))} of {list(apart)}")

    def rewrite(self, dsi, m):
        groups, rank = groups_of(m), m.rank("apart")

        def regrouped(term):
            missing = rank - dsi.value(term).dim()
            term = dsi.aten.view(term, [1] * missing + dsi.sizes(term)) if missing else term
            sizes = tuple(dsi.value(term).shape)
            kept = [all(m.same(sizes[d], 1) for d in group) for group in groups]
            whole = [1 if alike else m.split[d] for alike, group in zip(kept, groups, strict=True) for d in group]
            if any(not alike and not m.same(sizes[d], m.shape("apart")[d]) for alike, g in zip(kept, groups, strict=True) for d in g):
                term = dsi.aten.clone(dsi.aten.expand(term, whole), memory_format=torch.contiguous_format)
            return dsi.aten.view(term, [1 if alike else size for alike, size in zip(kept, m.back, strict=True)])

        value = dsi.aten.add(m.x, regrouped(m.term))
        return dsi.aten.add(value, regrouped(m.second)) if m.present("second") else value

    def sample(self, s):
        a, b, c, d, e = (s.size(name) for name in "ABCDE")
        x, split, terms = s.pick(
            (
                ([a * b, c, d, e], [a, b, c, d, e], ([1, b, 1, d, e], [b, 1, 1, 1], [a, 1, c, d, 1], [1, 1, 1, d, e])),
                ([a, b * c, d * e], [a, b, c, d, e], ([a, b, c, d, 1], [a, b, c, 1, e], [1, 1, c, 1, 1], [d, e])),
                ([a, b * c, d], [a, b, c, d, 1], ([c, d, 1], [b, 1, 1, 1])),
                ([a, b * c, d], [a, c, b, d, 1], ([b, 1, 1], [c, 1, d, 1])),
            )
        )
        return {
            "x": s.tensor_of(x),
            "split": split,
            "back": s.pick((x, x, [x[1], x[0], *x[2:]])),
            **{name: s.tensor_of(s.pick(terms)) for name in ("term", "second")},
        }


def groups_of(m):
    """The dimensions of the first view that make up each dimension of x, in order; None where they are not whole ones."""
    x, apart = m.shape("x"), list(m.shape("apart"))
    groups: list[list[int]] = []
    d = 0
    for size in x:
        group: list[int] = []
        product = 1
        while not (group and m.same(product, size)):
            if d == len(apart):
                return None
            group.append(d)
            product, d = product * apart[d], d + 1
        groups.append(group)
    # Dimensions of one entry at the end belong to the last group.
    if not groups or any(not m.same(size, 1) for size in apart[d:]):
        return None
    groups[-1] += range(d, len(apart))
    return groups
