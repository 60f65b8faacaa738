"""Regions around int8 linears: their plans have scales, and mean what the bodies mean."""

from __future__ import annotations

import pytest
import torch
from dsi.ir.analysis import kind_of, plan_region
from dsi.ir.errors import Refused
from dsi.ir.index_map import FloorDiv
from dsi.ir.tile import C, K, Scale
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise

from .bodies import body_of, check, dsi

B, S = 5, 7
BOTH = pytest.mark.parametrize("dynamic", [(), (B, S, 11)], ids=["static", "symbolic"])
GROUPS = pytest.mark.parametrize("group", [0, 32])


def int8(n: int, k: int, group: int = 0, kn: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random int8 weight [n, k] (or [k, n]) and its scales."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
    found = quantise(weight, Format(Grouping("inner", group)) if group else Format())
    return found.weight.t().contiguous() if kn else found.weight, found.scales


def heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], -1, size).transpose(1, 2)


def scales(plan) -> list[list[Scale]]:
    return [[w.scale for w in s.windows] for s in plan.segments]


@BOTH
@GROUPS
def test_llama_qkv(dynamic, group):
    """Norm before, rope and cache writes after, three weights."""

    def qkv(x, g, wq, sq, wk, sk, wv, sv, cos, sin, keys, values, pos):
        h = dsi.rms_norm(x, g, eps=1e-5, cast="before")
        q, k, v = (heads(dsi.linear_int8(h, w, s, group=group), 8) for w, s in ((wq, sq), (wk, sk), (wv, sv)))
        q, k = (dsi.rope(t, cos.unsqueeze(1), sin.unsqueeze(1), style="half") for t in (q, k))
        return q, dsi.kv_write(keys, pos, k, dim=2), dsi.kv_write(values, pos, v, dim=2)

    weights = [t for n, seed in ((32, 1), (16, 2), (16, 3)) for t in int8(n, 70, group, seed=seed)]
    tables = [torch.randn(1, S, 8), torch.randn(1, S, 8), torch.randn(B, 2, 20, 8), torch.randn(B, 2, 20, 8)]
    plan = check(qkv, [torch.randn(B, S, 70), torch.randn(70), *weights, *tables, torch.randperm(20)[:S]], dynamic)
    assert [int(s.size) for s in plan.segments] == [32, 16, 16] and [s.hold for s in plan.segments] == [8, 8, 1]
    at = (C, FloorDiv(K, 32)) if group else (C,)
    assert scales(plan) == [[Scale(3, at, group)], [Scale(5, at, group)], [Scale(7, at, group)]] and plan.activations == ""


@BOTH
@GROUPS
def test_gate_and_up(dynamic, group):
    def mlp(x, wg, sg, wu, su):
        return dsi.gated(dsi.linear_int8(x, wg, sg, group=group), dsi.linear_int8(x, wu, su, group=group), "silu")

    plan = check(mlp, [torch.randn(B, S, 64), *int8(18, 64, group, seed=1), *int8(18, 64, group, seed=2)], dynamic)
    (segment,) = plan.segments
    assert [w.weight for w in segment.windows] == [1, 3] and [w.scale.input for w in segment.windows] == [2, 4]


@GROUPS
def test_gpt2_splits_one_weight(group):
    def qkv(x, w, s, bias):
        y = dsi.linear_int8(x.view(-1, 64), w, s, bias, kn=True, group=group).view(B, S, 48)
        return tuple(heads(t, 4) * 2 for t in y.split(16, 2))

    plan = check(qkv, [torch.randn(B, S, 64), *int8(48, 64, group, kn=True), torch.randn(48)])
    assert [w.n for s in plan.segments for w in s.windows] == [C, C + 16, C + 32] and all(w.kn for s in plan.segments for w in s.windows)
    assert [w.scale.coords[0] for s in plan.segments for w in s.windows] == [C, C + 16, C + 32]


def test_neox_interleaves_heads():
    def qkv(x, w, s, bias):
        y = dsi.linear_int8(x, w, s, bias, group=32)
        return tuple(t + 1 for t in y.view(B, S, 2, 12).transpose(1, 2).chunk(3, -1))

    plan = check(qkv, [torch.randn(B, S, 64), *int8(24, 64, 32), torch.randn(24)])
    for segment in plan.segments:
        (window,) = segment.windows
        assert window.scale.coords == (window.n, FloorDiv(K, 32))


def test_rope_permutes_channels_that_have_scales_of_their_own():
    def turned(x, w, s, cos, sin):
        return dsi.rope(heads(dsi.linear_int8(x, w, s), 8), cos, sin, style="interleaved")

    plan = check(turned, [torch.randn(B, S, 24), *int8(16, 24), torch.randn(1, 1, S, 8), torch.randn(1, 1, S, 8)])
    assert len(plan.segments[0].windows) == 1 and plan.segments[0].hold == 2


@GROUPS
def test_rows_that_are_rounded_to_int8(group):
    def mlp(x, g, w, s, bias):
        h = dsi.rms_norm(x, g, eps=1e-5)
        return dsi.activation(dsi.linear_int8(h, w, s, bias, group=group, activations="int8"), "gelu_tanh"), h

    plan = check(mlp, [torch.randn(B, S, 64), torch.randn(64), *int8(18, 64, group), torch.randn(18)])
    assert plan.activations == "int8" and len(plan.row_stores) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    def project(x, w, s, bias, residual):
        return dsi.linear_int8(x, w, s, bias) + residual

    inputs = [torch.randn(B, S, 40).to(dtype), *int8(12, 40), torch.randn(12).to(dtype), torch.randn(B, S, 12).to(dtype)]
    assert check(project, inputs, tolerance=2e-2).x_dtype == dtype


def test_slices_of_a_weight_read_slices_of_its_scales():
    plan = check(
        lambda x, w, s: (dsi.linear_int8(x, w[:6], s[:6]).sin(), dsi.linear_int8(x, w[6:], s[6:])), [torch.randn(3, 24), *int8(10, 24)]
    )
    assert [w.scale.coords for s in plan.segments for w in s.windows] == [(C,), (C + 6,)]


def test_one_group_along_k_is_a_scale_a_row():
    weight, scale = int8(10, 24)
    plan = check(lambda x, w, s: dsi.linear_int8(x, w, s, group=32), [torch.randn(3, 24), weight, scale[:, None]])
    assert scales(plan) == [[Scale(2, (C, 0), 0)]]


def refused(function, inputs) -> str:
    with pytest.raises(Refused) as caught:
        plan_region(body_of(function, inputs))
    return str(caught.value)


def test_what_is_no_plan():
    x = torch.randn(3, 24)
    one, two = int8(10, 24), int8(10, 24, seed=1)
    assert kind_of(body_of(lambda x, w, s: dsi.linear_int8(x, w, s), [x, *one])) == "linear"
    mixed = lambda x, w, s, v: (dsi.linear_int8(x, w, s), dsi.linear(x.sin(), v))  # noqa: E731
    assert "another input" in refused(mixed, [x, *one, torch.randn(4, 24)])
    both = lambda x, w, s, v, t: (dsi.linear_int8(x, w, s), dsi.linear_int8(x, v, t, activations="int8"))  # noqa: E731
    assert "round the common input" in refused(both, [x, *one, *two])
    computed = lambda x, w, s: dsi.linear_int8(x, w, s * 2)  # noqa: E731
    assert "no fp32 or fp16 input" in refused(computed, [x, *one])
    chained = lambda x, w, s, v, t: dsi.linear_int8(dsi.linear_int8(x, w, s), v, t)  # noqa: E731
    assert "another linear of the region" in refused(chained, [x, *int8(24, 24), *int8(24, 24, seed=1)])
    plain = lambda x, w: dsi.linear(x, w)  # noqa: E731
    assert "by a weight of int8" in refused(plain, [x, one[0]])
