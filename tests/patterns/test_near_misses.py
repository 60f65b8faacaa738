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


def run(fn, *args, symbolic=False):
    """What both stages make of `fn`, run."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    for stage in (normalise, recognise):
        stage(gm, context)
        check_graph(gm, "aten", context.fake_mode)
    return gm(*args)


def kept(fn, *args, symbolic=False) -> set[str]:
    """Checks what both stages make of `fn` against float64; the rules that matched."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    for stage in (normalise, recognise):
        stage(gm, context)
        check_graph(gm, "aten", context.fake_mode)
    eager, exact = fn(*args), fn(*(a.double() if a.is_floating_point() else a for a in args)).double()
    half = eager.dtype in (torch.float16, torch.bfloat16)
    allowed = 1.5 * (eager.double() - exact).abs().max() + 1e-2 * exact.abs().max() if half else 1e-5 * exact.abs().max()
    got = gm(*args)
    assert got.dtype == eager.dtype
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=float(allowed), equal_nan=True)
    return {name for name, count in context.report.hits.items() if count}


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
    q, k, v = randn(b, h, s, 4), randn(b, h, length, 4), randn(b, h, length, 6)
    assert torch.equal(run(attend, q, k, v, randn(s, length)), torch.zeros(b, h, s, 6))
    if h:
        assert torch.equal(run(attend, *(t[:, 0] for t in (q, k, v))), torch.zeros(b, s, 6))
