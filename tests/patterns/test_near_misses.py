"""Functions that nearly match a rule: eager's numbers, against float64, are kept whether one matches or not."""

from __future__ import annotations

import aten_graphs
import pytest
import torch
from dsi.ir.spec import check_graph
from dsi.passes.normalise import normalise
from dsi.passes.recognise import recognise

G = torch.Generator().manual_seed(11)
MIN = torch.finfo(torch.float32).min
INF = float("inf")


def randn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=G)


def recognised(fn, *args):
    """What both stages make of `fn`, and the rules that matched."""
    gm, context = aten_graphs.traced(fn, *args)
    for stage in (normalise, recognise):
        stage(gm, context)
        check_graph(gm, "aten", context.fake_mode)
    return gm, {name for name, count in context.report.hits.items() if count}


def kept(fn, *args) -> set[str]:
    """Checks what both stages make of `fn` against float64; the rules that matched."""
    gm, hits = recognised(fn, *args)
    eager, exact = fn(*args), fn(*(a.double() if a.is_floating_point() else a for a in args)).double()
    got = gm(*args)
    assert got.dtype == eager.dtype and got.shape == eager.shape
    largest = float(exact.nan_to_num().abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5 * largest, equal_nan=True)
    return hits


def attend(q, k, v, *terms):
    scores = q @ k.mT * 0.5
    for term in terms:
        scores = scores + term
    return scores.softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("heads", [(2, 3), (2,)], ids=["heads", "one head"])
@pytest.mark.parametrize("terms", [1, 2])
def test_masks_in_double_precision_make_the_scores_so(heads, terms):
    """The operator's are fp32."""
    q, k, v = randn(*heads, 5, 4), randn(*heads, 7, 4), randn(*heads, 7, 6)
    masks = [randn(5, 7).double(), randn(7)][:terms]
    assert not {"attention", "attention_one_head"} & kept(attend, q, k, v, *masks)
    assert {"attention", "attention_one_head"} & kept(attend, *(t.double() for t in (q, k, v)), *masks)


def test_a_mask_in_double_precision_of_grouped_queries():
    def grouped(q, k, v, m):
        weights = (torch.einsum("bgnsd,bgld->bgnsl", q, k) + m).softmax(-1).to(v.dtype)
        return torch.einsum("bgnsl,bgld->bgnsd", weights, v)

    args = (randn(2, 2, 3, 5, 4), randn(2, 2, 7, 4), randn(2, 2, 7, 6), randn(5, 7))
    assert "attention_grouped" in kept(grouped, *args)
    assert "attention_grouped" not in kept(grouped, *args[:3], args[3].double())


@pytest.mark.parametrize("sizes", [(2, 0, 5, 7), (2, 3, 5, 0), (2, 3, 0, 7), (0, 3, 5, 7)], ids=str)
def test_attention_without_heads_keys_queries_or_batch(sizes):
    b, h, s, length = sizes
    args = (randn(b, h, s, 4), randn(b, h, length, 4), randn(b, h, length, 6), randn(s, length))
    kept(attend, *args)
    if h:
        kept(attend, *(t[:, 0] for t in args[:3]))


SCORES, TERM, HIDDEN = randn(4, 6), randn(4, 6), torch.rand(4, 6, generator=G) < 0.4
NEAR = {
    "less what is infinite": (lambda x, t: (x - t).softmax(-1), torch.tensor([INF, -INF, float("nan"), 0.0])[:, None]),
    "less what drowns": (lambda x, t: (x - t).softmax(-1), torch.tensor([1e30, 0.0, 1e30, 0.0])[:, None]),
    "less the mean of what is hidden": (lambda x, t: (x - x.masked_fill(t, -INF).mean(-1, keepdim=True)).softmax(-1), HIDDEN),
    "less the greatest along another dimension": (lambda x, t: (x - x.amax(0, keepdim=True)).softmax(-1), TERM),
    "a sum along another dimension": (lambda x, t: (lambda e: e / e.sum(0, True))((x - x.amax(-1, True)).exp()), TERM),
    "a factor below 0": (lambda x, t: ((x + t) * -0.5).softmax(-1), TERM),
    "a number that is scaled below 0": (lambda x, t: (x.masked_fill(t, -1e9) * -0.5).softmax(-1), HIDDEN),
    "a number that is scaled beyond its dtype": (lambda x, t: (x.masked_fill(t, MIN) * 4).softmax(-1), HIDDEN),
    "hidden and scaled, then added to": (lambda x, t: ((x + t) * 4 + t).softmax(-1), torch.where(HIDDEN, MIN, 0.0)),
    "bounded by a number near the scores": (lambda x, t: (x + t).clamp(min=-1.0).softmax(-1), TERM),
    "bounded on both sides": (lambda x, t: (x + t).clamp(MIN, 0.5).softmax(-1), TERM),
    "hidden, then bounded": (lambda x, t: (x.masked_fill(t > -9, -INF) + t).clamp(min=MIN).softmax(-1), TERM),
    "a deviation of another dimension": (lambda x, t: (x - x.mean(-1, True)) / (x.std(0, keepdim=True) + 1e-3), TERM),
    "an epsilon in the deviation": (lambda x, t: (x - x.mean(-1, True)) / (x + 1e-3 * t).std(-1, keepdim=True), TERM),
    "an epsilon of each channel": (lambda x, t: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + t.abs()), TERM),
    "an epsilon below 0": (lambda x, t: x / (x.norm(dim=-1, keepdim=True) - 10.0), TERM),
    "one degree of freedom more": (lambda x, t: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True, correction=2) + 1e-3), TERM),
    "the length of another": (lambda x, t: x / (t.norm(dim=-1, keepdim=True) + 1e-6), TERM),
    "another length": (lambda x, t: x / (x.norm(p=1, dim=-1, keepdim=True) + 1e-6), TERM),
    "a length of no less and no more": (lambda x, t: x / x.norm(dim=-1, keepdim=True).clamp(1e-3, 1.0), TERM),
    "a row of zeros": (lambda x, t: x * t * torch.rsqrt((x * t).pow(2).sum(-1, True)), torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]),
}


@pytest.mark.parametrize("name", NEAR)
def test_softmaxes_and_norms_that_nearly_are(name):
    fn, other = NEAR[name]
    kept(fn, SCORES, other)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (3, 1, 1, 1), (3, 3), (1, 3, 1), (3, 1, 3)], ids=str)
@pytest.mark.parametrize("layout", ["bhqk", "bqhk", "qbhk"])
def test_terms_and_factors_where_all_sizes_are_equal(layout, shape):
    """Shapes say nothing of which dimension is which."""
    q, k, v = (randn(3, 3, 3, 3) for _ in range(3))

    def fn(q, k, v, t):
        scores = torch.einsum(f"bhqd,bhkd->{layout}", q, k)
        weights = ((scores * t.abs() + t) * 0.5).masked_fill(t < 0, -1e9).softmax(-1)
        return torch.einsum(f"{layout},bhkd->bqhd", weights, v)

    kept(fn, q, k, v, randn(*shape))
