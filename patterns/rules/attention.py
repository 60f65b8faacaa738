"""softmax(q kᵀ · scale + mask) v, spelled out   ->   dsi.attention

q, k and v are [B, H, *, *], flattened to B·H matrices for the products. The scale multiplies or divides the scores or q, or is the
product's `alpha` (ALiBi, as `baddbmm`), or is not there; scores may be capped by tanh, biased by position, masked by an added mask or by a
choice, and widened for the softmax. A choice between a score and a number becomes an added bias, which is the same where that number drowns
every score. Sinks are scores of one more key a head, appended to the others for the softmax and dropped after it.
Seen in: every model with `attn_implementation="eager"`; `torch.einsum`; BLOOM (ALiBi), T5 (bias and mask), GPT-Neo (choice and mask), MPT
(bias and choice), Gemma 2 (cap), GPT-OSS (sinks).
"""

import math

import torch
from dsi.patterns.rule import Rule
from dsi.patterns.rules.cast_chain import widens

# In place of a score, a number as low as this hides a key, as the lowest number does: where scores are that low themselves, the numbers of
# fp32 are 8 apart, and no softmax tells them from each other. Another term that is added later may be as low; not as this one.
_HIDES, _HIDES_FROM_MASKS = -1e8, -1e30
# The bias that stands for a choice is fp32. What it is added to drowns in it.
_LOWEST = torch.finfo(torch.float32).min


class Attention(Rule):
    literals = {
        "scale": (0.3, 2.0),
        "q_scale": (0.5, 1.5),
        "cap": (2.0, 5.0),
        "fill": (float("-inf"), torch.finfo(torch.float32).min, -1e9, -5.0),
        "alpha": (0.25, 1.0),
        "beta": (1.0, 2.0),
    }
    dtypes = {"keep": torch.bool}

    def pattern(
        self,
        op,
        q,
        k,
        v,
        mask,
        position,
        third,
        keep,
        alibi,
        sinks,
        scale,
        q_scale,
        cap,
        fill,
        alpha,
        beta,
        flat_q,
        flat_k,
        flat_v,
        flat_p,
        sizes,
        restored,
        narrow,
        column,
        repeated,
        last,
    ):
        scaled_q = op.either("q scale", mul=lambda: q * q_scale, div=lambda: q / q_scale, none=lambda: q)
        wide_q = op.maybe_cast(scaled_q, torch.float32, tag="q wide")

        def matrices(name, x, sizes):
            return op.either(name, viewed=lambda: op.view(x, sizes), plain=lambda: x)

        rows = matrices("rows", op.maybe_contiguous(wide_q, tag="q copy"), flat_q).named("rows")

        def columns(k):
            return op.either(
                "keys",
                permuted=lambda: op.view(op.maybe_contiguous(op.permute(k, [0, 1, 3, 2])), flat_k),
                flattened=lambda: op.permute(op.view(op.maybe_contiguous(k), flat_k), [0, 2, 1]),
                transposed=lambda: op.view(op.maybe_contiguous(k, tag="k copy"), flat_k),
                rows=lambda: op.permute(k, [0, 2, 1]),
                columns=lambda: k,
            )

        keys = columns(op.maybe_cast(k, torch.float32, tag="k wide")).named("columns")

        def plain():
            product = op.view(op.bmm(rows, keys).named("product"), sizes)
            scores = op.maybe_cast(product, torch.float32, tag="scores wide").named("scores")
            scaled = op.either("scale", mul=lambda: scores * scale, div=lambda: scores / scale, none=lambda: scores)
            return op.either("cap", tanh=lambda: cap * op.tanh(scaled / cap), none=lambda: scaled)

        def with_alibi():
            return op.view(op.baddbmm(alibi, rows, keys, beta=beta, alpha=alpha).named("product"), sizes).named("scores")

        scores = op.either("product", plain=plain, alibi=with_alibi)
        placed = op.either("placed", **filled(op, (scores + position).named("biased first"), keep, fill))
        chosen = op.either("choice", **filled(op, scores, keep, fill), biased=lambda: placed, none=lambda: scores)
        masked = op.either(
            "mask",
            added=lambda: chosen + mask,
            twice=lambda: (chosen + position).named("biased") + mask,
            thrice=lambda: ((chosen + position).named("biased") + third).named("biased twice") + mask,
            none=lambda: chosen,
        )
        wide = op.maybe_cast(masked, torch.float32, tag="wide")

        def with_sinks():
            sink = op.expand(op.view(sinks, column).named("one_a_head"), repeated)
            every = op.maybe_cast(op.cat([masked, sink], -1).named("every"), torch.float32, tag="every wide")
            # Less the greatest: the same weights.
            shifted = op.either(
                "shift",
                max=lambda: every - op.item(op.max(every, -1, True), 0),
                amax=lambda: every - op.amax(every, [-1], True),
                none=lambda: every,
            )
            return op.slice(op.softmax(shifted, -1), -1, 0, last).named("kept")

        def zeroed():
            plain = op.softmax(wide, -1)
            return op.either("zeroed", none=lambda: plain, **filled(op, plain, keep, 0.0))

        softmax = op.either("sinks", none=zeroed, appended=with_sinks)
        weights = op.maybe_cast(softmax, narrow, tag="narrow")
        flat_weights = op.view(op.maybe_contiguous(weights), flat_p).named("flat_weights")
        values = matrices("values", op.maybe_contiguous(v, tag="v copy"), flat_v).named("flat_values")
        return matrices("result", op.bmm(flat_weights, values).named("flat_result"), restored)

    def check(self, m):
        m.require(m.rank("scores") == 4, f"the scores have {m.rank('scores')} dimensions, not 4")
        b, h, s, length = m.shape("scores")
        check_sizes(m, h, length)
        d, dv = m.shape("rows")[2], m.shape("flat_values")[2]
        k = (b, h, d, length) if m.tag("keys") == "transposed" else (b, h, length, d)
        # What is viewed without a copy can be viewed as [B, H, *, *] too, and so can what differs in dimensions of one entry only.
        free = {
            "q": m.tag("rows") == "plain" or (m.tag("q copy") == "plain" and m.tag("q scale") == "none" and m.cast("q wide") is None),
            "k": m.tag("keys") in ("rows", "columns") or (m.tag("k copy") == "plain" and m.cast("k wide") is None),
            "v": m.tag("values") == "plain" or m.tag("v copy") == "plain",
        }
        for name, shape in {"q": (b, h, s, d), "k": k, "v": (b, h, length, dv)}.items():
            m.require(
                free[name] or m.same(without_ones(m, m.shape(name)), without_ones(m, shape)),
                f"{name} is {list(m.shape(name))} where the scores are {[b, h, s, length]}",
            )
        matrices = {
            "rows": (s, d),
            "columns": (d, length),
            "product": (s, length),
            "flat_weights": (s, length),
            "flat_values": (length, dv),
            "flat_result": (s, dv),
        }
        for name, matrix in matrices.items():
            m.require(
                m.rank(name) == 3 and m.same(m.shape(name)[1:], matrix),
                f"{name} is {list(m.shape(name))}: it does not only flatten batch and heads",
            )
        check_dtypes(m, "flat_weights", casts=("q wide", "k wide", "scores wide", "wide", "every wide"))
        check_numbers(m, "scale", "q_scale", "cap", "alpha")
        m.require(m.cap is None or m.cap > 0, f"the cap is {m.cap}")
        self._check_masks(m)
        if m.present("sinks"):
            column = m.shape("one_a_head")
            m.require(
                m.rank("sinks") == 1 and m.dtype("sinks").is_floating_point, f"the sinks are {m.dtype('sinks')} {list(m.shape('sinks'))}"
            )
            m.require(len(column) == 4 and m.same(column, (1, h, 1, 1)), f"the sinks {list(column)} are not one a head")
            m.require(m.same(m.shape("every"), (b, h, s, length + 1)), f"the scores with sinks are {list(m.shape('every'))}")
            m.require(m.same(m.shape("kept"), (b, h, s, length)), f"of the weights with sinks {list(m.shape('kept'))} are kept")

    def _check_masks(self, m):
        scores = m.shape("scores")
        for name in ("mask", "position", "third"):
            if m.present(name):
                check_term(m, name, scores)
        if m.present("position"):
            m.require((m.tag("choice") == "biased") == m.present("keep"), "more than two terms are added to the scores")
            m.require(
                not (m.present("keep") and m.present("mask")) and not m.present("alibi"), "more than two terms are added to the scores"
            )
        if m.present("keep"):
            m.require((m.tag("choice"), m.tag("placed")) != ("none", None), "weights are dropped whose scores are not hidden")
            check_choice(m, "scores")
        if m.tag("zeroed") not in (None, "none"):
            m.require(m.tag("zeroed") in (m.tag("choice"), m.tag("placed")), "other weights are dropped than those whose scores are hidden")
            m.require(not m.present("mask"), "weights are dropped after another mask")
        if m.present("alibi"):
            m.require(not m.present("keep"), "there is a bias and a choice")
            m.require(m.beta == 1, f"the bias counts {m.beta} times")
            m.require(
                m.rank("alibi") == 3 and m.dtype("alibi").is_floating_point, f"the bias is {m.dtype('alibi')} {list(m.shape('alibi'))}"
            )
            m.require(m.same(m.shape("alibi")[0], m.shape("product")[0]), f"the bias {list(m.shape('alibi'))} is not one a head")

    def rewrite(self, dsi, m):
        b, h, t, length = m.shape("scores")
        d, dv = m.shape("rows")[2], m.shape("flat_values")[2]
        q = self._by_heads(dsi, m, m.q, (b, h, t, d), matrix_of(dsi, m.q, m.flat_q))
        v = self._by_heads(dsi, m, m.v, (b, h, length, dv), matrix_of(dsi, m.v, m.flat_v))
        sizes = matrix_of(dsi, m.k, m.flat_k)
        if m.tag("keys") in ("flattened", "rows"):
            k = self._by_heads(dsi, m, m.k, (b, h, length, d), sizes)
        elif m.tag("keys") in ("transposed", "columns"):
            k = dsi.aten.permute(self._by_heads(dsi, m, m.k, (b, h, d, length), sizes), [0, 1, 3, 2])
        else:
            k = self._by_heads(dsi, m, m.k, (b, h, length, d), sizes[::-1])
        scale = folded_scale(m)
        if m.present("alpha"):
            scale *= m.alpha
        mask, bias = m.mask, m.position
        if m.tag("choice") == "biased":
            mask = m.position
        if m.present("alibi"):
            bias = dsi.aten.view(m.alibi, [m.sizes[0], m.sizes[1], dsi.size(m.alibi, 1), -1])
        elif m.present("keep"):
            where = "where" in (m.tag("choice"), m.tag("placed"))
            bias = chosen_bias(dsi, m, inverted=not where, nothing=m.tag("zeroed") not in (None, "none"))
        elif m.present("third"):
            terms = (m.position, m.third)
            half = any(dsi.value(x).dtype in (torch.float16, torch.bfloat16) for x in terms)
            bias = dsi.aten.add(*(dsi.aten.cast(x, torch.float32) if half else x for x in terms))
        result = dsi.attention(q, k, v, mask, bias, m.sinks, scale=float(scale), softcap=float(m.cap or 0.0))
        if m.tag("result") == "plain":
            return dsi.aten.view(result, [*m.flat_p[:2], matrix_of(dsi, m.v, m.flat_v)[1]])
        return result if m.same(m.output().shape, (b, h, t, dv)) else dsi.aten.view(result, m.restored)

    def _by_heads(self, dsi, m, x, shape, matrix):
        """The value as [B, H, *, *], whose last two sizes the graph spells `matrix`."""
        return x if m.same(tuple(dsi.value(x).shape), shape) else dsi.aten.view(x, [m.sizes[0], m.sizes[1], *matrix])

    def sample(self, s):
        b, h, t, length, d, dv = s.size("B"), s.size("H"), s.size("T"), s.size("L"), s.size("D"), s.size("V")
        keys = s.chosen("keys")
        k = {
            "transposed": s.pick(([b, h, d, length], [b, h, 1, d, length])),
            "rows": [b * h, length, d],
            "columns": [b * h, d, length],
        }
        return {
            **s.defaults(),
            "narrow": s.dtype,
            "q": s.tensor_of([b * h, t, d] if s.chosen("rows") == "plain" else s.pick(([b, h, t, d], [b, h, t, 1, d]))),
            "k": s.tensor_of(k.get(keys, [b, h, length, d])),
            "v": s.tensor_of(
                [b * h, length, dv] if s.chosen("values") == "plain" else s.pick(([b, h, length, dv], [b * h, length, 1, dv]))
            ),
            "third": s.tensor_of(s.pick(([b, 1, t, length], [1, h, t, 1]))),
            "mask": s.tensor_of(s.pick(([b, 1, t, length], [length], [1, h, 1, length]))),
            "position": s.tensor_of(s.pick(([1, h, t, length], [b, h, t, length], [h, 1, length]))),
            "keep": s.mask_of(
                s.pick(([1, 1, t, length], [b, h, t, length])), invert="masked_fill" in (s.chosen("choice"), s.chosen("placed"))
            ),
            "alibi": s.tensor_of([b * h, s.pick((1, t)), length]),
            "flat_q": [b * h, t, d],
            "flat_k": [b * h, length, d] if keys == "flattened" else [b * h, d, length],
            "flat_v": [b * h, length, dv],
            "flat_p": [b * h, t, length],
            "sizes": [b, h, t, length],
            "restored": s.pick(([b, h, t, dv], [b, h, t, dv], [b, h * t, dv])),
            "sinks": s.tensor_of([h]),
            "column": [1, h, 1, 1],
            "repeated": [b, h, t, 1],
            "last": s.pick((-1, length)),
        }


def filled(op, scores, keep, fill):
    """The branches of a choice between a score and a number."""
    return {"where": lambda: op.where(keep, scores, fill), "masked_fill": lambda: op.masked_fill(scores, keep, fill)}


def check_sizes(m, heads, length):
    """Refuses attention without heads or keys, of which there is no maximum."""
    m.require(not m.same(heads, 0) and not m.same(length, 0), f"there are {heads} heads and {length} keys")


def check_dtypes(m, weights, casts):
    """Refuses what rounds otherwise than attention of q's dtype: `weights` of the sum in another, or one of the `casts` to fewer values."""
    q = m.dtype("q")
    m.require(q.is_floating_point, f"q is {q}")
    m.require(
        q == m.dtype("k") == m.dtype("v") == m.output().dtype,
        f"q, k, v and the result differ in dtype: {q}, {m.dtype('k')}, {m.dtype('v')}",
    )
    for tag in casts:
        m.require(m.cast(tag) is None or widens(q, m.cast(tag)), f"it is computed in {m.cast(tag)}, which rounds values of {q}")
    m.require(m.dtype(weights) == q, f"the weights of the sum are {m.dtype(weights)}, v is {q}")


def check_numbers(m, *names):
    """Refuses what takes part and is computed in the graph."""
    for name in names:
        m.require(not m.present(name) or m.is_number(name), f"{name} is {getattr(m, name)}, not a number")


def folded_scale(m):
    """What q and the scores are multiplied with or divided by, as one factor."""
    scale = 1.0
    for factor, tag in ((m.q_scale, m.tag("q scale")), (m.scale, m.tag("scale"))):
        scale = scale * factor if tag == "mul" else scale / factor if tag == "div" else scale
    return scale


def check_term(m, name, scores):
    """Refuses a term of the scores that is of integers, in which they are fp64 although q is not, or that makes more of them."""
    term = m.dtype(name)
    m.require(
        term.is_floating_point and widens(term, torch.promote_types(m.dtype("q"), torch.float32)), f"the {name} that is added is {term}"
    )
    m.require(m.broadcasts(m.shape(name), scores), f"the {name} {list(m.shape(name))} does not surely broadcast to {list(scores)}")


def check_choice(m, name):
    """Refuses a choice `keep` between a score (of the value `name`) and `fill` that a sum with the score does not stand for."""
    scores = m.shape(name)
    m.require(m.dtype("keep") == torch.bool, f"the choice is made by {m.dtype('keep')}")
    m.require(m.broadcasts(m.shape("keep"), scores), f"the choice {list(m.shape('keep'))} does not surely broadcast to {list(scores)}")
    hides = torch.finfo(torch.float16).min if m.dtype(name) == torch.float16 else _HIDES
    hides = _HIDES_FROM_MASKS if m.present("mask") else hides
    m.require(m.is_number("fill") and m.fill <= hides, f"a score is replaced by {m.fill}, which a sum with the score is not")
    m.require(m.fill >= _LOWEST or m.fill == -math.inf, f"a score is replaced by {m.fill}, which fp32 has not")


def chosen_bias(dsi, m, inverted, nothing=False):
    """What is added to the scores in place of a choice; `inverted`: `keep` says where `fill` is; `nothing`: a row that sees no key is 0."""
    hidden = -math.inf if nothing else m.fill if m.fill == -math.inf or m.present("mask") else _LOWEST
    return dsi.call(torch.ops.aten.where.Scalar, m.keep, *((hidden, 0.0) if inverted else (0.0, hidden)))


def matrix_of(dsi, x, flat):
    """The last two sizes of matrices [B·H, *, *] that x is viewed as, or is."""
    return list(flat[1:]) if flat is not None else dsi.sizes(x)[1:]


def without_ones(m, shape):
    """The sizes that are not 1."""
    return [size for size in shape if not m.same(size, 1)]
