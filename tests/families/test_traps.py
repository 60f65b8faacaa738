"""Variants that look alike and are not: each computes what eager computes, and is fused where a kernel computes exactly that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dsi.ir.tolerances import TOLERANCES, error_against
from torch import Tensor, nn

from bench.families.axes import Case
from bench.families.family import WINDOW
from bench.families.harness import build, run
from bench.families.listed import FAMILIES
from bench.families.trial import compiled_and_reports

B, H, S, L, D = 2, 6, 5, 7, 8


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size).to(dtype)


def ran(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """(result, report) of `function` compiled; the result has been compared with eager's, bounds twice those of its dtype."""
    torch._dynamo.reset()
    compiled, reports = compiled_and_reports(function)
    with torch.no_grad():
        got, expected = compiled(*args), function(*args)
    flat_got, flat_expected = ([v] if isinstance(v, Tensor) else list(v) for v in (got, expected))
    for a, b in zip(flat_got, flat_expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if not b.dtype.is_floating_point:
            assert torch.equal(a, b)
            continue
        assert error_against(a, b)[0] <= 2 * TOLERANCES[b.dtype].relative, error_against(a, b)
    (report,) = reports
    return got, report


def attentions(report: Any) -> list[dict[str, Any]]:
    """Attributes of the attentions that were recognised and are in regions."""
    nodes = [n for region in report.regions for n in region.members if n.target is torch.ops.dsi.attention.default]
    return [dict(n.kwargs) for n in nodes]


# ------------------------------------------------------------------------------------------------------------------ attention


def qkv(heads: int = H, length: int = L, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return randn(B, heads, S, D, dtype=dtype), randn(B, heads, length, D, dtype=dtype), randn(B, heads, length, D, dtype=dtype)


SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda q, k: q @ k.transpose(-1, -2),
    "mul": lambda q, k: (q @ k.transpose(-1, -2)) * 0.3,
    "div": lambda q, k: q @ k.transpose(-1, -2) / math.sqrt(D),
    "q mul": lambda q, k: (q * 0.3) @ k.transpose(-1, -2),
    "q div": lambda q, k: (q / 3.0) @ k.transpose(-1, -2),
    "both": lambda q, k: ((q * 0.3) @ k.transpose(-1, -2)) / 2.0,
}
FACTORS = {"none": 1.0, "mul": 0.3, "div": D**-0.5, "q mul": 0.3, "q div": 1 / 3, "both": 0.15}


@pytest.mark.parametrize("scale", SCALES)
def test_scale(scale: str):
    _, report = ran(lambda q, k, v: SCALES[scale](q, k).softmax(-1) @ v, *qkv())
    (found,) = attentions(report)
    assert found["scale"] == pytest.approx(FACTORS[scale])


def test_scale_in_a_tensor_is_right():
    factor = torch.full([], 0.3)
    ran(lambda q, k, v, s: (q @ k.transpose(-1, -2) * s).softmax(-1) @ v, *qkv(), factor)
    ran(lambda q, k, v, s: (q @ k.transpose(-1, -2) / s).softmax(-1) @ v, *qkv(), torch.rand(H, 1, 1) + 1)


def test_attention_over_one_key():
    q, k, v = (randn(B, H, 1, D) for _ in range(3))
    _, report = ran(lambda q, k, v: (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v, q, k, v)
    assert len(attentions(report)) == 1 and not report.unfused
    # A prompt of one token, in half precision: the weights are cast before they are multiplied.
    half = [t.half() for t in (q, k, v)]
    _, report = ran(lambda q, k, v: (q @ k.transpose(-1, -2) * 0.3).softmax(-1, dtype=torch.float32).to(q.dtype) @ v, *half)
    assert len(attentions(report)) == 1 and not report.unfused


def test_softmax_over_queries_is_no_attention():
    _, report = ran(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-2) @ v, *qkv())
    assert not attentions(report)
    _, report = ran(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(1) @ v, *qkv())
    assert not attentions(report)


@pytest.mark.parametrize("batch", [B, H])
def test_permuted_operands(batch: int):
    """Scores of keys against queries, heads and batch exchanged: square shapes, so that only the wiring tells."""
    q, k, v = (torch.randn(batch, H, S, S) for _ in range(3))
    ran(lambda q, k, v: (q @ k).softmax(-1) @ v, q, k, v)
    ran(lambda q, k, v: (q.transpose(-1, -2) @ k).softmax(-1) @ v, q, k, v)
    ran(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1).transpose(-1, -2) @ v, q, k, v)
    ran(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v.transpose(-1, -2), q, k, v)
    ran(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ (v.transpose(0, 1) if batch == H else v), q, k, v)
    ran(lambda q, k, v: ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2), q, k, v)


def keep_mask(*size: int) -> Tensor:
    keep = torch.rand(*size) > 0.4
    keep[..., 0] = True
    return keep


MINUS = torch.finfo(torch.float32).min
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add -inf": lambda scores, keep: scores + torch.zeros_like(keep, dtype=scores.dtype).masked_fill(~keep, float("-inf")),
    "add min": lambda scores, keep: scores + (1.0 - keep.to(scores.dtype)) * torch.finfo(scores.dtype).min,
    "where": lambda scores, keep: torch.where(keep, scores, torch.finfo(scores.dtype).min),
    "where tensor": lambda scores, keep: torch.where(keep, scores, torch.full([], -1e30, dtype=scores.dtype)),
    "masked_fill": lambda scores, keep: scores.masked_fill(~keep, float("-inf")),
    "masked_fill min": lambda scores, keep: scores.masked_fill(keep == 0, torch.finfo(scores.dtype).min),
    "finite": lambda scores, keep: scores.masked_fill(~keep, -3.0),
}


@pytest.mark.parametrize("shape", [(B, 1, S, L), (S, L), (1, 1, 1, L), (B, H, S, L), (L,)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, shape: tuple[int, ...]):
    ran(lambda q, k, v, m: MASKS[mask](q @ k.transpose(-1, -2) * 0.3, m).softmax(-1) @ v, *qkv(), keep_mask(*shape))


@pytest.mark.parametrize("mask", ["add -inf", "add min", "masked_fill", "masked_fill min", "where"])
def test_masks_are_fused(mask: str):
    _, report = ran(lambda q, k, v, m: MASKS[mask](q @ k.transpose(-1, -2) * 0.3, m).softmax(-1) @ v, *qkv(), keep_mask(B, 1, S, L))
    assert len(attentions(report)) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_fully_masked_rows_are_finite(dtype: torch.dtype):
    keep = keep_mask(B, 1, S, L)
    keep[1, :, 2] = False
    mask = keep if dtype == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, MINUS)
    got, report = ran(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), *qkv(), mask)
    assert bool(got.isfinite().all()) and len(attentions(report)) == 1


def test_softcap():
    _, report = ran(
        lambda q, k, v, m: (torch.tanh(q @ k.transpose(-1, -2) * 0.3 / 2.0) * 2.0 + m).softmax(-1) @ v, *qkv(), randn(B, 1, S, L)
    )
    assert [a["softcap"] for a in attentions(report)] == [2.0]
    _, report = ran(lambda q, k, v: (torch.tanh(q @ k.transpose(-1, -2) / 2.0) * 3.0).softmax(-1) @ v, *qkv())
    assert not [a for a in attentions(report) if "softcap" in a]  # two caps: not that function


def test_scores_that_overflow_half_precision():
    """Where the product leaves fp16 eager's weights are NaN; the operator has its scores in fp32, and is finite wherever eager is."""
    q, k, v = (x * 60 for x in qkv(dtype=torch.float16))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-1, -2)) * 0.3).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    compiled, _ = compiled_and_reports(attend)
    with torch.no_grad():
        got, eager = compiled(q, k, v), attend(q, k, v)
    finite = eager.isfinite()
    assert bool(got[finite].isfinite().all())
    if bool(finite.any()):
        assert error_against(got[finite], eager[finite])[0] < 1e-2


def test_linear_overflow_is_eagers():
    x, w = randn(3, 64, dtype=torch.float16) * 300, randn(16, 64, dtype=torch.float16) * 300
    compiled, _ = compiled_and_reports(lambda x, w: F.linear(x, w))
    got, eager = compiled(x, w), F.linear(x, w)
    assert torch.equal(got.isinf(), eager.isinf()) and torch.equal(got.sign(), eager.sign()) and bool(eager.isinf().any())


@pytest.mark.parametrize("heads", [6, 8, 3])
def test_alibi(heads: int):
    """As BLOOM: slopes of a head count that is no power of two, added by `baddbmm`."""
    slopes = torch.rand(heads)
    alibi = (slopes[None, :, None] * torch.arange(L)[None, None, :]).expand(B, heads, L).reshape(B * heads, 1, L)

    def attend(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        q, k, v = q.reshape(B * heads, S, D), k.reshape(B * heads, L, D).transpose(1, 2), v.reshape(B * heads, L, D)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=0.25).view(B, heads, S, L)
        weights = (scores + mask).softmax(-1, dtype=torch.float32).view(B * heads, S, L)
        return torch.bmm(weights, v).view(B, heads, S, D)

    _, report = ran(attend, *qkv(heads), alibi, randn(B, 1, S, L))
    assert len(attentions(report)) == 1


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_window(cache: str, length: int):
    """Mistral below, at and above its window, and the steps after it; the static cache rolls."""
    outcome = run(Case("Mistral", "sdpa", cache, layers=1), length=length, steps=3)
    assert not outcome.unfused()
    assert max(error for error, _ in outcome.errors.values()) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------- norms


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * rms(x.float(), 1e-6).to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    return (rms(x.float(), 1e-6) * (1.0 + w.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [llama_norm, gemma_norm])
def test_rms_norms(norm: Callable[..., Tensor], dtype: torch.dtype):
    _, report = ran(norm, randn(2, 3, 16, dtype=dtype) * 5, randn(16, dtype=dtype))
    assert report.hits["rms_norm"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_in_fp32_under_half_precision(dtype: torch.dtype):
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (16,), w.float(), b.float(), 1e-5).to(x.dtype)

    _, report = ran(norm, randn(2, 3, 16, dtype=dtype) * 5, randn(16, dtype=dtype), randn(16, dtype=dtype))
    assert report.hits["layer_norm"] == 1


def test_two_norms_with_different_eps():
    """Values so small that eps decides."""
    x, w, u = randn(2, 3, 16) * 1e-3, randn(16), randn(16, 16)

    def both(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(F.layer_norm(x, (16,), w, None, 1e-5), u), F.linear(F.layer_norm(x, (16,), w, None, 1e-2), u)

    _, report = ran(both, x, w, u)
    eps = sorted(n.kwargs["eps"] for r in report.regions for n in r.members if n.target is torch.ops.dsi.layer_norm.default)
    assert eps == [1e-5, 1e-2]


def test_look_alikes_of_norms_are_right():
    x, w = randn(4, 4, 4), randn(4)
    for function in (
        lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),  # another axis, as long
        lambda x, w: w[:, None] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),  # the weight along another axis
        lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6) * w,  # the unbiased variance
        lambda x, w: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-6) * w,
        lambda x, w: F.layer_norm(x, (4, 4), None, None, 1e-6) * w,
    ):
        ran(function, x, w)


def test_post_norm_and_parallel_residuals():
    x, w, u, g = randn(2, 3, 16), randn(16, 16), randn(16, 16), randn(16)

    def post(x: Tensor, w: Tensor, u: Tensor, g: Tensor) -> Tensor:
        y = F.layer_norm(x + F.linear(x, w), (16,), g, None, 1e-5)
        return F.layer_norm(y + F.linear(y, u), (16,), None, g, 1e-5)

    def parallel(x: Tensor, w: Tensor, u: Tensor, g: Tensor) -> Tensor:
        y = F.layer_norm(x, (16,), g, None, 1e-5)
        return x + F.linear(y, w) + F.linear(y, u)

    def two_norms(x: Tensor, w: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return x + F.linear(F.layer_norm(x, (16,), g, None, 1e-5), w) + F.linear(F.layer_norm(x, (16,), None, g, 1e-3), u)

    for function in (post, parallel, two_norms):
        _, report = ran(function, x, w, u, g)
        assert {r.kind for r in report.regions} <= {"linear", "row"} and not report.unfused


@pytest.mark.parametrize("whole", [False, True], ids=["head", "width"])
def test_norm_of_queries(whole: bool):
    x, w, g = randn(2, 5, 16), randn(24, 16), randn(24 if whole else 8)

    def project(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        q = F.linear(x, w)
        q = rms(q, 1e-6) * g if whole else rms(q.view(2, 5, 3, 8), 1e-6) * g
        return q.view(2, 5, 3, 8).transpose(1, 2)

    _, report = ran(project, x, w, g)
    assert report.hits["rms_norm"] == 1 and not report.unfused


# ------------------------------------------------------------------------------------------------------------------------ rope


def half_turn(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.parametrize("turned", [4, 8])
def test_partial_rotary(turned: int):
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        head, tail = x[..., :turned], x[..., turned:]
        return torch.cat([head * cos + half_turn(head) * sin, tail], -1)

    _, report = ran(rope, randn(2, 3, 5, 8), randn(5, turned), randn(5, turned))
    assert report.hits["rope"] == 1


def test_look_alikes_of_rope_are_right():
    x, cos, sin = randn(2, 3, 8, 8), randn(8, 8), randn(8, 8)
    for function in (
        lambda x, cos, sin: x * cos + torch.cat([x[..., 4:], -x[..., :4]], -1) * sin,  # turned the other way
        lambda x, cos, sin: x * cos - half_turn(x) * sin,
        lambda x, cos, sin: x * cos + torch.cat([-x[..., 4:, :], x[..., :4, :]], -2) * sin,  # another axis, as long
        lambda x, cos, sin: x * cos + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin,
        lambda x, cos, sin: x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -2).flatten(-2) * sin,
    ):
        ran(function, x, cos, sin)


# ---------------------------------------------------------------------------------------------------- outputs, sharing, packing


def test_tied_embeddings():
    model = build("LLaMA tied", "sdpa", layers=1)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    compiled, reports = compiled_and_reports(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert error_against(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)[0] < 1e-5
        model.lm_head.weight.mul_(1.5)
        assert error_against(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)[0] < 1e-5
    assert len(reports) == 1


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA-2 GQA", "OPT post-norm"])
def test_hidden_states(name: str):
    model = build(name, "sdpa", layers=2)
    compiled, (*_,) = compiled_and_reports(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        got = compiled(ids, use_cache=False, output_hidden_states=True)
        expected = model(ids, use_cache=False, output_hidden_states=True)
    assert len(got.hidden_states) == len(expected.hidden_states) == 3
    for a, b in zip((*got.hidden_states, got.logits), (*expected.hidden_states, expected.logits), strict=True):
        assert error_against(a, b)[0] < 1e-5


def test_attention_weights_as_outputs():
    model = build("LLaMA-2 GQA", "eager", layers=1)
    compiled, _ = compiled_and_reports(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        got, expected = (f(ids, use_cache=False, output_attentions=True) for f in (compiled, model))
    assert error_against(got.attentions[0], expected.attentions[0])[0] < 1e-5
    assert error_against(got.logits, expected.logits)[0] < 1e-5


def test_outputs_that_alias_inputs():
    x, w = randn(3, 4), randn(4, 4)
    compiled, _ = compiled_and_reports(lambda x, w: (x, x.view(4, 3), F.linear(x, w) + x, x[1:].t()))
    with torch.no_grad():
        same, viewed, _, part = compiled(x, w)
    assert same.data_ptr() == viewed.data_ptr() == x.data_ptr()
    x.zero_()
    assert not viewed.any() and not part.any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences(attention: str):
    """Two texts in one row, told apart by positions that start again, or by a mask [B, 1, S, S]: each is as alone."""
    model = build("LLaMA-2 GQA", attention, layers=1)
    ids = torch.randint(3, 190, (1, 11))
    positions = torch.tensor([[*range(6), *range(5)]])
    text = torch.tensor([0] * 6 + [1] * 5)
    keep = ((text[:, None] == text[None]) & torch.ones(11, 11, dtype=torch.bool).tril())[None, None]
    mask = torch.zeros(keep.shape).masked_fill(~keep, MINUS)
    with torch.no_grad():
        alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :6], ids[:, 6:])], 1)
        for given in ({}, {"attention_mask": mask}):
            torch._dynamo.reset()
            compiled, reports = compiled_and_reports(model)
            got = compiled(ids, position_ids=positions, use_cache=False, **given).logits
            assert error_against(got, model(ids, position_ids=positions, use_cache=False, **given).logits)[0] < 1e-5
            assert error_against(got, alone)[0] < 1e-5
            assert all(len(attentions(report)) == 1 for report in reports)


# -------------------------------------------------------------------------------------------------- torch's own fused modules


MULTI_HEAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()},
    "mask": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "float mask": {"attn_mask": torch.arange(25.0).view(5, 5).sin()},
    "mask a head": {"attn_mask": torch.arange(200.0).view(8, 5, 5).sin()},
    "both": {"attn_mask": torch.ones(5, 5).triu(1).bool(), "key_padding_mask": torch.tensor([[0] * 5, [0, 0, 1, 1, 1]]).bool()},
    "causal": {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True},
}


@pytest.mark.parametrize("case", MULTI_HEAD)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention(case: str, batch_first: bool):
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    x = randn(2, 5, 16) if batch_first else randn(5, 2, 16)
    for weights in (False, True):
        _, report = ran(lambda x: module(x, x, x, need_weights=weights, **MULTI_HEAD[case])[0], x)  # noqa: B023
        assert report.hits["lift.multi_head_attention"] == report.hits["lift.attention"] == 1 and not report.unfused


@pytest.mark.parametrize("case", ["plain", "padding", "mask", "mask a head", "both", "causal"])
def test_multi_head_attention_with_further_keys(case: str):
    """A key that is learned, and one of zeros, which no mask hides."""
    module, x = nn.MultiheadAttention(16, 4, add_bias_kv=True, add_zero_attn=True).eval(), randn(5, 2, 16)
    for weights in (False, True):
        _, report = ran(lambda x: module(x, x, x, need_weights=weights, **MULTI_HEAD[case])[0], x)  # noqa: B023
        assert report.hits["lift.multi_head_attention"] == report.hits["lift.attention"] == 1


def test_multi_head_cross_attention():
    module = nn.MultiheadAttention(16, 4, batch_first=True, bias=False).eval()
    x, y, z = randn(2, 5, 16), randn(2, 7, 16), randn(2, 7, 16)
    for values in (y, z):
        _, report = ran(lambda x, y, z: module(x, y, z, need_weights=False)[0], x, y, values)
        assert report.hits["lift.attention"] == 1
    _, report = ran(lambda x, y: module(x, y, y)[0], x, y)  # the weights are made, and not read
    assert report.hits["lift.attention"] == 1
    module = nn.MultiheadAttention(16, 4, batch_first=True, kdim=12, vdim=20).eval()  # a weight each
    _, report = ran(lambda x, y, z: module(x, y, z, need_weights=False)[0], x, randn(2, 7, 12), randn(2, 7, 20))
    assert report.hits["lift.attention"] == 1
    module = nn.MultiheadAttention(16, 4).eval()
    _, report = ran(lambda x, y: module(x, y, y)[0], randn(5, 16), randn(7, 16))  # no batch
    assert report.hits["lift.attention"] == 1
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    _, report = ran(lambda x, y: module(x, y, y), x, y)  # with the weights, which no attention kernel has
    assert report.hits["lift.attention"] == 0


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(norm_first: bool, activation: str):
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first, activation=activation).eval()
    x = randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    _, report = ran(lambda x: layer(x), x)
    assert Counter(r.kind for r in report.regions)["linear"] == 4 and not report.unfused
    _, report = ran(lambda x, p: layer(x, src_key_padding_mask=p)[:, :3], x, padding)
    assert report.hits["lift.encoder_layer"] == 1
    causal = torch.ones(5, 5).triu(1).bool()
    ran(lambda x, m: layer(x, src_mask=m), x, causal)
    ran(lambda x, m, p: layer(x, src_mask=m, src_key_padding_mask=p)[:, :3], x, causal, padding)


# --------------------------------------------------------------------------------------------------- numbers under dynamic=True


@pytest.mark.parametrize("name", ["LLaMA-2 GQA", "GPT-2", "Gemma 2", "BLOOM"])
def test_numbers_of_modules_are_constants_under_dynamic_shapes(name: str):
    from dsi.compiler.backend import dsi
    from dsi.compiler.observe import collecting

    model, reports = build(name, FAMILIES[name].attentions[0], layers=1), []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with collecting() as contexts:
            compiled = dsi(gm, inputs, options={"executor": "reference"})
        reports.extend(context.report for context in contexts)
        return compiled

    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for size in ((2, 9), (3, 7)):
            ids = torch.randint(3, 190, size)
            assert error_against(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)[0] < 1e-5
    (report,) = reports
    assert report.hits["rms_norm"] + report.hits["layer_norm"] >= 3
    assert Counter(r.kind for r in report.regions)["attention"] == 1


def test_a_number_of_the_caller_stays_an_input():
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from dsi.compiler.backend import dsi

        graphs.append(gm)
        return dsi(gm, inputs, options={"executor": "reference"})

    compiled = torch.compile(lambda x, s: x * s + 1, backend=backend, dynamic=True)
    x = randn(3, 4)
    for s in (0.5, 0.25, 3.0):
        torch.testing.assert_close(compiled(x, s), x * s + 1)
    assert len(graphs) <= 2  # Dynamo may start over once


def test_a_modules_number_that_changes():
    class Scaled(nn.Module):
        factor = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return rms(x, 1e-6) * self.factor

    module = Scaled()
    compiled = torch.compile(module, backend="dsi", dynamic=True, options={"executor": "reference"})
    x = randn(3, 4)
    torch.testing.assert_close(compiled(x), module(x))
    module.factor = 2.0
    torch.testing.assert_close(compiled(x), module(x))


# ----------------------------------------------------------------------------------------------------------------- other kinds


def test_padding_is_fused():
    for function, x in (
        (lambda x: F.pad(torch.sin(x), (1, 2, 0, 3)) * 2, randn(3, 5, 6)),
        (lambda x: F.pad(x.view(2, -1, 3).transpose(1, 2) > 0, (1, 1), value=True), randn(4, 6)),
        (lambda x: F.pad(x, (-1, 2, 3, -2), value=1.5) + 1, randn(5, 6)),
    ):
        _, report = ran(function, x)
        assert not report.unfused and [r.kind for r in report.regions] == ["row"]


def test_negative_positions_count_from_the_end():
    def write(cache: Tensor, new: Tensor, pos: Tensor) -> Tensor:
        rolled = cache.roll(-1, 2)
        rolled[:, :, pos] = new
        cache.copy_(rolled)
        return cache * 2

    for positions in ([-1], [0], [-7]):
        cache, new = randn(2, 3, 7, 4), randn(2, 3, 1, 4)
        expected = write(cache.clone(), new, torch.tensor(positions))
        torch._dynamo.reset()
        compiled, reports = compiled_and_reports(write)
        with torch.no_grad():
            torch.testing.assert_close(compiled(cache, new, torch.tensor(positions)), expected)
        torch.testing.assert_close(cache * 2, expected)
        assert reports[0].hits["kv_write"] == 1


def test_operators_with_several_results_are_reported():
    _, report = ran(lambda x: torch.topk(x * 2, 2), randn(3, 6))
    assert any("topk" in refusal.reason for refusal in report.unfused)


def test_constants_of_the_graph_are_compiled():
    """A tensor that the model makes of a literal (the index of a rolling cache) through the executor that users get."""
    cache, new = randn(2, 3, 7, 4), randn(2, 3, 1, 4)

    def write(cache: Tensor, new: Tensor) -> Tensor:
        rolled = cache.roll(-1, 2)
        rolled[:, :, torch.tensor([-1])] = new
        return cache.copy_(rolled) * 2

    compiled = torch.compile(write, backend="dsi")
    expected = write(cache.clone(), new)
    with torch.no_grad():
        torch.testing.assert_close(compiled(cache, new), expected)
