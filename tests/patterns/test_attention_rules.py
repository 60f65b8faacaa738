"""Spelled-out attention and repeated heads: the spellings that are it, and those that only look like it."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
import torch.nn.functional as F
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.normalise import normalise
from dsi.passes.recognise import recognise

from bench.families.trial import compiled_and_reports

G = torch.Generator().manual_seed(5)
B, H, S, L, D, DV = 2, 3, 5, 7, 4, 6
MIN = torch.finfo(torch.float32).min
BF = torch.bfloat16


def randn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=G)


Q, K, V = randn(B, H, S, D), randn(B, H, L, D), randn(B, H, L, DV)
MASK = torch.where(torch.rand(B, 1, S, L, generator=G) < 0.6, 0.0, MIN)
KEEP = torch.rand(1, 1, S, L, generator=G) < 0.6
KEEP[..., 0] = True


def attend(q, k, v, mask=None, scale=0.5, dim=-1):
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim) @ v


def stages(fn, *args, symbolic=False):
    """Both stages on `fn`, checked; the one attention node, or None, and the graph."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    aliases = output_aliases(gm)
    for stage in (normalise, recognise):
        stage(gm, context)
        check_graph(gm, "aten", context.fake_mode, aliases)
    half = any(a.dtype in (BF, torch.float16) for a in args)
    torch.testing.assert_close(gm(*args), fn(*args), **({"rtol": 3e-2, "atol": 3e-2} if half else {"rtol": 1e-4, "atol": 1e-5}))
    nodes = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.attention.default]
    assert len(nodes) <= 1
    return (nodes[0] if nodes else None), gm


def argument(node, name):
    """An argument of an attention node by its name."""
    names = [a.name for a in node.target._schema.arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


POSITIVE = {
    "plain": (lambda q, k, v: attend(q, k, v), {"scale": 0.5}),
    "no scale": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, {"scale": 1.0}),
    "divided": (lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v, {"scale": 0.25}),
    "scale on q": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, {"scale": 0.3}),
    "scale on q and on the scores": (lambda q, k, v: ((q * 0.3) @ k.mT / 2).softmax(-1) @ v, {"scale": 0.15}),
    "capped": (lambda q, k, v: (5.0 * torch.tanh(q @ k.mT * 0.5 / 5.0)).softmax(-1) @ v, {"scale": 0.5, "softcap": 5.0}),
    "softmax over dimension 3": (lambda q, k, v: attend(q, k, v, dim=3), {"scale": 0.5}),
    "from [B, S, H, D]": (lambda q, k, v: attend(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))), {"scale": 0.5}),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_spellings(name):
    fn, attributes = POSITIVE[name]
    node, _ = stages(fn, Q, K, V)
    assert node is not None
    for key, value in attributes.items():
        assert node.kwargs[key] == pytest.approx(value)


@pytest.mark.parametrize("shape", [(B, 1, S, L), (1, 1, 1, L), (H, 1, L), (L,)])
def test_an_added_mask(shape):
    mask = randn(*shape)
    node, _ = stages(lambda q, k, v, m: attend(q, k, v, m), Q, K, V, mask)
    assert argument(node, "mask").op == "placeholder"
    assert stages(lambda q, k, v, m: (m + 0.5 * (q @ k.mT)).softmax(-1) @ v, Q, K, V, mask)[0] is not None


@pytest.mark.parametrize("fill", [float("-inf"), MIN, -1e9, -1e20])
def test_a_choice_becomes_a_bias(fill):
    node, _ = stages(lambda q, k, v, m: torch.where(m, q @ k.mT, fill).softmax(-1) @ v, Q, K, V, KEEP)
    assert argument(node, "bias") is not None
    node, _ = stages(lambda q, k, v, m: (q @ k.mT).masked_fill(~m, fill).softmax(-1) @ v, Q, K, V, KEEP)
    assert argument(node, "bias") is not None


def test_a_bias_by_position_before_a_choice():
    """As MPT does with ALiBi; a third term is one too many."""
    bias = randn(H, 1, L)
    hidden = lambda q, k, v, a, m: (q @ k.mT * 0.5 + a).masked_fill(~m, MIN).softmax(-1) @ v  # noqa: E731
    node, _ = stages(hidden, Q, K, V, bias, KEEP)
    assert argument(node, "mask") is not None and argument(node, "bias") is not None
    node, _ = stages(lambda q, k, v, a, m: torch.where(m, q @ k.mT + a, MIN).softmax(-1) @ v, Q, K, V, bias, KEEP)
    assert node is not None
    three = lambda q, k, v, a, m, c: ((q @ k.mT + a).masked_fill(~m, MIN) + c).softmax(-1) @ v  # noqa: E731
    assert stages(three, Q, K, V, bias, KEEP, MASK)[0] is None


def test_rows_that_a_choice_hides_altogether_stay_as_in_eager():
    nothing = torch.zeros(1, 1, S, L, dtype=torch.bool)
    node, _ = stages(lambda q, k, v, m: torch.where(m, q @ k.mT, MIN).softmax(-1) @ v, Q, K, V, nothing)
    assert node is not None, "stages compares the numbers"


def test_a_choice_of_the_lowest_number_of_half_precision():
    q, k, v = (t.half() for t in (Q, K, V))
    hidden = lambda q, k, v, m: (q @ k.mT).masked_fill(~m, -65504.0).softmax(-1) @ v  # noqa: E731
    assert stages(hidden, q, k, v, KEEP)[0] is not None
    wide = lambda q, k, v, m: (q @ k.mT).float().masked_fill(~m, -65504.0).softmax(-1).half() @ v  # noqa: E731
    assert stages(wide, q, k, v, KEEP)[0] is None, "a score in fp32 may be lower"


def test_a_choice_that_another_mask_follows_must_be_lower():
    for fill, found in ((-1e9, False), (MIN, True)):
        node, _ = stages(lambda q, k, v, m, n, fill=fill: ((q @ k.mT).masked_fill(m, fill) + n).softmax(-1) @ v, Q, K, V, ~KEEP, MASK)
        assert (node is not None) == found


def test_two_choices_are_one():
    twice = lambda q, k, v, m: torch.where(m[..., :1], (q @ k.mT).masked_fill(~m, -1e9), -1e9).softmax(-1) @ v  # noqa: E731
    assert argument(stages(twice, Q, K, V, KEEP)[0], "bias") is not None
    other = lambda q, k, v, m: (q @ k.mT).masked_fill(~m, -1e9).masked_fill(m[..., :1], -1e10).softmax(-1) @ v  # noqa: E731
    assert stages(other, Q, K, V, KEEP)[0] is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (H, 1, 1), (B, 1, 1, 1), (1, 1, S, 1), (B, H, S, 1)], ids=str)
def test_a_factor_that_is_a_tensor(shape):
    factor = torch.rand(shape, generator=G) + 0.5
    for fn in (lambda q, k, v, f: (q @ k.mT * f).softmax(-1) @ v, lambda q, k, v, f: (q @ k.mT / f).softmax(-1) @ v):
        node, _ = stages(fn, Q, K, V, factor)
        assert node is not None and node.kwargs["scale"] == 1.0


def test_a_factor_that_is_a_tensor_of_one_head_and_in_half_precision():
    q, k, v = (t[:, 0] for t in (Q, K, V))
    assert stages(lambda q, k, v, f: (q @ k.mT / f).softmax(-1) @ v, q, k, v, torch.tensor([2.0]))[0] is not None
    half = [t.to(BF) for t in (Q, K, V)]
    fn = lambda q, k, v, f: (q @ k.mT * f).softmax(-1) @ v  # noqa: E731
    assert stages(fn, *half, torch.rand(H, 1, 1, generator=G).to(BF))[0] is not None
    wide = lambda q, k, v, f: (q @ k.mT * f).softmax(-1).to(BF) @ v  # noqa: E731
    assert stages(wide, *half, torch.rand(H, 1, 1, generator=G))[0] is None, "the scores are fp32 after it"


@pytest.mark.parametrize("shape", [(L,), (1, 1, 1, L), (S, L), (1, 1, S, L)], ids=str)
def test_a_factor_that_differs_between_keys_is_left(shape):
    assert stages(lambda q, k, v, f: (q @ k.mT * f).softmax(-1) @ v, Q, K, V, torch.rand(shape, generator=G))[0] is None


@pytest.mark.parametrize("shape", [(H, 1, 1), (B, H, S, 1), ()], ids=str)
def test_a_factor_of_the_result_is_none_of_the_scores(shape):
    gate = torch.rand(shape, generator=G)
    for fn in (
        lambda q, k, v, g: attend(q, k, v) * g,
        lambda q, k, v, g: ((q @ k.mT).float().softmax(-1).to(BF) @ v) * g,
        lambda q, k, v, g: (q @ k.mT).softmax(-1) @ (v * g[..., :1, :] if g.dim() else v * g),
    ):
        args = [t.to(BF) for t in (Q, K, V, gate)]
        assert stages(fn, *args)[0] is not None


def test_sinks_that_scale_the_result():
    """As Granite's sliding windows do."""

    def attend_less(q, k, v, sinks, mask, dim=1):
        scores = q @ k.mT * 0.5 + mask
        shape = [1, 1, 1]
        shape[dim] = -1
        less = (torch.logsumexp(scores, -1) - sinks.view(shape)).float().sigmoid()
        attended = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
        return attended * less.unsqueeze(-1).to(q.dtype)

    node, _ = stages(attend_less, Q, K, V, randn(H), MASK.clamp(min=-1e20))
    assert argument(node, "sinks").op == argument(node, "mask").op == "placeholder"
    half = [t.to(BF) for t in (Q, K, V, randn(H), MASK.clamp(min=-1e20))]
    assert argument(stages(attend_less, *half)[0], "sinks") is not None
    a_row = lambda q, k, v, sinks, mask: attend_less(q, k, v, sinks, mask, dim=2)  # noqa: E731
    node, _ = stages(a_row, Q, K, V, randn(S), MASK.clamp(min=-1e20))
    assert node is None, "the scores are read by the sum, too"


SCALED_LATE = {
    "two factors": (lambda q, k, v, m: (q @ k.mT / 4 * 0.5).softmax(-1) @ v, 0.125),
    "a mask is scaled, too": (lambda q, k, v, m: ((q @ k.mT + m) * 0.5).softmax(-1) @ v, 0.5),
    "two factors and a mask": (lambda q, k, v, m: (q @ k.mT / 4 * 0.5 + m).softmax(-1) @ v, 0.125),
    "a choice is scaled, too": (lambda q, k, v, m: ((q @ k.mT).masked_fill(m < -1, -1e9) / 2).softmax(-1) @ v, 0.5),
    "one term is scaled, one not": (lambda q, k, v, m: ((q @ k.mT + m) * 0.5 + m[..., :1, :]).softmax(-1) @ v, 0.5),
}


@pytest.mark.parametrize("name", SCALED_LATE)
def test_scores_that_are_scaled_late(name):
    fn, scale = SCALED_LATE[name]
    node, _ = stages(fn, Q, K, V, MASK.clamp(min=-1e20))
    assert node is not None and node.kwargs["scale"] == pytest.approx(scale)
    if name == "a mask is scaled, too":
        assert stages(fn, *(t.to(BF) for t in (Q, K, V, MASK.clamp(min=-1e20))))[0] is not None


def test_scores_in_float_of_half_precision():
    q, k, v, m = (t.to(BF) for t in (Q, K, V, MASK.clamp(min=-1e38)))
    node, _ = stages(lambda q, k, v, m: ((q @ k.mT).float() * 0.5 + m).softmax(-1).to(BF) @ v, q, k, v, m)
    assert node.kwargs["scale"] == 0.5


def test_a_factor_of_two_terms_that_no_softmax_follows_is_left():
    gm = stages(lambda q, k, v, m: (q @ k.mT + m) * 0.5, Q, K, V, MASK)[1]
    assert aten_graphs.targets(gm)[-2:] == ["aten.add.Tensor", "aten.mul.Tensor"]


@pytest.mark.parametrize("bound", [lambda s: torch.clamp(s, min=MIN), lambda s: torch.max(s, torch.full((), MIN))])
def test_scores_that_are_at_least_the_lowest_number(bound):
    """As XGLM does. A row that sees no key has equal weights."""
    nothing = torch.full((B, 1, S, L), float("-inf"))
    for mask in (MASK, nothing):
        node, _ = stages(lambda q, k, v, m: bound(q @ k.mT * 0.5 + m).softmax(-1) @ v, Q, K, V, mask)
        assert argument(node, "mask") is not None
    assert stages(lambda q, k, v, m: torch.clamp(q @ k.mT * 0.5 + m, min=-5.0).softmax(-1) @ v, Q, K, V, MASK)[0] is None


def test_scores_that_are_hidden_before_they_are_bounded():
    """The bound is for rows that see no key: they have equal weights."""
    fn = lambda q, k, v, m, n: torch.clamp((q @ k.mT).masked_fill(m, float("-inf")) + n, min=MIN).softmax(-1) @ v  # noqa: E731
    assert stages(fn, Q, K, V, torch.ones(S, L, dtype=torch.bool), MASK)[0] is None, "stages compares the numbers"


def test_scores_of_integers_are_left():
    """Whose numbers have no lowest one, and no infinity."""
    scores, keep = torch.randint(-5, 5, (B, S, H, L), generator=G), torch.rand(B, H, S, L, generator=G) < 0.5
    permuted = lambda x, m: torch.where(m, x.transpose(1, 2), -5).float().softmax(-1).transpose(1, 2)  # noqa: E731
    moved = lambda x, m: x.view(B * H, 1, S, L).masked_fill(m, -5).float().softmax(-1).view(B * H, S, L)  # noqa: E731
    assert stages(permuted, scores, keep)[0] is None
    assert stages(moved, scores.view(B * H, S, L), keep.view(B * H, 1, S, L))[0] is None


def test_a_third_term():
    """As XLNet and Funnel have it; a fourth is one too many."""
    terms = (randn(1, H, S, L), randn(B, 1, 1, L), MASK)
    node, _ = stages(lambda q, k, v, a, b, c: (q @ k.mT * 0.5 + a + b + c).softmax(-1) @ v, Q, K, V, *terms)
    assert argument(node, "mask").op == "placeholder" and argument(node, "bias").target == torch.ops.aten.add.Tensor
    four = lambda q, k, v, a, b, c, d: (q @ k.mT * 0.5 + a + b + c + d).softmax(-1) @ v  # noqa: E731
    assert stages(four, Q, K, V, *terms, randn(L))[0] is None
    half = [t.to(BF) for t in (Q, K, V, *terms[:2], MASK.clamp(min=-1e38))]
    assert stages(lambda q, k, v, a, b, c: (q @ k.mT + a + b + c).softmax(-1, dtype=torch.float32).to(BF) @ v, *half)[0] is not None


def test_terms_that_are_subtracted_and_scaled():
    def xlnet(q, k, v, positions, hidden):
        return ((q @ k.mT + positions + 0) * 0.25 - 1e30 * hidden).softmax(-1) @ v

    node, _ = stages(xlnet, Q, K, V, randn(B, H, S, L), (randn(B, 1, S, L) > 1).float())
    assert node.kwargs["scale"] == 0.25 and argument(node, "bias") is not None and argument(node, "mask") is not None
    assert stages(lambda q, k, v, m: (m - q @ k.mT).softmax(-1) @ v, Q, K, V, MASK)[0] is None, "the scores are subtracted"


def test_scores_less_their_greatest():
    for shift in (lambda s: s.amax(-1, keepdim=True), lambda s: s.max(-1, keepdim=True).values):
        node, _ = stages(lambda q, k, v, shift=shift: (lambda s: (s - shift(s)).softmax(-1) @ v)(q @ k.mT * 0.5), Q, K, V)
        assert node.kwargs["scale"] == 0.5
    node, _ = stages(lambda q, k, v: (lambda s: (s - s.amax(-2, keepdim=True)).softmax(-1) @ v)(q @ k.mT), Q, K, V)
    assert node is None, "less the greatest of the queries"


def test_scores_less_what_drowns_them():
    """Queries that are padding see all keys alike."""
    padding = torch.tensor([0.0, 1e30, 0.0, 1e30, 1e30])[:, None]
    node, _ = stages(lambda q, k, v, p: (q @ k.mT - p).softmax(-1) @ v, Q, K, V, padding)
    assert node is None, "stages compares the numbers"


@pytest.mark.parametrize("fill", [float("-inf"), MIN, -1e9])
def test_weights_that_are_dropped_where_scores_were_hidden(fill):
    """A row that sees no key is 0."""

    def conformer(q, k, v, m):
        return (q @ k.mT).masked_fill(m, fill).softmax(-1).masked_fill(m, 0.0) @ v

    for keep in (KEEP, torch.zeros_like(KEEP)):
        if fill != float("-inf") or bool(keep.any()):
            assert argument(stages(conformer, Q, K, V, ~keep)[0], "bias") is not None
    where = lambda q, k, v, m: torch.where(m, torch.where(m, q @ k.mT, fill).softmax(-1), 0.0) @ v  # noqa: E731
    assert stages(where, Q, K, V, KEEP)[0] is not None


DROPPED = {
    "by another mask": lambda q, k, v, m: (q @ k.mT).masked_fill(m, MIN).softmax(-1).masked_fill(m.flip(-1), 0.0) @ v,
    "without hidden scores": lambda q, k, v, m: (q @ k.mT).softmax(-1).masked_fill(m, 0.0) @ v,
    "the other ones": lambda q, k, v, m: torch.where(m, (q @ k.mT).masked_fill(m, MIN).softmax(-1), 0.0) @ v,
    "for a number": lambda q, k, v, m: (q @ k.mT).masked_fill(m, MIN).softmax(-1).masked_fill(m, 0.5) @ v,
    "after another mask": lambda q, k, v, m: ((q @ k.mT).masked_fill(m, MIN) + v[0, 0, :, 0]).softmax(-1).masked_fill(m, 0.0) @ v,
}


@pytest.mark.parametrize("name", DROPPED)
def test_weights_that_are_dropped_otherwise(name):
    assert stages(DROPPED[name], Q, K, V, ~KEEP)[0] is None


ROWS = {
    "masks of heads": lambda q, k, v, m, f: ((q @ k.mT * 0.3 + m).softmax(-1) * f[:, :1, :, None]) @ v,
    "a factor a query": lambda q, k, v, m, f: ((q @ k.mT + m).softmax(-1, dtype=torch.float32).to(q.dtype) * f[..., None]) @ v,
    "queries without anything to see": lambda q, k, v, m, f: (q @ k.mT + m).softmax(-1).masked_fill((f > 0)[..., None], 0.0) @ v,
    "those that have": lambda q, k, v, m, f: torch.where((f > 0)[..., None], (q @ k.mT + m).softmax(-1), 0.0) @ v,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_weights_that_are_scaled_or_dropped_as_one(name):
    node, gm = stages(ROWS[name], Q, K, V, MASK, randn(B, H, S))
    assert argument(node, "mask") is not None and "aten.bmm.default" not in aten_graphs.targets(gm)
    stages(ROWS[name], *(t.to(BF) for t in (Q, K, V, MASK, randn(B, H, S))))


def test_a_product_onto_memory_alone():
    """As diffusers and Megatron have it: `beta` is 0."""

    def attend(q, k, v, m, beta=0, alpha=0.25, split=True):
        q, k, v = (t.reshape(B * H, *t.shape[2:]) for t in (q, k, v))
        scores = torch.baddbmm(torch.zeros(B * H, S, L, dtype=q.dtype), q, k.mT, beta=beta, alpha=alpha)
        scores = scores.view(B, H, S, L) + m if split else scores
        return torch.bmm(scores.softmax(-1).view(B * H, S, L), v)

    assert stages(attend, Q, K, V, MASK)[0].kwargs["scale"] == 0.25
    assert stages(lambda *args: attend(*args, alpha=1), Q, K, V, MASK)[0].kwargs["scale"] == 1.0
    assert stages(lambda *args: attend(*args, split=False), Q, K, V, MASK)[0].kwargs["scale"] == 0.25
    stages(attend, *(t.to(BF) for t in (Q, K, V, MASK)))
    assert stages(lambda *args: attend(*args, beta=2), Q, K, V, MASK)[0] is None, "a term that counts twice"


def test_weights_that_are_scaled_key_by_key():
    keys, wide = randn(B, 1, 1, L), randn(B, H, S, 1).double()
    assert stages(lambda q, k, v, f: ((q @ k.mT).softmax(-1) * f) @ v, Q, K, V, keys)[0] is None
    assert stages(lambda q, k, v, f: (((q @ k.mT).softmax(-1) * f) @ v.double()).float(), Q, K, V, wide)[0] is None


def test_batch_and_heads_in_one_for_the_products_alone():
    """As fairseq's models do: positions lead, and heads are told apart for the mask only."""

    def attend(q, k, v, m, scale=None):
        q, k, v = (t.reshape(t.shape[0], B * H, t.shape[3]).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))
        scores = scores if scale is None else scores * scale
        weights = (scores.view(B, H, S, L) + m).view(B * H, S, L).softmax(-1)
        return torch.bmm(weights, v).transpose(0, 1).reshape(S, B, H * DV)

    args = (*(t.permute(2, 0, 1, 3).contiguous() for t in (Q, K, V)), MASK)
    node, _ = stages(attend, *args)
    assert [tuple(a.meta["val"].shape) for a in node.args[:3]] == [(B, H, S, D), (B, H, L, D), (B, H, L, DV)]
    node, _ = stages(lambda *args: attend(*args, scale=0.3), *args)
    assert node.kwargs["scale"] == 0.3


def test_terms_that_are_added_before_heads_are_told_apart():
    """As DeBERTa v2 does."""

    def attend(q, k, v, positions, m):
        q, k, v = (t.reshape(B * H, t.shape[2], t.shape[3]) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2) / 2) + positions
        weights = scores.view(B, H, S, L).masked_fill(m, MIN).softmax(-1)
        return torch.bmm(weights.view(B * H, S, L), v).view(B, H, S, DV)

    for shape in ((B * H, S, L), (B * H, 1, L), (1, S, L), (S, L)):
        node, _ = stages(attend, Q, K, V, randn(*shape), ~KEEP)
        assert argument(node, "mask") is not None and argument(node, "bias") is not None


def weights_of(scores, base=torch.exp, dim=-1, less=True):
    powers = base(scores - scores.amax(dim, keepdim=True) if less else scores)
    return powers / powers.sum(dim, keepdim=True)


SOFTMAXES = {
    "exp": (lambda q, k, v: weights_of(q @ k.mT * 0.5) @ v, 0.5),
    "less the maximum of other scores": (
        lambda q, k, v: (lambda e: e / e.sum(-1, True))(torch.exp(q @ k.mT - (q.tanh() @ k.mT).max(-1, True)[0])) @ v,
        None,
    ),
    "less the maximum of the same scores, made again": (
        lambda q, k, v: (lambda e: e / e.sum(-1, True))(torch.exp(q @ k.mT - (q @ k.mT).max(-1, True)[0])) @ v,
        1.0,
    ),
    "exp of the scores": (lambda q, k, v: weights_of(q @ k.mT * 0.5, less=False) @ v, 0.5),
    "exp2": (lambda q, k, v: weights_of(q @ k.mT * 0.5 * 1.4426950408889634, torch.exp2) @ v, 0.5),
    "exp2 of another scale": (lambda q, k, v: weights_of(q @ k.mT, torch.exp2) @ v, 0.6931471805599453),
    "over the queries": (lambda q, k, v: weights_of(q @ k.mT * 0.5, dim=-2) @ v, None),
    "the sum is over the queries": (lambda q, k, v: (lambda e: e / e.sum(-2, True))(torch.exp(q @ k.mT)) @ v, None),
    "one more than the sum": (lambda q, k, v: (lambda e: e / (e.sum(-1, True) + 1))(torch.exp(q @ k.mT)) @ v, None),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_spelled_out(name):
    fn, scale = SOFTMAXES[name]
    node, _ = stages(fn, Q, K, V)
    assert (node is None) if scale is None else node.kwargs["scale"] == pytest.approx(scale)


def test_half_precision_with_the_softmax_in_float():
    q, k, v = (t.to(BF) for t in (Q, K, V))
    mask = MASK.clamp(min=-1e38).to(BF)
    node, _ = stages(lambda q, k, v, m: F.softmax(q @ k.mT * 0.5 + m, dim=-1, dtype=torch.float32).to(BF) @ v, q, k, v, mask)
    assert node is not None
    node, _ = stages(lambda q, k, v: (q.float() @ k.float().mT).softmax(-1).to(BF) @ v, q, k, v)
    assert node is not None, "scores in fp32, as GPT-Neo computes them"


def test_double_precision_with_the_softmax_in_float_is_left():
    """The operator would compute in fp64 what the model rounds to fp32."""
    q, k, v = (t.double() for t in (Q, K, V))
    assert stages(lambda q, k, v: F.softmax(q @ k.mT * 0.5, dim=-1, dtype=torch.float32).double() @ v, q, k, v)[0] is None
    assert stages(lambda q, k, v: (q @ k.mT * 0.5).softmax(-1) @ v, q, k, v)[0] is not None


def alibi_attention(slopes, q, k, v, alpha=0.5, beta=1.0):
    flat_q, flat_k = q.reshape(B * H, S, D), k.reshape(B * H, L, D).transpose(1, 2)
    scores = slopes.baddbmm(flat_q, flat_k, beta=beta, alpha=alpha).view(B, H, S, L)
    return (scores.softmax(-1).view(B * H, S, L) @ v.reshape(B * H, L, DV)).view(B, H, S, DV)


def test_alibi():
    node, _ = stages(lambda a, q, k, v: alibi_attention(a, q, k, v), randn(B * H, 1, L), Q, K, V)
    assert node.kwargs["scale"] == 0.5
    assert tuple(argument(node, "bias").meta["val"].shape) == (B, H, 1, L)
    assert stages(lambda a, q, k, v: alibi_attention(a, q, k, v, beta=2.0), randn(B * H, 1, L), Q, K, V)[0] is None
    assert stages(lambda a, q, k, v: alibi_attention(a, q, k, v), randn(1, 1, L), Q, K, V)[0] is None


def with_sinks(q, k, v, sinks, mask=None, heads=H, keep=-1, less=True, narrow=None):
    scores = q @ k.mT * 0.5
    scores = scores if mask is None else scores + mask
    every = torch.cat([scores, sinks.reshape(1, heads, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    every = every - every.max(-1, keepdim=True).values if less else every
    weights = every.softmax(-1)[..., :keep]
    return (weights if narrow is None else weights.to(narrow)) @ v


def test_sinks():
    sinks = randn(H) * 3
    node, _ = stages(with_sinks, Q, K, V, sinks)
    assert argument(node, "sinks").op == "placeholder"
    node, _ = stages(lambda q, k, v, s, m: with_sinks(q, k, v, s, m, less=False), Q, K, V, sinks, MASK)
    assert argument(node, "mask").op == argument(node, "sinks").op == "placeholder"
    nothing = torch.full((B, 1, S, L), float("-inf"))
    assert stages(with_sinks, Q, K, V, sinks, nothing)[0] is not None, "a row that sees no key is 0"
    node, _ = stages(lambda q, k, v, s: with_sinks(q, k, v, s, narrow=BF), *(t.to(BF) for t in (Q, K, V, sinks)))
    assert node is not None


def test_what_only_looks_like_sinks():
    first = lambda q, k, v, s: torch.cat([s.reshape(1, H, 1, 1).expand(B, H, S, 1), q @ k.mT], -1).softmax(-1)[..., :-1] @ v  # noqa: E731
    assert stages(first, Q, K, V, randn(H))[0] is None, "the first key is the sink, the last one is dropped"
    a_row = lambda q, k, v, s: torch.cat([q @ k.mT, s.reshape(1, 1, S, 1).expand(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ v  # noqa: E731
    assert stages(a_row, Q, K, V, randn(S))[0] is None
    dropped = lambda q, k, v, s: with_sinks(q, k, v[:, :, :-1], s, keep=-2)  # noqa: E731
    assert stages(dropped, Q, K, V, randn(H))[0] is None, "a key is dropped with the sink"


SQUARE = (randn(B, H, S, D), randn(B, H, S, D), randn(B, H, S, DV))
NEGATIVE = {
    "softmax over the queries": (lambda q, k, v: attend(q, k, v, dim=-2), SQUARE),
    "softmax over the heads": (lambda q, k, v: attend(q, k, v, dim=1), SQUARE),
    "q and k exchanged, transposed after": (lambda q, k, v: (k @ q.mT * 0.5).softmax(-2).mT @ v, SQUARE),
    "weights transposed": (lambda q, k, v: (q @ k.mT * 0.5).softmax(-1).mT @ v, SQUARE),
    "alpha on the mask": (lambda q, k, v: torch.add(q @ k.mT, q.sum(-1, keepdim=True), alpha=2).softmax(-1) @ v, SQUARE),
    "a mask multiplied": (lambda q, k, v: (q @ k.mT * k.sum(-1)[:, :, None]).softmax(-1) @ v, SQUARE),
    "cap and its inverse differ": (lambda q, k, v: (5.0 * torch.tanh(q @ k.mT / 4.0)).softmax(-1) @ v, SQUARE),
    "a small number in place of a score": (
        lambda q, k, v: (q @ k.mT).masked_fill(q.sum(-1, keepdim=True) > 0, -5.0).softmax(-1) @ v,
        SQUARE,
    ),
    "a number added": (lambda q, k, v: (q @ k.mT + 1.5).softmax(-1) @ v, SQUARE),
    "two numbers added": (lambda q, k, v: (q @ k.mT + 1.5 + 2.5).softmax(-1) @ v, SQUARE),
    "a choice of a number that fp32 has not": (
        lambda q, k, v: (q @ k.mT).masked_fill(q.sum(-1, keepdim=True) > 0, -1e300).softmax(-1) @ v,
        tuple(t.double() for t in SQUARE),
    ),
    "the weights are returned": (lambda q, k, v: (lambda w: (w @ v, w))((q @ k.mT * 0.5).softmax(-1)), SQUARE),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_only_looks_like_attention(name):
    fn, args = NEGATIVE[name]
    assert stages(fn, *args)[0] is None


def test_scores_flattened_for_the_softmax():
    """As TrOCR does: batch and heads are one dimension, but for the mask."""

    def flat(q, k, v, mask):
        q, k, v = (t.reshape(B * H, *t.shape[2:]) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, L) + mask
        weights = scores.view(-1, S, L).softmax(-1).view(B * H, S, L)
        return torch.bmm(weights, v).view(B, H, S, DV)

    assert stages(flat, Q, K, V, MASK)[0] is not None
    q, k, v = randn(B, H, S, D), randn(B, H, 6, D), randn(B, H, 6, DV)

    def cut(q, k, v):
        q, k, v = (t.reshape(B * H, *t.shape[2:]) for t in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, 6).view(-1, S, 3).softmax(-1).view(B * H, S, 6)
        return torch.bmm(weights, v).view(B, H, S, DV)

    assert stages(cut, q, k, v)[0] is None, "a softmax over half of the keys each"


def test_batch_and_heads_of_one_size_exchanged():
    """As many sequences as heads: shapes alone cannot tell [B, H, S, D] from [H, B, S, D]. The numbers must be those of eager."""
    q, k, v = randn(3, 3, 5, 4), randn(3, 3, 5, 4), randn(3, 3, 5, 4)
    stages(lambda q, k, v: attend(q, k.transpose(0, 1), v), q, k, v)
    stages(lambda q, k, v: attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)), q, k, v)
    stages(lambda q, k, v: attend(q, k, v.transpose(0, 1)), q, k, v)
    mask = randn(3, 1, 5, 5)
    stages(lambda q, k, v, m: attend(q, k, v, m.transpose(0, 1)), q, k, v, mask)


def test_heads_and_positions_of_one_size_exchanged():
    q, k, v = randn(2, 5, 5, 4), randn(2, 5, 5, 4), randn(2, 5, 5, 4)
    stages(lambda q, k, v: attend(q.transpose(1, 2), k, v), q, k, v)
    stages(lambda q, k, v: attend(q, k.transpose(1, 2), v), q, k, v)
    stages(lambda q, k, v: attend(q, k, v.transpose(1, 2)), q, k, v)


# -------------------------------------------------------------------------------------------------------------- repeated heads


def repeat(x, n):
    b, g, length, d = x.shape
    return x[:, :, None].expand(b, g, n, length, d).reshape(b, g * n, length, d)


KG, VG, QG = randn(B, 2, L, D), randn(B, 2, L, DV), randn(B, 6, S, D)


def test_repeated_heads_are_read_where_they_are():
    for fn in (
        lambda q, k, v: torch.ops.dsi.attention(q, repeat(k, 3), repeat(v, 3), scale=0.5),
        lambda q, k, v: attend(q, repeat(k, 3), repeat(v, 3)),
    ):
        node, gm = stages(fn, QG, KG, VG)
        assert [tuple(a.meta["val"].shape) for a in node.args[1:3]] == [KG.shape, VG.shape]
        assert not [t for t in aten_graphs.targets(gm) if "expand" in t or "clone" in t]


def test_repeated_heads_with_a_mask_and_symbolic_sizes():
    mask = randn(B, 1, S, L)
    node, _ = stages(lambda q, k, v, m: torch.ops.dsi.attention(q, repeat(k, 3), repeat(v, 3), m, scale=0.5), QG, KG, VG, mask)
    assert node.args[1].meta["val"].shape[1] == 2
    assert node.args[3].op == "placeholder"


@pytest.mark.parametrize("shape", [(B, H, D, L), (B, D, H, L)], ids=["keys by channels", "keys by channels, heads inside"])
def test_keys_that_lie_by_channels(shape):
    columns = (lambda k: k) if shape[1] == H else (lambda k: k.transpose(1, 2))
    node, _ = stages(lambda q, k, v: (q @ columns(k) * 0.5).softmax(-1) @ v, Q, randn(*shape), V)
    assert tuple(node.args[1].meta["val"].shape) == (B, H, L, D)
    assert stages(lambda q, k, v: (q @ columns(k) * 0.5).softmax(-1) @ v.mT, Q, randn(*shape), V.mT.contiguous())[0] is not None


def test_repeated_keys_that_lie_by_channels():
    by_channels = lambda q, k, v: (q @ repeat(k, 3) * 0.5).softmax(-1) @ repeat(v, 3)  # noqa: E731
    node, gm = stages(by_channels, QG, KG.mT.contiguous(), VG)
    assert [tuple(a.meta["val"].shape) for a in node.args[1:3]] == [KG.shape, VG.shape]
    assert not [t for t in aten_graphs.targets(gm) if "expand" in t or "clone" in t]
    interleaved = lambda q, k, v: attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))  # noqa: E731
    assert stages(interleaved, QG, KG, VG)[0].args[1].meta["val"].shape[1] == 2


SYMBOLIC = {
    "matmul": (lambda q, k, v, m: (q @ k.mT * 0.5 + m).softmax(-1) @ v, False),
    "einsum": (
        lambda q, k, v, m: torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 + m).softmax(-1), v),
        True,
    ),
    "by queries": (
        lambda q, k, v, m: torch.einsum(
            "bqhk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bqhk", q, k) * 0.5 + m.transpose(1, 2)).softmax(-1), v
        ),
        True,
    ),
    "sdpa": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.5), False),
}


@pytest.mark.parametrize(
    ("name", "mask"),
    [("matmul", (B, 1, S, L)), ("matmul", (1, H, 1, L)), ("einsum", (1, 1, S, L)), ("by queries", (B, 1, S, L)), ("sdpa", (1, 1, S, L))],
)
def test_a_symbolic_number_of_heads_is_part_of_the_batch(name, mask):
    fn, rows = SYMBOLIC[name]
    args = [*(t.transpose(1, 2).contiguous() if rows else t.clone() for t in (Q, K, V)), randn(*mask)]
    for t in args:
        for d in [d for d, size in enumerate(t.shape) if size > 1 and (d < 3 or t is args[3])]:
            torch._dynamo.mark_dynamic(t, d)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled, reports = compiled_and_reports(fn)
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-5)
        if mask[1] == 1:
            more = [*(torch.cat([t, t], 2 if rows else 1) for t in args[:3]), args[3]]
            torch.testing.assert_close(compiled(*more), fn(*more), rtol=1e-4, atol=1e-5)
    (report,) = reports
    assert report.hits["symbolic_heads"] == 1 and not report.unfused, "for any number of heads, and a kernel can be made"


WRONG_REPEATS = {
    "tiled": lambda x, n: x[:, None].expand(B, n, 2, L, x.shape[3]).reshape(B, 2 * n, L, x.shape[3]),
    "repeat": lambda x, n: x.repeat(1, n, 1, 1),
    "along the positions": lambda x, n: x[:, :, :, None].expand(B, 2, L, n, x.shape[3]).reshape(B, 2 * n, L, x.shape[3]),
}


@pytest.mark.parametrize("name", WRONG_REPEATS)
def test_another_order_of_heads_is_not_absorbed(name):
    wrong = WRONG_REPEATS[name]
    node, _ = stages(lambda q, k, v: torch.ops.dsi.attention(q, wrong(k, 3), wrong(v, 3), scale=0.5), QG, KG, VG)
    assert node.args[1].meta["val"].shape[1] == 6


def test_only_one_of_both_repeated_is_not_absorbed():
    v = randn(B, 6, L, DV)
    node, _ = stages(lambda q, k, v: torch.ops.dsi.attention(q, repeat(k, 3), v, scale=0.5), QG, KG, v)
    assert node.args[1].meta["val"].shape[1] == 6


def test_a_repeated_key_that_is_read_elsewhere_is_not_absorbed():
    def fn(q, k, v):
        wide = repeat(k, 3)
        return torch.ops.dsi.attention(q, wide, repeat(v, 3), scale=0.5), wide.cos()

    node, _ = stages(fn, QG, KG, VG)
    assert node.args[1].meta["val"].shape[1] == 6


def einsum(scores, result):
    return lambda q, k, v: torch.einsum(result, (torch.einsum(scores, q, k) * 0.5).softmax(-1), v)


BY_HEADS = einsum("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd")
BY_ROWS = einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd")


@pytest.mark.parametrize("sizes", [(B, H, S, L), (1, H, S, L), (B, 1, S, L), (B, H, 1, L), (1, 1, 1, L), (3, 3, 3, 3)], ids=str)
def test_attention_by_einsum(sizes):
    """torch moves dimensions of one entry elsewhere than others."""
    b, h, s, length = sizes
    node, _ = stages(BY_HEADS, randn(b, h, s, D), randn(b, h, length, D), randn(b, h, length, DV))
    assert node is not None and node.kwargs["scale"] == 0.5
    node, _ = stages(BY_ROWS, randn(b, s, h, D), randn(b, length, h, D), randn(b, length, h, DV))
    assert node is not None
    joined = lambda q, k, v: BY_ROWS(q, k, v).reshape(b, s, h * DV)  # noqa: E731
    assert stages(joined, randn(b, s, h, D), randn(b, length, h, D), randn(b, length, h, DV))[0] is not None


BY_QUERIES = ("bqhd,bkhd->bqhk", "bqhk,bkhd->bqhd")
QUERIES_FIRST = ("qbhd,kbhd->qbhk", "qbhk,kbhd->qbhd")
SIZES = [(B, H, S, L), (1, H, S, L), (B, 1, S, L), (B, H, 1, L), (1, H, 1, L), (1, 1, S, L), (1, 1, 1, L), (3, 3, 3, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scores_by_queries(sizes):
    """One query, one head or a batch of one are moved by views, not by permutes."""
    b, h, s, length = sizes
    q, k, v = randn(b, s, h, D), randn(b, length, h, D), randn(b, length, h, DV)
    node, gm = stages(einsum(*BY_QUERIES), q, k, v)
    assert node is not None and node.kwargs["scale"] == 0.5
    assert node.args[0].meta["val"].numel() == q.numel() and "softmax" not in " ".join(aten_graphs.targets(gm))
    assert stages(einsum(*QUERIES_FIRST), *(t.transpose(0, 1).contiguous() for t in (q, k, v)))[0] is not None

    def masked(q, k, v, m):
        scores = (torch.einsum(BY_QUERIES[0], q, k) * 0.5).masked_fill(m, MIN)
        return torch.einsum(BY_QUERIES[1], scores.softmax(-1), v)

    for shape in ((b, 1, 1, length), (b, s, 1, length), (s, 1, length), (length,)):
        node, _ = stages(masked, q, k, v, torch.rand(shape, generator=G) > 0.6)
        assert argument(node, "bias") is not None


def test_scores_by_queries_with_a_cap_a_bias_and_a_mask_in_half_precision():
    def fn(q, k, v, bias, mask):
        scores = 4.0 * torch.tanh(torch.einsum(BY_QUERIES[0], q, k) / 2 / 4.0) + bias + mask
        return torch.einsum(BY_QUERIES[1], scores.softmax(-1, dtype=torch.float32).to(BF), v)

    args = (randn(B, S, H, D), randn(B, L, H, D), randn(B, L, H, DV), randn(S, H, L), randn(B, 1, 1, L))
    node, _ = stages(fn, *(a.to(BF) for a in args))
    assert node.kwargs["softcap"] == 4.0 and argument(node, "bias") is not None and argument(node, "mask") is not None


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: torch.einsum(BY_QUERIES[1], torch.einsum(BY_QUERIES[0], q, k).softmax(1), v),  # over the queries
        lambda q, k, v: torch.einsum(BY_QUERIES[1], torch.einsum(BY_QUERIES[0], q, k).softmax(2), v),  # over the heads
        lambda q, k, v: torch.einsum("bhqk,bkhd->bqhd", torch.einsum(BY_QUERIES[0], q, k).softmax(-1), v),  # queries taken for heads
        lambda q, k, v: torch.einsum("bqkh,bkhd->bqhd", torch.einsum(BY_QUERIES[0], q, k).softmax(-1), v),  # keys taken for heads
        lambda q, k, v: torch.einsum(BY_QUERIES[1], (torch.einsum(BY_QUERIES[0], q, k) * q.sum(-1)[..., None, :]).softmax(-1), v),
    ],
)
def test_what_only_looks_like_scores_by_queries(fn):
    assert stages(fn, *(t[..., :3].contiguous() for t in CUBE))[0] is None


def test_attention_by_einsum_with_a_mask_in_half_precision():
    masked = lambda q, k, v, m: torch.einsum(  # noqa: E731
        "bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) / 2 + m).softmax(-1, dtype=torch.float32).to(BF), v
    )
    q, k, v, m = (t.to(BF) for t in (randn(B, S, H, D), randn(B, L, H, D), randn(B, L, H, DV), MASK.clamp(min=-1e38)))
    node, _ = stages(masked, q, k, v, m)
    assert argument(node, "mask").op == "placeholder"


CUBE = tuple(randn(3, 3, 3, 4) for _ in range(3))


@pytest.mark.parametrize(
    ("scores", "result"),
    [
        ("bhqd,bhkd->bhqk", "hbqk,bhkd->bhqd"),  # weights of other heads
        ("bhqd,bhkd->bhqk", "bhkq,bhkd->bhqd"),  # weights transposed
        ("bhqd,bhkd->bqhk", "bhqk,bhkd->bhqd"),  # heads taken for queries
        ("bhqd,bhkd->bhqk", "bhqk,bhqd->bhqd"),  # no sum over keys but a scaling
        ("bhqd,bgkd->bhqk", "bhqk,bhkd->bhqd"),  # summed over the heads of the keys
        ("bhqd,bhkd->bhqk", "bhqk,bgkd->bhqd"),  # ... and of the values
    ],
)
def test_what_only_looks_like_attention_by_einsum(scores, result):
    """All of batch, heads, queries and keys have one size, so that shapes say nothing."""
    assert stages(einsum(scores, result), *CUBE)[0] is None


def test_heads_and_batch_exchanged_in_an_operand_are_read_so():
    """Keys stored [H, B, L, D], or scores: attention of what is permuted first."""
    assert stages(einsum("bhqd,hbkd->bhqk", "bhqk,hbkd->bhqd"), *CUBE)[0] is not None
    assert stages(einsum("bhqd,bhkd->hbqk", "bhqk,bhkd->bhqd"), *CUBE)[0] is not None


def test_scores_that_are_written_to_in_place():
    """The views of what einsum gives are undone and done again for it, as functional graphs have it."""

    def attend_in_place(q, k, v, m):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores += m
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    gm, context = aten_graphs.aten_graph(attend_in_place, *(t.transpose(1, 2).contiguous() for t in (Q, K, V)), MASK)
    for stage in (normalise, recognise):
        stage(gm, context)
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.attention.default]
    assert argument(node, "mask") is not None


W = 3
WINDOWS = (randn(B, W, H, S, D), randn(B, W, H, L, D), randn(B, W, H, L, DV))


@pytest.mark.parametrize("shape", [None, (B, W, 1, S, L), (1, W, 1, 1, L), (B, 1, 1, 1, L), (H, S, L), (L,)], ids=str)
def test_windows_are_sequences_of_their_own(shape):
    if shape is None:
        node, _ = stages(attend, *WINDOWS)
    else:
        node, _ = stages(attend, *WINDOWS, randn(*shape))
        hidden = lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v  # noqa: E731
        assert argument(stages(hidden, *WINDOWS, torch.rand(shape, generator=G) > 0.6)[0], "bias") is not None
    assert [tuple(a.meta["val"].shape) for a in node.args[:3]] == [(B * W, H, S, D), (B * W, H, L, D), (B * W, H, L, DV)]


def test_windows_by_einsum():
    """As LongT5 has them: heads lie inside of the blocks."""
    local = einsum("...qhd,...khd->...hqk", "...hqk,...khd->...qhd")
    node, _ = stages(local, *(t.transpose(2, 3).contiguous() for t in WINDOWS))
    assert node.args[0].meta["val"].shape == (B * W, H, S, D)
    assert stages(lambda q, k, v: (q @ k.mT).softmax(2) @ v, *WINDOWS)[0] is None, "over the heads"


@pytest.mark.parametrize("twice", [False, True])
def test_a_mask_of_windows(twice):
    """As Swin has it: scores [B · windows, H, S, L], a mask a window; version 2 adds it twice."""
    windows = 3

    def attend(q, k, v, positions, mask):
        scores = (q @ k.mT * 0.5 + positions).view(B, windows, H, S, L) + mask[None, :, None]
        scores = scores + mask[None, :, None] if twice else scores
        return scores.view(B * windows, H, S, L).softmax(-1) @ v

    q, k, v = (randn(B * windows, H, *size) for size in ((S, D), (L, D), (L, DV)))
    node, _ = stages(attend, q, k, v, randn(1, H, S, L), randn(windows, S, L))
    assert argument(node, "mask") is not None and argument(node, "bias") is not None


def test_positions_by_row_and_column():
    """As ViTDet and SAM have them: scores [B, rows · columns, rows · columns], a term for the rows of keys and one for their columns."""
    rows, columns = 2, 3

    def attend(q, k, v, by_row, by_column):
        scores = (q @ k.mT).view(B, rows, columns, rows, columns) + by_row[..., None] + by_column[..., None, :]
        return scores.view(B, rows * columns, rows * columns).softmax(-1) @ v

    args = (*(randn(B, rows * columns, D) for _ in range(3)), randn(B, rows, columns, rows), randn(B, rows, columns, columns))
    node, _ = stages(attend, *args)
    assert argument(node, "mask") is not None and argument(node, "bias") is not None

    def turned(q, k, v, by_row, by_column):
        scores = (q @ k.mT).view(B, columns, rows, columns, rows) + by_column.transpose(1, 2)[..., None]
        return scores.view(B, rows * columns, rows * columns).softmax(-1) @ v

    assert stages(turned, *args)[0] is not None, "and the numbers are compared"
    cut = lambda q, k, v, m: ((q @ k.mT).view(B, 4, 9) + m).view(B, 6, 6).softmax(-1) @ v  # noqa: E731
    assert stages(cut, *args[:3], randn(B, 4, 9))[0] is None, "a view that cuts rows"


ONE_HEAD = (randn(B, S, D), randn(B, L, D), randn(B, L, DV))
ONE_HEAD_SPELLINGS = {
    "matmul": (lambda q, k, v: attend(q, k, v), 0.5),
    "bmm": (lambda q, k, v: torch.bmm((torch.bmm(q, k.mT) / 4).softmax(-1), v), 0.25),
    "baddbmm": (lambda q, k, v: torch.bmm(torch.baddbmm(torch.zeros(B, S, L), q, k.mT, beta=1, alpha=0.3).softmax(-1), v), 0.3),
    "einsum": (einsum("bqd,bkd->bqk", "bqk,bkd->bqd"), 0.5),
    "scale on q": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, 0.3),
    "batch and heads in one": (lambda q, k, v: attend(*(t.expand(H, *t.shape).reshape(B * H, *t.shape[1:]) for t in (q, k, v))), 0.5),
}


@pytest.mark.parametrize("name", ONE_HEAD_SPELLINGS)
def test_one_head(name):
    fn, scale = ONE_HEAD_SPELLINGS[name]
    node, _ = stages(fn, *ONE_HEAD)
    assert node is not None and node.kwargs["scale"] == pytest.approx(scale)
    assert stages(fn, *ONE_HEAD, symbolic=True)[0] is not None or name in ("baddbmm", "batch and heads in one")


@pytest.mark.parametrize("shape", [(B, S, L), (1, S, L), (S, L), (B, 1, L), (L,)], ids=str)
def test_one_head_with_a_mask(shape):
    node, _ = stages(attend, *ONE_HEAD, randn(*shape))
    assert node is not None and argument(node, "mask") is not None
    keep = torch.rand(shape, generator=G) < 0.6
    keep[..., 0] = True
    node, _ = stages(lambda q, k, v, m: (q @ k.mT).masked_fill(~m, MIN).softmax(-1) @ v, *ONE_HEAD, keep)
    assert node is not None and argument(node, "bias") is not None


SAME = tuple(randn(3, 3, 3) for _ in range(3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: attend(q, k, v, dim=1),
        lambda q, k, v: attend(q, k, v, dim=0),
        lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v,
        lambda q, k, v: (q @ k.mT).softmax(-1).transpose(0, 1) @ v,
        lambda q, k, v: torch.baddbmm(q, q, k.mT, beta=2.0).softmax(-1) @ v,
        lambda q, k, v: (torch.baddbmm(q, q, k.mT) * 0.5).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT + q + k + v).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).masked_fill(v > 0, -5.0).softmax(-1) @ v,
        lambda q, k, v: (lambda w: (w @ v, w))((q @ k.mT).softmax(-1)),
    ],
)
def test_what_only_looks_like_one_head(fn):
    assert stages(fn, *SAME)[0] is None


N = 2
GROUPED = (randn(B, H, N, S, D), K, V)
GROUPED_BY_ROWS = (randn(B, S, H, N, D), randn(B, L, H, D), randn(B, L, H, DV))
GROUPED_SPELLINGS = {
    "einsum": (einsum("bgnqd,bgkd->bgnqk", "bgnqk,bgkd->bgnqd"), GROUPED),
    "einsum by rows": (einsum("bqgnd,bkgd->bgnqk", "bgnqk,bkgd->bqgnd"), GROUPED_BY_ROWS),
    "unsqueezed": (lambda q, k, v: attend(q, k.unsqueeze(2), v.unsqueeze(2)), GROUPED),
    "keys transposed first": (lambda q, k, v: (q @ k.mT.unsqueeze(2) * 0.5).softmax(-1) @ v.unsqueeze(2), GROUPED),
    "heads apart for the products": (
        lambda q, k, v: einsum("bgnqd,bgkd->bgnqk", "bgnqk,bgkd->bgnqd")(q.view(B, H, N, S, D), k, v).reshape(B, H * N, S, DV),
        (randn(B, H * N, S, D), K, V),
    ),
}


@pytest.mark.parametrize("name", GROUPED_SPELLINGS)
def test_heads_in_groups(name):
    fn, args = GROUPED_SPELLINGS[name]
    node, _ = stages(fn, *args)
    assert node.kwargs["scale"] == 0.5
    assert [tuple(a.meta["val"].shape) for a in node.args[:3]] == [(B, H * N, S, D), (B, H, L, D), (B, H, L, DV)], "keys are not repeated"


@pytest.mark.parametrize("shape", [(B, 1, 1, S, L), (1, 1, 1, 1, L), (1, 1, S, L), (S, L)], ids=str)
def test_heads_in_groups_with_a_mask(shape):
    mask = randn(*shape)
    node, _ = stages(lambda q, k, v, m: attend(q, k.unsqueeze(2), v.unsqueeze(2), m), *GROUPED, mask)
    assert node is not None and argument(node, "mask") is not None
    node, _ = stages(lambda q, k, v, m: (q @ k.unsqueeze(2).mT).masked_fill(m, MIN).softmax(-1) @ v.unsqueeze(2), *GROUPED, mask > 1)
    assert node is not None and argument(node, "bias") is not None


GROUPS = (randn(3, 3, 3, 3, 3), CUBE[0][..., :3].contiguous(), CUBE[1][..., :3].contiguous())


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: attend(q, k.unsqueeze(1), v.unsqueeze(1)),  # groups of the other order
        lambda q, k, v: attend(q, k.unsqueeze(2), v.unsqueeze(1)),
        lambda q, k, v: attend(q, k.unsqueeze(2), v.unsqueeze(2), dim=3),
        lambda q, k, v: attend(q, k.unsqueeze(2), v.unsqueeze(2), dim=2),
        lambda q, k, v: attend(q, k.unsqueeze(2), v.unsqueeze(2), q),  # a mask of each head
        einsum("bgnqd,bgkd->bgqnk", "bgnqk,bgkd->bgnqd"),  # queries taken for heads
        einsum("bgnqd,bgkd->bgnqk", "bgnqk,bnkd->bgnqd"),  # values of other heads
        einsum("bgnqd,bnkd->bgnqk", "bgnqk,bgkd->bgnqd"),
    ],
)
def test_what_only_looks_like_heads_in_groups(fn):
    assert stages(fn, *GROUPS)[0] is None


def shared(q, k, v, mask, bias=None):
    scores = torch.einsum("bhid,bjd->bhij", q, k) * 0.5
    scores = scores.masked_fill(mask, MIN) if mask.dtype == torch.bool else scores + mask if bias is None else (scores + bias) + mask
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1, dtype=torch.float32).type(q.dtype), v)


@pytest.mark.parametrize("terms", [(~KEEP,), (MASK,), (MASK, randn(H, 1, 1))], ids=["choice", "mask", "bias and mask"])
def test_one_key_and_value_for_all_heads(terms):
    node, _ = stages(shared, Q, K[:, 0].contiguous(), V[:, 0].contiguous(), *terms)
    assert node is not None and node.args[1].meta["val"].shape == (B, 1, L, D)


def test_rows_of_heads_that_are_named_otherwise_are_left():
    def folded(q, k, v):  # each row of the product is a head of another query than the scores say
        weights = (q.transpose(1, 2).reshape(B, S * H, D) @ k.mT).view(B, S, H, L).permute(0, 2, 1, 3).softmax(-1)
        return (weights.reshape(B, H * S, L) @ v).view(B, H, S, DV)

    assert stages(folded, Q, K[:, 0].contiguous(), V[:, 0].contiguous())[0] is None
