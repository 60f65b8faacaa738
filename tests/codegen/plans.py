"""Plans made by hand, as `dsi.ir.analysis` would make them, each with random inputs and its value in plain torch (fp64)."""

from __future__ import annotations

import sympy
import torch
import torch.nn.functional as F
from dsi.ir import ops
from dsi.ir import tile as t
from sympy import Mod, floor

from .support import Case, cast, const, op

R, C, K = t.R, t.C, t.K
S0, S1, S2 = sympy.symbols("s0 s1 s2", integer=True, positive=True)


def sizes(symbolic: bool, **values: int):
    """(sizes by name, values of the symbols): symbols s0, s1, … where `symbolic`, else plain numbers."""
    if not symbolic:
        return [sympy.Integer(v) for v in values.values()], {}
    symbols = (S0, S1, S2)[: len(values)]
    return list(symbols), dict(zip(symbols, values.values(), strict=True))


def rms_of(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rms_prologue(case: Case, x: t.Expr, weight: int, inner, eps: float):
    """Llama's norm: the normalised value is rounded before it is multiplied by the weight."""
    normal = cast(op("mul", x, t.Statistic(0, "rstd")), case.dtype)
    return op("mul", normal, case.load(weight, K), dtype=case.dtype), (t.Reduction("rms", x, K, sympy.sympify(inner), eps),)


def layer_prologue(case: Case, x: t.Expr, weight: int, bias: int, inner, eps: float):
    centred = op("mul", op("sub", x, t.Statistic(0, "mean")), t.Statistic(0, "rstd"))
    value = op("add", op("mul", centred, case.load(weight, K)), case.load(bias, K), dtype=case.dtype)
    return value, (t.Reduction("layer", x, K, sympy.sympify(inner), eps),)


def partner(d: int, rotary: int | None = None, style: str = "half") -> sympy.Expr:
    """The column whose value rope mixes into column c of a head of d channels."""
    rotary = rotary or d
    lane = Mod(C, d)
    if style == "half":
        return C - lane + sympy.Piecewise((lane + rotary // 2, lane < rotary // 2), (lane - rotary // 2, True))
    return C - lane + sympy.Piecewise((lane + 1, sympy.Eq(Mod(lane, 2), 0)), (lane - 1, True))


def rope_epilogue(case: Case, body: t.Expr, cos: t.Expr, sin: t.Expr, d: int, rotary: int | None = None, style: str = "half") -> t.Expr:
    rotary = rotary or d
    lane = Mod(C, d)
    moved = t.Permuted(body, C, partner(d, rotary, style), body.dtype)
    first = t.Test(lane < rotary // 2) if style == "half" else t.Test(sympy.Eq(Mod(lane, 2), 0))
    turned = op("where", first, op("neg", moved), moved)
    roped = op("add", op("mul", body, cos), op("mul", turned, sin), dtype=case.dtype)
    return roped if rotary == d else op("where", t.Test(lane < rotary), roped, body, dtype=case.dtype)


def llama_qkv(
    dtype, batch=2, length=3, heads=4, kv_heads=2, d=16, hidden=64, cache=11, symbolic=False, qk_norm=False, style="half", seed=0
) -> Case:
    """RMSNorm, three linears, optional norm of each head, rope, and the new keys and values written into their caches."""
    (b, s), values = sizes(symbolic, batch=batch, length=length)
    case = Case("llama_qkv", dtype, values, seed)
    x = case.input("x", (b, s, hidden), scale=3.0)
    norm = case.input("norm_weight", (hidden,), shift=1.0, scale=0.3)
    wq, wk, wv = (
        case.input(f"{n}_weight", (h * d, hidden), scale=hidden**-0.5) for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    cos, sin = (case.input(n, (s, d), dtype=torch.float32) for n in ("cos", "sin"))
    pos = case.input("positions", (s,), dtype=torch.int64, values=torch.randperm(cache)[:length])
    # Caches as a StaticCache slice would be: longer rows than heads need.
    kc = case.input("k_cache", (b, kv_heads, cache, d), strides=(kv_heads * cache * d + 5, cache * d, d, 1))
    vc = case.input("v_cache", (b, kv_heads, cache, d))
    qn, kn = (case.input(f"{n}_norm", (d,), shift=1.0, scale=0.3) for n in "qk") if qk_norm else (None, None)

    row = (floor(R / s), Mod(R, s))
    xe = case.load(x, *row, K)
    prologue, reductions = rms_prologue(case, xe, norm, hidden, 1e-6)
    cos_e, sin_e = case.load(cos, row[1], Mod(C, d)), case.load(sin, row[1], Mod(C, d))

    y = rms_of(case.real(x), case.real(norm), 1e-6)

    def heads_of(w: int, n: int) -> torch.Tensor:
        return (y @ case.real(w).T).view(batch, length, n, d).transpose(1, 2)

    q, k, v = heads_of(wq, heads), heads_of(wk, kv_heads), heads_of(wv, kv_heads)
    if qk_norm:
        q, k = rms_of(q, case.real(qn), 1e-5), rms_of(k, case.real(kn), 1e-5)
    q, k = (ops.rope_reference(e, case.real(cos), case.real(sin), style=style) for e in (q, k))
    k_all = case.inputs[kc].double().index_copy(2, case.inputs[pos], k)
    v_all = case.inputs[vc].double().index_copy(2, case.inputs[pos], v)
    out_q = case.output("q", (b, heads, s, d), q)
    out_k = case.output("k_cache_new", (b, kv_heads, cache, d), k_all, strides=(kv_heads * cache * d + 5, cache * d, d, 1), base=kc)
    out_v = case.output("v_cache_new", (b, kv_heads, cache, d), v_all, base=vc)

    def epilogue(weight: int | None) -> tuple[t.Expr, tuple[t.Reduction, ...]]:
        body: t.Expr = cast(t.Window(0), dtype)
        if weight is None:
            return rope_epilogue(case, body, cos_e, sin_e, d, style=style), ()
        held = t.Reduction("rms", body, C, sympy.Integer(d), 1e-5)
        normed = op("mul", op("mul", body, t.Statistic(0, "rstd")), case.load(weight, Mod(C, d)), dtype=dtype)
        return rope_epilogue(case, normed, cos_e, sin_e, d, style=style), (held,)

    position = case.load(pos, row[1])
    q_value, q_held = epilogue(qn)
    k_value, k_held = epilogue(kn)

    def at(middle):
        return row[0], floor(C / d), middle, Mod(C, d)

    segments = (
        t.Segment(sympy.Integer(heads * d), (t.WeightWindow(wq, C),), (t.Store(out_q, at(row[1]), q_value, dtype),), d, q_held),
        t.Segment(sympy.Integer(kv_heads * d), (t.WeightWindow(wk, C),), (t.Store(out_k, at(position), k_value, dtype, kc),), d, k_held),
        t.Segment(
            sympy.Integer(kv_heads * d), (t.WeightWindow(wv, C),), (t.Store(out_v, at(position), cast(t.Window(0), dtype), dtype, vc),)
        ),
    )
    plan = t.LinearPlan(b * s, sympy.Integer(hidden), prologue, dtype, segments, reductions)
    return case.finish(
        plan, ["rms_norm = dsi.rms_norm(x, norm_weight)", "q = dsi.linear(rms_norm, q_weight)"], ["model.py:12  q = self.q_proj(x)"]
    )


def gpt2_qkv(dtype, batch=1, length=5, heads=2, d=24, symbolic=False, seed=0) -> Case:
    """LayerNorm, one fused [K, N] weight cut into q, k and v, bias; x has a large mean, which a one-pass variance would not survive."""
    (b, s), values = sizes(symbolic, batch=batch, length=length)
    hidden = heads * d
    case = Case("gpt2_qkv", dtype, values, seed)
    x = case.input("x", (b, s, hidden), shift=30.0 if dtype == torch.float32 else 20.0)
    g, beta = case.input("ln_weight", (hidden,), shift=1.0, scale=0.3), case.input("ln_bias", (hidden,), scale=0.3)
    w = case.input("c_attn_weight", (hidden, 3 * hidden), scale=hidden**-0.5)
    bias = case.input("c_attn_bias", (3 * hidden,))
    row = (floor(R / s), Mod(R, s))
    prologue, reductions = layer_prologue(case, case.load(x, *row, K), g, beta, hidden, 1e-5)
    y = F.layer_norm(case.real(x), (hidden,), case.real(g), case.real(beta), 1e-5) @ case.real(w) + case.real(bias)
    segments = []
    for i, name in enumerate("qkv"):
        out = case.output(name, (b, heads, s, d), y[..., i * hidden : (i + 1) * hidden].view(batch, length, heads, d).transpose(1, 2))
        value = op("add", t.Window(0), case.load(bias, C + i * hidden), dtype=dtype)
        store = t.Store(out, (row[0], floor(C / d), row[1], Mod(C, d)), value, dtype)
        segments.append(t.Segment(sympy.Integer(hidden), (t.WeightWindow(w, C + i * hidden, kn=True),), (store,)))
    return case.finish(t.LinearPlan(b * s, sympy.Integer(hidden), prologue, dtype, tuple(segments), reductions))


def neox_qkv(dtype, batch=2, length=3, heads=2, d=20, rotary=8, hidden=48, symbolic=False, seed=0) -> Case:
    """One weight whose columns go head by head through q, k and v; rope on the first channels of each head; biases."""
    (b, s), values = sizes(symbolic, batch=batch, length=length)
    case = Case("neox_qkv", dtype, values, seed)
    x = case.input("x", (b, s, hidden))
    g, beta = case.input("ln_weight", (hidden,), shift=1.0, scale=0.3), case.input("ln_bias", (hidden,), scale=0.3)
    w = case.input("qkv_weight", (3 * heads * d, hidden), scale=hidden**-0.5)
    bias = case.input("qkv_bias", (3 * heads * d,))
    cos, sin = (case.input(n, (1, s, rotary)) for n in ("cos", "sin"))
    row = (floor(R / s), Mod(R, s))
    prologue, reductions = layer_prologue(case, case.load(x, *row, K), g, beta, hidden, 1e-5)
    y = F.layer_norm(case.real(x), (hidden,), case.real(g), case.real(beta), 1e-5) @ case.real(w).T + case.real(bias)
    parts = y.view(batch, length, heads, 3, d)
    segments = []
    for i, name in enumerate("qkv"):
        n = floor(C / d) * 3 * d + i * d + Mod(C, d)
        body = op("add", t.Window(0), case.load(bias, n), dtype=dtype)
        expected = parts[:, :, :, i].transpose(1, 2)
        if i < 2:
            cos_e, sin_e = (case.load(e, 0, row[1], Mod(C, d)) for e in (cos, sin))
            body = rope_epilogue(case, body, cos_e, sin_e, d, rotary)
            expected = ops.rope_reference(expected, case.real(cos), case.real(sin), style="half")
        out = case.output(name, (b, heads, s, d), expected)
        store = t.Store(out, (row[0], floor(C / d), row[1], Mod(C, d)), body, dtype)
        segments.append(t.Segment(sympy.Integer(heads * d), (t.WeightWindow(w, n),), (store,), d if i < 2 else 1))
    return case.finish(t.LinearPlan(b * s, sympy.Integer(hidden), prologue, dtype, tuple(segments), reductions))


def gate_up(dtype, rows=3, hidden=64, inter=37, kind="silu", symbolic=False, seed=0) -> Case:
    """Two windows from one pass over x, and a value of the prologue (the residual sum) that leaves the region too."""
    (r,), values = sizes(symbolic, rows=rows)
    case = Case("gate_up", dtype, values, seed)
    x, delta = case.input("x", (r, hidden)), case.input("delta", (r, hidden))
    norm = case.input("norm_weight", (hidden,), shift=1.0, scale=0.3)
    wg, wu = (case.input(f"{n}_weight", (inter, hidden), scale=hidden**-0.5) for n in ("gate", "up"))
    total = op("add", case.load(x, R, K), case.load(delta, R, K), dtype=dtype)
    prologue, reductions = rms_prologue(case, total, norm, hidden, 1e-5)
    summed = case.real(x) + case.real(delta)
    y = rms_of(summed, case.real(norm), 1e-5)
    expected = ops.ACTIVATIONS[kind](y @ case.real(wg).T) * (y @ case.real(wu).T)
    residual = case.output("residual", (r, hidden), summed)
    out = case.output("gated", (r, inter), expected)
    value = op("mul", op(kind, t.Window(0)), t.Window(1), dtype=dtype)
    segment = t.Segment(sympy.Integer(inter), (t.WeightWindow(wg, C), t.WeightWindow(wu, C)), (t.Store(out, (R, C), value, dtype),))
    row_stores = (t.Store(residual, (R, K), total, dtype),)
    return case.finish(t.LinearPlan(sympy.sympify(r), sympy.Integer(hidden), prologue, dtype, (segment,), reductions, row_stores))


def projection(dtype, rows=3, inner=80, columns=37, kind=None, strided=True, kn=False, symbolic=False, seed=0) -> Case:
    """A linear with bias, an activation and a residual; x is a slice of a wider tensor, the weight may be one too."""
    (r,), values = sizes(symbolic, rows=rows)
    case = Case("projection", dtype, values, seed)
    x = case.input("x", (r, inner), strides=(inner + 24, 1) if strided else None)
    weight_sizes = (inner, columns) if kn else (columns, inner)
    w = case.input("weight", weight_sizes, strides=(weight_sizes[1] + 8, 1) if strided else None, scale=inner**-0.5)
    bias, residual = case.input("bias", (columns,)), case.input("residual", (r, columns))
    y = case.real(x) @ (case.real(w) if kn else case.real(w).T) + case.real(bias)
    y = ops.ACTIVATIONS[kind](y) if kind else y
    out = case.output("out", (r, columns), y + case.real(residual))
    body: t.Expr = op("add", t.Window(0), case.load(bias, C), dtype=dtype)
    body = op(kind, body, dtype=dtype) if kind else body
    value = op("add", body, case.load(residual, R, C), dtype=dtype)
    segment = t.Segment(sympy.Integer(columns), (t.WeightWindow(w, C, kn),), (t.Store(out, (R, C), value, dtype),))
    return case.finish(t.LinearPlan(sympy.sympify(r), sympy.Integer(inner), case.load(x, R, K), dtype, (segment,)))


def attention(
    dtype,
    batch=2,
    heads=4,
    kv_heads=2,
    queries=3,
    keys=19,
    d=16,
    dv=None,
    mask="none",
    bias=False,
    causal=False,
    window=0,
    softcap=0.0,
    sinks=False,
    strided=False,
    symbolic=False,
    seed=0,
) -> Case:
    """Attention of every kind that `ir.ops.attention` knows; the result is stored token by token, as the output projection reads it."""
    (b, s, n), values = sizes(symbolic, batch=batch, queries=queries, keys=keys)
    dv = dv or d
    case = Case("attention", dtype, values, seed)
    # Strided: views of one fused projection, tokens outermost.
    step = heads * d + 2 * kv_heads * d
    strides = (lambda length: (length * step, d, step, 1)) if strided else (lambda length: None)
    q = case.input("q", (b, heads, s, d), strides=strides(s), scale=1.5)
    k = case.input("k", (b, kv_heads, n, d), strides=strides(n))
    v = case.input("v", (b, kv_heads, n, dv))
    B, H, G, S, J, D, E = t.B, t.H, t.G, t.S, t.J, t.D, t.E
    mask_e = bias_e = mask_t = bias_t = None
    if isinstance(mask, torch.Tensor):  # one whose dimensions of 1 are those that it repeats along
        whole = (b, heads, s, n)
        m = case.input("mask", [1 if size == 1 else full for size, full in zip(mask.shape, whole, strict=True)], mask.dtype, values=mask)
        mask_e = case.load(m, *(0 if size == 1 else symbol for size, symbol in zip(mask.shape, (B, H, S, J), strict=True)))
        mask_t = case.real(m)
    elif mask == "bool":
        values_t = torch.rand(batch, 1, queries, keys, generator=case.generator) < 0.6
        if batch * queries > 1:  # beside others, lest zeros are all that is expected
            values_t[0, 0, 0] = False  # a row that sees nothing
        m = case.input("mask", (b, 1, s, n), dtype=torch.bool, values=values_t)
        mask_e, mask_t = case.load(m, B, 0, S, J), case.inputs[m]
    elif mask == "positions":  # what a query of its entry has before it, computed from where it is
        at = case.input("positions", (b, s), dtype=torch.int64, values=torch.randint(0, keys, (batch, queries), generator=case.generator))
        mask_e, mask_t = (
            op("le", t.Index(J), case.load(at, B, S), dtype=torch.bool),
            torch.arange(keys) <= case.inputs[at][:, None, :, None],
        )
    elif mask == "additive":
        values_t = torch.where(torch.rand(1, 1, queries, keys, generator=case.generator) < 0.6, 0.0, float("-inf"))
        values_t[0, 0, -1] = torch.finfo(dtype).min  # masked by a finite number: uniform weights, not none
        m = case.input("mask", (1, 1, s, n), values=values_t)
        mask_e, mask_t = case.load(m, 0, 0, S, J), case.real(m)
    if bias:
        slope = case.input("slope", (heads,), dtype=torch.float32)
        bias_e = op("mul", case.load(slope, H), cast(t.Index(J), torch.float32))
        bias_t = case.real(slope).view(1, heads, 1, 1) * torch.arange(keys)
    sink = case.input("sinks", (heads,), scale=2.0) if sinks else None
    sinks_t = None if sink is None else case.real(sink)
    expected = ops.attention_reference(
        case.real(q), case.real(k), case.real(v), mask_t, bias_t, sinks_t, scale=0.3, causal=causal, window=window, softcap=softcap
    )
    out = case.output("out", (b, s, heads * dv), expected.transpose(1, 2).reshape(batch, queries, heads * dv))
    store = t.Store(out, (B, S, H * dv + E), cast(t.Window(0), dtype), dtype)
    plan = t.AttentionPlan(
        sympy.sympify(b),
        heads,
        kv_heads,
        sympy.sympify(s),
        sympy.sympify(n),
        d,
        dv,
        case.load(q, B, H, S, D),
        case.load(k, B, G, J, D),
        case.load(v, B, G, J, E),
        mask_e,
        bias_e,
        0.3,
        causal,
        window,
        softcap,
        (store,),
        dtype,
        None if sink is None else case.load(sink, H),
    )
    return case.finish(plan)


def post_norm(dtype, rows=5, columns=77, symbolic=False, seed=0) -> Case:
    """BERT's residual and LayerNorm, whole rows; the sum leaves too."""
    (r,), values = sizes(symbolic, rows=rows)
    case = Case("post_norm", dtype, values, seed)
    x, y = case.input("x", (r, columns), shift=50.0 if dtype == torch.float32 else 5.0), case.input("y", (r, columns))
    g, beta = case.input("weight", (columns,), shift=1.0, scale=0.3), case.input("bias", (columns,), scale=0.3)
    total = op("add", case.load(x, R, C), case.load(y, R, C), dtype=dtype)
    reduction = t.Reduction("layer", total, C, sympy.Integer(columns), 1e-12)
    centred = op("mul", op("sub", total, t.Statistic(0, "mean")), t.Statistic(0, "rstd"))
    value = op("add", op("mul", centred, case.load(g, C)), case.load(beta, C), dtype=dtype)
    summed = case.real(x) + case.real(y)
    out = case.output("out", (r, columns), F.layer_norm(summed, (columns,), case.real(g), case.real(beta), 1e-12))
    left = case.output("sum", (r, columns), summed)
    stores = (t.Store(out, (R, C), value, dtype), t.Store(left, (R, C), total, dtype))
    return case.finish(t.RowPlan(sympy.sympify(r), sympy.Integer(columns), stores, (reduction,)))


def embedding(dtype, batch=2, length=3, vocabulary=19, hidden=40, symbolic=False, seed=0) -> Case:
    """Token and position embeddings, summed; ids have a stride, positions come from a tensor."""
    (b, s), values = sizes(symbolic, batch=batch, length=length)
    case = Case("embedding", dtype, values, seed)
    table, positions = case.input("wte", (vocabulary, hidden)), case.input("wpe", (31, hidden))
    ids = case.input("ids", (b, s), dtype=torch.int64, strides=(2 * s, 2), values=torch.randint(vocabulary, (batch, length)))
    start = case.input("start", (), dtype=torch.int64, values=torch.tensor(7))
    row = (floor(R / s), Mod(R, s))
    position = op("add", case.load(start), t.Index(row[1]), dtype=torch.int64)
    value = op("add", case.load(table, case.load(ids, *row), C), case.load(positions, position, C), dtype=dtype)
    expected = case.real(table)[case.inputs[ids]] + case.real(positions)[7 : 7 + length]
    out = case.output("embedded", (b, s, hidden), expected)
    store = t.Store(out, (*row, C), value, dtype)
    return case.finish(t.RowPlan(b * s, sympy.Integer(hidden), (store,)))


def causal_mask(batch=2, length=3, keys=11, symbolic=False, seed=0) -> Case:
    """The bool mask of a decoder with a padded batch: key <= position, and not padding."""
    (b, s, n), values = sizes(symbolic, batch=batch, length=length, keys=keys)
    case = Case("causal_mask", torch.bool, values, seed)
    case.scalar(s)
    start = case.input("start", (), dtype=torch.int64, values=torch.tensor(4))
    padding = case.input("padding", (b, n), dtype=torch.int64, values=torch.randint(2, (batch, keys)))
    row = (floor(R / s), Mod(R, s))
    position = op("add", case.load(start), t.Index(row[1]), dtype=torch.int64)
    causal = op("le", t.Index(C), position, dtype=torch.bool)
    value = op("and", causal, cast(case.load(padding, row[0], C), torch.bool), dtype=torch.bool)
    allowed = torch.arange(keys) <= (4 + torch.arange(length))[:, None]
    out = case.output("mask", (b, 1, s, n), allowed[None, None] & (case.inputs[padding] != 0)[:, None, None])
    store = t.Store(out, (row[0], 0, row[1], C), value, torch.bool)
    return case.finish(t.RowPlan(b * s, n, (store,)))


def concatenated(dtype, rows=3, left=5, right=9, seed=0) -> Case:
    """A cat of two tensors along the columns: each part is only read where it lies."""
    case = Case("concatenated", dtype, {}, seed)
    x, y = case.input("x", (rows, left)), case.input("y", (rows, right))
    value = op("where", t.Test(left > C), case.load(x, R, C), op("mul", case.load(y, R, C - left), const(-2.0)), dtype=dtype)
    out = case.output("out", (rows, left + right), torch.cat([case.real(x), case.real(y) * -2], -1))
    return case.finish(t.RowPlan(sympy.Integer(rows), sympy.Integer(left + right), (t.Store(out, (R, C), value, dtype),)))
