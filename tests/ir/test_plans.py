"""The regions of the architectures that people run: what their plans look like, and that they mean what the layers mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from dsi.ir.analysis import evaluate_plan, kind_of, plan_region
from dsi.ir.errors import Refused
from dsi.ir.index_map import FloorDiv, Mod
from dsi.ir.tile import AttentionPlan, C, LinearPlan, Load, Op, Permuted, R, RowPlan, Window, parts_of

from .bodies import assert_means, body_of, check, dsi

B, S = 5, 7  # batch and length: the symbolic sizes of the dynamic cases; 11 keys
BOTH = pytest.mark.parametrize("dynamic", [(), (B, S, 11)], ids=["static", "symbolic"])


def heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], -1, size).transpose(1, 2)


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator) / (s[-1] ** 0.5 if len(s) == 2 else 1.0) for s in shapes]


def columns(plan: Any) -> list[tuple[int, int, list[sympy.Expr]]]:
    """(size, group, weight row of each window) a segment."""
    return [(int(s.size), s.hold, [w.n for w in s.windows]) for s in plan.segments]


# ------------------------------------------------------------------------------------------------------------------------- QKV


@BOTH
def test_llama_qkv(dynamic: tuple[int, ...]) -> None:
    def qkv(x, g, wq, wk, wv, cos, sin, keys, values, pos):
        h = dsi.rms_norm(x, g, eps=1e-5, cast="before")
        q, k, v = (heads(dsi.linear(h, w), 8) for w in (wq, wk, wv))
        q, k = (dsi.rope(t, cos.unsqueeze(1), sin.unsqueeze(1), style="half") for t in (q, k))
        return q, dsi.kv_write(keys, pos, k, dim=2), dsi.kv_write(values, pos, v, dim=2)

    inputs = tensors((B, S, 12), (12,), (32, 12), (16, 12), (16, 12), (1, S, 8), (1, S, 8), (B, 2, 20, 8), (B, 2, 20, 8))
    plan = check(qkv, [*inputs, torch.randperm(20)[:S]], dynamic)
    assert isinstance(plan, LinearPlan)
    assert columns(plan) == [(32, 8, [C]), (16, 8, [C]), (16, 1, [C])]
    assert [len(s.stores) for s in plan.segments] == [1, 1, 1] and [s.stores[0].base for s in plan.segments] == [None, 7, 8]
    assert len(plan.reductions) == 1 and plan.reductions[0].kind == "rms" and not plan.row_stores
    partners = {p.source for p in parts_of(plan.segments[0].stores[0].value) if isinstance(p, Permuted)}
    assert partners == {8 * FloorDiv(C, 8) + Mod(C + 4, 8)}
    assert isinstance(plan.segments[1].stores[0].coords[2], Load), "the cache is written where `pos` says"


@BOTH
def test_gpt2_splits_one_weight(dynamic: tuple[int, ...]) -> None:
    def qkv(x, g, b, w, bias, keys, values, pos):
        h = dsi.layer_norm(x, g, b, eps=1e-5)
        y = dsi.linear(h.view(-1, 12), w, bias, kn=True).view(x.shape[0], x.shape[1], 48)
        q, k, v = (heads(t, 4) for t in y.split(16, 2))
        return q, dsi.kv_write(keys, pos, k, dim=2), dsi.kv_write(values, pos, v, dim=2)

    inputs = tensors((B, S, 12), (12,), (12,), (12, 48), (48,), (B, 4, 20, 4), (B, 4, 20, 4))
    plan = check(qkv, [*inputs, torch.randperm(20)[:S]], dynamic)
    assert columns(plan) == [(16, 1, [C]), (16, 1, [C + 16]), (16, 1, [C + 32])]
    assert all(w.kn for s in plan.segments for w in s.windows)


FUSED = {
    # name: (view of the channels, which part is which, expected weight rows of 2 heads of 4 channels)
    "NeoX": (lambda y: y.view(B, S, 2, 12).transpose(1, 2).chunk(3, -1), [12 * FloorDiv(C, 4) + Mod(C, 4) + o for o in (0, 4, 8)]),
    "BLOOM": (lambda y: y.view(B, S, 2, 3, 4).transpose(1, 2).unbind(3), [12 * FloorDiv(C, 4) + Mod(C, 4) + o for o in (0, 4, 8)]),
    "thirds": (lambda y: y.view(B, S, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0), [C, C + 8, C + 16]),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_layouts(name: str) -> None:
    view, rows = FUSED[name]
    plan = check(lambda x, w, b: tuple(t + 1 for t in view(dsi.linear(x, w, b))), tensors((B, S, 12), (24, 12), (24,)))
    assert [w for _, _, (w,) in columns(plan)] == rows


def test_falcon_groups_query_heads_with_their_key_head() -> None:
    def qkv(x, w):  # 2 groups of 3 query heads, a key and a value head, 4 channels each
        y = dsi.linear(x, w).view(B, S, 2, 5, 4)
        return (
            y[:, :, :, :-2].reshape(B, S, 6, 4).transpose(1, 2) * 2,
            y[:, :, :, -2].transpose(1, 2) + 1,
            y[:, :, :, -1].transpose(1, 2) + 2,
        )

    plan = check(qkv, tensors((B, S, 12), (40, 12)))
    assert columns(plan) == [
        (24, 1, [20 * FloorDiv(C, 12) + Mod(C, 12)]),
        (8, 1, [20 * FloorDiv(C, 4) + Mod(C, 4) + 12]),
        (8, 1, [20 * FloorDiv(C, 4) + Mod(C, 4) + 16]),
    ]


def test_slices_of_one_stored_weight() -> None:
    plan = check(lambda x, w: (dsi.linear(x, w[:6]).sin(), dsi.linear(x, w[6:])), tensors((3, 4), (10, 4)))
    assert columns(plan) == [(6, 1, [C]), (4, 1, [C + 6])]


@pytest.mark.parametrize("kn", [False, True])
def test_the_beginning_of_each_row_of_a_stored_weight(kn: bool) -> None:
    """Elastic widths, and the first of experts that are stored in one matrix."""
    x, w = tensors((3, 4), (12, 9) if kn else (9, 12))
    plan = check(lambda x, w: dsi.linear(x, w[:4] if kn else w[:6, :4], kn=kn), (x, w))
    assert columns(plan) == [(9 if kn else 6, 1, [C])]


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("turned", [2, 4, 6, 8])
@pytest.mark.parametrize("inside", [True, False], ids=["rope over a part", "cat of a rope and the rest"])
def test_partial_rope(style: str, turned: int, inside: bool) -> None:
    def qk(x, w, cos, sin):
        y = heads(dsi.linear(x, w), 8)
        if inside:
            return dsi.rope(y, cos, sin, style=style), y[:, :2] * 2
        return torch.cat([dsi.rope(y[..., :turned], cos, sin, style=style), y[..., turned:]], -1), y[:, :2] * 2

    plan = check(qk, tensors((B, S, 12), (32, 12), (1, 1, S, turned), (1, 1, S, turned)))
    assert [hold in (2, turned, 8) for _, hold, _ in columns(plan)] == [True, False]
    assert [w for _, _, w in columns(plan)] == [[C], [C]]
    direct = [p for p in parts_of(plan.segments[0].stores[0].value) if isinstance(p, Window)]
    assert direct, "a channel's own value is read without a permutation"


def test_rope_that_is_spelled_out() -> None:
    def rotate(x):
        low, high = x.chunk(2, -1)
        return torch.cat([-high, low], -1)

    def qk(x, w, cos, sin):
        y = heads(dsi.linear(x, w), 8)
        return y * cos + rotate(y) * sin, y[:, 1:3] + 1

    plan = check(qk, tensors((B, S, 12), (32, 12), (S, 8), (S, 8)))
    assert [hold for _, hold, _ in columns(plan)] == [8, 1]


def test_interleaved_rope_that_is_spelled_out() -> None:
    def qk(x, w, cos, sin):
        y = heads(dsi.linear(x, w), 8)
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
        return y * cos + turned * sin

    assert [hold for _, hold, _ in columns(check(qk, tensors((B, S, 12), (32, 12), (S, 8), (S, 8))))] == [2]


@BOTH
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_a_head_before_rope(norm: str, dynamic: tuple[int, ...]) -> None:
    def qk(x, w, v, g, b, cos, sin):
        q, k = (dsi.linear(x, t).view(x.shape[0], x.shape[1], -1, 8) for t in (w, v))
        q, k = (dsi.rms_norm(t, g, eps=1e-5) if norm == "rms" else dsi.layer_norm(t, g, b, eps=1e-5) for t in (q, k))
        return tuple(dsi.rope(t.transpose(1, 2), cos, sin, style="half") for t in (q, k))

    plan = check(qk, tensors((B, S, 12), (32, 12), (8, 12), (8,), (8,), (S, 8), (S, 8)), dynamic)
    assert columns(plan) == [(32, 8, [C]), (8, 8, [C])]
    for segment in plan.segments:
        assert [(q.kind, int(q.size), q.over) for q in segment.reductions] == [(norm, 8, C)]


# ----------------------------------------------------------------------------------------------------------- the rest of a layer


@BOTH
def test_output_projection_with_residual(dynamic: tuple[int, ...]) -> None:
    def project(a, w, b, residual):
        return dsi.linear(a.transpose(1, 2).reshape(a.shape[0], a.shape[2], 24), w, b) + residual

    plan = check(project, tensors((B, 4, S, 6), (10, 24), (10,), (B, S, 10)), dynamic)
    assert columns(plan) == [(10, 1, [C])]
    assert isinstance(plan.x, Load)
    length = plan.x.coords[2].args[1]
    assert plan.x.coords == (
        FloorDiv(R, length),
        FloorDiv(sympy.Symbol("k", integer=True, nonnegative=True), 6),
        Mod(R, length),
        plan.x.coords[3],
    )


@BOTH
def test_gate_and_up_as_two_weights(dynamic: tuple[int, ...]) -> None:
    def mlp(x, g, u, v):
        h = dsi.rms_norm(x, g, eps=1e-5, offset=1.0, cast="after")
        return dsi.gated(dsi.linear(h, u), dsi.linear(h, v), "gelu_tanh")

    plan = check(mlp, tensors((B, S, 12), (12,), (18, 12), (18, 12)), dynamic)
    assert [[(w.weight, w.n) for w in s.windows] for s in plan.segments] == [[(2, C), (3, C)]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_in_one_weight(interleaved: bool) -> None:
    def mlp(x, w, b):
        y = dsi.linear(x, w, b)
        gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        return F.silu(gate) * up

    plan = check(mlp, tensors((B, S, 12), (18, 12), (18,)))
    assert columns(plan) == [(9, 1, [2 * C, 2 * C + 1] if interleaved else [C, C + 9])]


def test_a_gate_that_escapes_shares_the_segment() -> None:
    def mlp(x, u, v):
        gate, up = dsi.linear(x, u), dsi.linear(x, v)
        return F.silu(gate) * up, gate.neg()

    plan = check(mlp, tensors((S, 12), (18, 12), (18, 12)))
    assert [len(s.windows) for s in plan.segments] == [2] and [s.output for s in plan.segments[0].stores] == [0, 1]


@BOTH
def test_post_norm_escapes_as_the_residual(dynamic: tuple[int, ...]) -> None:
    def bert(a, r, g, b, w, c):
        h = dsi.layer_norm(a + r, g, b, eps=1e-12)
        return dsi.activation(dsi.linear(h, w, c), "gelu_erf"), h

    plan = check(bert, tensors((B, S, 12), (B, S, 12), (12,), (12,), (18, 12), (18,)), dynamic)
    assert [s.output for s in plan.row_stores] == [1] and len(plan.reductions) == 1


def test_a_sum_escapes_before_its_norm() -> None:
    plan = check(
        lambda a, r, g, w: (a + r, dsi.linear(dsi.rms_norm(a + r, g, eps=1e-5), w)), tensors((B, S, 12), (B, S, 12), (12,), (18, 12))
    )
    assert [s.output for s in plan.row_stores] == [0]


def test_norms_one_after_another() -> None:
    def gemma2(y, r, g1, g2, w):
        h = r + dsi.rms_norm(y, g1, eps=1e-6)
        return dsi.linear(dsi.rms_norm(h, g2, eps=1e-6), w), h

    plan = check(gemma2, tensors((B, S, 12), (B, S, 12), (12,), (12,), (18, 12)))
    assert len(plan.reductions) == 2


@pytest.mark.parametrize("place", ["beside", "least"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_an_epsilon_that_is_not_under_the_root(norm: str, place: str) -> None:
    """Large beside one row's root, small beside another's; a row of zeros has the root 0."""

    def project(x, g, b, w):
        rms = dsi.rms_norm(x, g, eps=0.5, place=place) + b
        return dsi.linear(rms if norm == "rms" else dsi.layer_norm(x, g, b, eps=0.5, place=place), w)

    x, *rest = tensors((B, S, 12), (12,), (12,), (18, 12))
    x[:, 0], x[:, 1] = 0.0, x[:, 1] * 1e-3
    check(project, [x, *rest], (B, S))


def test_an_embedding_in_the_prologue() -> None:
    def first_layer(ids, table, g, w):
        h = dsi.embedding(table, ids) * 3.0
        return dsi.linear(dsi.rms_norm(h, g, eps=1e-5), w), h

    inputs = [torch.randint(0, 19, (B, S)), *tensors((19, 12), (12,), (18, 12))]
    assert kind_of(body_of(first_layer, inputs)) == "linear"
    check(first_layer, inputs, (B, S))


def test_one_row() -> None:
    def decode(x, g, w, cache, pos, cos):
        y = heads(dsi.linear(dsi.rms_norm(x, g, eps=1e-5), w), 4)
        return dsi.rope(y, cos, cos, style="half"), dsi.kv_write(cache, pos, y, dim=2)

    inputs = tensors((1, 1, 12), (12,), (8, 12), (1, 2, 9, 4))
    plan = check(decode, [*inputs, torch.tensor([3]), torch.randn(1, 4)])
    assert plan.rows == 1
    attended = check(
        lambda q, k: dsi.attention(q, k, k, None, None, scale=0.4).transpose(1, 2).reshape(1, 1, 6),
        tensors((1, 1, 1, 6), (1, 1, 11, 6)),
    )
    assert attended.heads == 1


def test_parallel_residual() -> None:
    plan = check(lambda x, w, b, a, r: dsi.linear(x, w, b) + a + r, tensors((B, S, 18), (12, 18), (12,), (B, S, 12), (B, S, 12)))
    assert columns(plan) == [(12, 1, [C])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_operand_of_the_product(dtype: torch.dtype) -> None:
    def mlp(x, g, w, b):
        return dsi.activation(dsi.linear(dsi.rms_norm(x, g, eps=1e-5, cast="before"), w, b), "silu")

    inputs = [t.to(dtype) for t in tensors((B, S, 12), (12,), (18, 12), (18,))]
    plan = check(mlp, inputs, tolerance=2e-2)
    assert plan.x_dtype == dtype and any(isinstance(p, Op) and p.name == "cast" for p in parts_of(plan.x))


# ---------------------------------------------------------------------------------------------------------------------- attention


@BOTH
def test_attention_of_a_prefill(dynamic: tuple[int, ...]) -> None:
    def attend(q, k, v, mask):
        out = dsi.attention(q, k, v, mask, None, scale=0.4)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], 24)

    inputs = [*tensors((B, 4, S, 6), (B, 2, 11, 6), (B, 2, 11, 6)), torch.rand(B, 1, S, 11) > 0.4]
    plan = check(attend, inputs, dynamic)
    assert isinstance(plan, AttentionPlan)
    assert (plan.heads, plan.kv_heads, plan.head_size) == (4, 2, 6) and plan.mask is not None and plan.bias is None


def test_attention_takes_in_views_and_rope() -> None:
    def attend(x, k, v, cos, sin, bias):
        q = dsi.rope(heads(x, 6), cos, sin, style="half") * 2
        out = dsi.attention(q, k.transpose(1, 2), v[:, :, :11], None, bias, scale=0.4, softcap=2.0)
        return out.transpose(1, 2).reshape(B, S, 24) * 3 + 1

    check(attend, tensors((B, S, 24), (S, 6), (S, 6))[:1] + tensors((B, 11, 2, 6), (B, 2, 13, 6), (S, 6), (S, 6), (1, 4, 1, 11)))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 3), (False, 2)])
def test_attention_keeps_its_attributes(causal: bool, window: int) -> None:
    plan = check(
        lambda q, k, v: dsi.attention(q, k, v, None, None, scale=0.4, causal=causal, window=window),
        tensors((B, 4, S, 6), (B, 2, S, 6), (B, 2, S, 8)),
    )
    assert (plan.causal, plan.window, plan.value_size) == (causal, window, 8)


def test_a_mask_that_is_computed() -> None:
    def attend(q, k, v, length):
        seen = torch.arange(11)[None, :] <= torch.arange(S)[:, None] + length
        return dsi.attention(q, k, v, seen[None, None], None, scale=0.4)

    check(attend, [*tensors((B, 4, S, 6), (B, 2, 11, 6), (B, 2, 11, 6)), torch.tensor(3)])


def test_keys_of_a_growing_cache() -> None:
    def attend(q, old, new, v):
        return dsi.attention(q, torch.cat([old, new], 2), v, None, None, scale=0.4)

    inputs = tensors((B, 2, S, 6), (B, 2, 11, 6), (B, 2, S, 6), (B, 2, 18, 6))
    check(attend, inputs, (11,))
    check(attend, inputs)


# ---------------------------------------------------------------------------------------------------------------------------- rows


@BOTH
def test_embeddings_and_their_norm(dynamic: tuple[int, ...]) -> None:
    def embed(ids, table, places, positions, g, b):
        h = dsi.embedding(table, ids) + dsi.embedding(positions, places)
        return h, dsi.layer_norm(h, g, b, eps=1e-5)

    inputs = [torch.randint(0, 19, (B, S)), *tensors((19, 12)), torch.arange(S)[None] + 2, *tensors((30, 12), (12,), (12,))]
    plan = check(embed, inputs, dynamic)
    assert isinstance(plan, RowPlan) and len(plan.reductions) == 1 and kind_of(body_of(embed, inputs)) == "embedding"


def test_a_norm_seen_as_heads() -> None:
    def normed(x, g):
        h = dsi.rms_norm(x, g, eps=1e-5)
        return h.view(B, S, 3, 4).transpose(1, 2).clone(), x + 1

    plan = check(normed, tensors((B, S, 12), (12,)))
    assert len(plan.reductions) == 1
    assert plan.stores[0].coords == (FloorDiv(R, S), FloorDiv(C, 4), Mod(R, S), Mod(C, 4)), "neighbouring columns are neighbours in memory"


@BOTH
def test_a_gather_in_a_part_of_a_cat(dynamic: tuple[int, ...]) -> None:
    """The looked-up places are computed from coordinates that leave their range where the other part is selected."""

    def mask_and_sink(seen, sinks):
        rows, columns = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])[None, :]
        added = torch.where(seen[rows, columns], 0.0, -1e9)
        return torch.cat([added, sinks[:, None]], 1), torch.cat([sinks[:, None], added], 1)

    check(mask_and_sink, [torch.rand(B, S) < 0.5, *tensors((B,))], dynamic)


@BOTH
def test_rotary_tables(dynamic: tuple[int, ...]) -> None:
    def tables(inverse, positions):
        angles = positions[:, :, None].float() * inverse
        both = torch.cat([angles, angles], -1)
        return both.cos() * 0.5, both.sin() * 0.5

    plan = check(tables, [torch.rand(4), torch.randint(0, 9, (B, S))], dynamic)
    assert plan.columns == 8


@BOTH
def test_a_padding_mask_is_gathered(dynamic: tuple[int, ...]) -> None:
    def mask(padding, length):
        batch, keys = padding.shape
        rows = torch.arange(batch)[:, None, None, None]
        places = torch.arange(keys)[None, None, None, :]
        seen = places <= (torch.arange(3) + length)[None, None, :, None]
        return seen & padding[rows, places]

    check(mask, [torch.rand(B, 11) > 0.3, torch.tensor(4)], dynamic)


def test_negative_and_selected_indices() -> None:
    x = torch.randn(5, 6)
    check(lambda x, i: x[i] * 2, [x, torch.tensor([[1, -1], [0, -5]])])
    check(lambda x, i: x[:, i, None] * 2, [x, torch.tensor([2, -3])])
    check(lambda x, i: x.index_select(1, i) * 2, [x, torch.tensor([2, 2, 5])])
    check(lambda x, i: x.index_select(0, i) * 2, [x[0, 0], torch.tensor(0)])
    check(lambda x, i: x.gather(1, i) * 2, [x, torch.randint(0, 6, (4, 3))])


@pytest.mark.parametrize(("shifts", "dims"), [((-1,), (1,)), ((2,), (-1,)), ((11, -13), (0, 1))])
def test_rolled_dimensions(shifts: tuple[int, ...], dims: tuple[int, ...]) -> None:
    check(lambda x: x.roll(shifts, dims) + x, [torch.randn(4, 5)])
    if min(shifts) < 0 and len(shifts) == 1:
        check(lambda x: x.roll(shifts, dims) + x, [torch.randn(4, B)], (B,))
    else:
        with pytest.raises(Refused, match="more than once round"):
            plan_region(body_of(lambda x: x.roll(shifts, dims) + x, [torch.randn(S, B)], (B, S)))


def written(part: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that writes to a part of a copy."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        part(x, y)
        return x * 2

    return torch.func.functionalize(function)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a half": lambda x, y: x[:, :3].copy_(y[:, 3:]),
    "what is read": lambda x, y: x[:, :3].mul_(x[:, 3:]),
    "one row": lambda x, y: x[1].copy_(y[0]),
    "the last row": lambda x, y: x[-1].copy_(x[0]),
    "every second": lambda x, y: x[:, ::2].copy_(y[:, :3]),
    "every third but the first": lambda x, y: x[:, 1::3].copy_(y[:, 4:]),
    "from behind": lambda x, y: x[:, -2:].copy_(y[:, :2]),
    "a number": lambda x, y: x[:, 2].fill_(7),
    "one after another": lambda x, y: (x[1].copy_(y[0]), x[:, :3].add_(y[:, 1:4]), x[2, 1:].copy_(x[1, :5])),
    "all": lambda x, y: x[:].copy_(y),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_that_are_written(name: str, dynamic: bool) -> None:
    check(written(WRITES[name]), [torch.randn(4, 6), torch.randn(4, 6)], (4,) if dynamic else ())


def test_a_loop_of_writes_is_refused() -> None:
    def loop(x: torch.Tensor, y: torch.Tensor) -> None:
        for i in range(1, 12):
            x[i].add_(x[i - 1])

    with pytest.raises(Refused, match="writes into parts of one tensor"):
        plan_region(body_of(written(loop), [torch.randn(12, 6), torch.randn(4, 6)]))


def test_a_cache_written_alone() -> None:
    plan = check(lambda c, p, n: dsi.kv_write(c, p, n * 2, dim=-2), [torch.randn(2, 9, 4), torch.tensor([8, 0, 3]), torch.randn(2, 3, 4)])
    assert isinstance(plan, RowPlan) and plan.stores[0].base == 0


def test_scalars() -> None:
    check(lambda n: n + 1, [torch.tensor(3)])
    check(lambda n, x: n * x, [torch.tensor(3), torch.randn(())])


def test_a_size_used_as_a_number() -> None:
    def scaled(x):
        return x * x.shape[0] + torch.arange(x.shape[0])[:, None]

    body = body_of(scaled, [torch.randn(B, 3)], (B,))
    plan = plan_region(body)
    for size in (B, 2, 9):
        assert_means(body, plan, scaled, [torch.randn(size, 3)])


def test_planning_adds_no_guard() -> None:
    def layer(x, g, w, cos, sin):
        h = dsi.rms_norm(x, g, eps=1e-5)
        return dsi.rope(heads(dsi.linear(h, w), 8), cos, sin, style="half"), torch.cat([h, h[:, :, :]], -1)[..., :12].clone()

    body = body_of(layer, tensors((B, S, 12), (12,), (32, 12), (S, 8), (S, 8)), (B, S))
    shapes = next(iter(body.graph.nodes)).meta["val"].fake_mode.shape_env
    before = len(shapes.guards)
    plan_region(body)
    assert len(shapes.guards) == before


def test_the_interpreter_notices_a_wrong_plan() -> None:
    import dataclasses

    body = body_of(lambda x, y: x + y, tensors((3, 4), (3, 4)))
    plan = plan_region(body)
    assert isinstance(plan, RowPlan)
    (store,) = plan.stores
    inputs = tensors((3, 4), (3, 4))
    for coords in ((R, sympy.Integer(0)), (R, C + 1)):
        wrong = dataclasses.replace(plan, stores=(dataclasses.replace(store, coords=coords),))
        with pytest.raises(AssertionError, match="not written once"):
            evaluate_plan(wrong, inputs)
    outside = dataclasses.replace(store, value=Load(0, (R, C + 1), torch.float32))
    with pytest.raises(AssertionError, match="outside"):
        evaluate_plan(dataclasses.replace(plan, stores=(outside,)), inputs)
