"""view(f(a · b), [B, H, S, L])   ->   f(view(a · b, [B, H, S, L]))

f is a factor, a term that is added, or both: what is done with the scores of all heads before they are told apart.
Seen in: attention over [B·H, S, D] that is masked by [B, 1, S, L] (DeBERTa v2, fairseq's models).
"""

from dsi.patterns.rule import Rule


class ViewedProduct(Rule):
    literals = {"factor": (0.3, 4)}
    stage = "normalise"
    same_rounding = True

    def pattern(self, op, a, b, factor, term, sizes):
        product = op.bmm(a, b).named("product")
        scaled = op.either("factor", mul=lambda: op.mul(product, factor), div=lambda: op.div(product, factor), none=lambda: product)
        return op.view(op.either("term", added=lambda: scaled + term, none=lambda: scaled).named("whole"), sizes)

    def check(self, m):
        n, *matrix = m.shape("product")
        whole, out = m.shape("whole"), m.output().shape
        m.require(m.tag("factor") != "none" or m.tag("term") == "added", "there is nothing between the product and the view")
        m.require(m.tag("factor") == "none" or m.is_number("factor"), f"the factor is {m.factor}")
        m.require(m.same(whole, (n, *matrix)) and m.dtype("whole") == m.dtype("product"), f"{list(whole)} is more than the product")
        m.require(
            len(out) > 3 and m.same(out[-2:], matrix), f"the view of {list(whole)} as {list(out)} does not only split batch and heads"
        )
        if m.present("term"):
            term = m.shape("term")
            m.require(
                len(term) < 3 or m.same(term[0], n) or m.same(term[0], 1),
                f"a term {list(term)} is added to {list(whole)}",
            )

    def rewrite(self, dsi, m):
        value = dsi.aten.view(dsi.aten.bmm(m.a, m.b), m.sizes)
        if m.tag("factor") != "none":
            value = getattr(dsi.aten, m.tag("factor"))(value, m.factor)
        if not m.present("term"):
            return value
        split = m.rank("term") == 3 and not m.same(m.shape("term")[0], 1)
        term = dsi.aten.view(m.term, [*m.sizes[:-2], dsi.size(m.term, 1), dsi.size(m.term, 2)]) if split else m.term
        return dsi.aten.add(value, term)

    def sample(self, s):
        b, h, t, length, d = (s.size(name) for name in "BHTLD")
        return {
            **s.defaults(),
            "a": s.tensor_of([b * h, t, d]),
            "b": s.tensor_of([b * h, d, length]),
            "term": s.tensor_of(s.pick(([b * h, t, length], [b * h, 1, length], [1, t, length], [t, length], [t, 1]))),
            "sizes": s.pick(([b, h, t, length], [b, h, t, length], [b, h * t, length], [b, h, t * length, 1])),
        }
