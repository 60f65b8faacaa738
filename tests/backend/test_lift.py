"""Lift: which torch calls become semantic operators, that they mean the same, and what is left alone with a sentence."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler.observe import collecting
from dsi.ir.context import Context, Fuel
from dsi.ir.options import Options
from dsi.passes.lift import lift
from hypothesis import given, settings
from hypothesis import strategies as st


def lifted(function, *args, options=None, dynamic=None, fuel=None):
    """The graph that Dynamo captures, after lift, and the context; and that it computes what `function` computes, strides included."""
    found = []

    def backend(gm, inputs):
        context = Context(Options.parse(options), fuel=Fuel(fuel))
        before = {n.name: n.meta["example_value"].stride() for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), torch.Tensor)}
        lift(gm, context)
        found.append((gm, context, before))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
        wanted = function(*args)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1), (a.stride(), b.stride())
    ((gm, context, _),) = found
    return gm, context


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


def assert_left(context, rule, words):
    assert not context.report.hits[rule]
    assert words in str(context.report.misses[rule]) and words in str(context.report.unfused[0]), str(context.report.misses[rule])
    assert "test_lift.py:" in str(context.report.misses[rule])


# ------------------------------------------------------------------------------------------------------------------------ linear

LINEARS = {
    "positional": lambda x, w, b: F.linear(x, w, b),
    "keywords": lambda x, w, b: F.linear(bias=b, weight=w, input=x),
    "no_bias": lambda x, w, b: F.linear(x, w),
    "none_bias": lambda x, w, b: F.linear(x, w, bias=None),
    "aten": lambda x, w, b: torch.ops.aten.linear.default(x, w, b),
    "vector": lambda x, w, b: F.linear(x[0, 0], w, b),
    "transposed_input": lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
    "strided_weight": lambda x, w, b: F.linear(x, w.t().contiguous().t(), b),
}


@pytest.mark.parametrize("name", LINEARS)
def test_linear(name):
    x, w, b = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7)
    gm, context = lifted(LINEARS[name], x, w, b)
    assert context.report.hits == {"lift.linear": 1}
    assert targets(gm).count("dsi.linear.default") == 1
    assert not any(n.target in (F.linear, torch.ops.aten.linear.default) for n in gm.graph.nodes)


def test_linear_keeps_its_place_in_the_source():
    gm, context = lifted(lambda x, w: F.linear(x, w).relu(), torch.randn(3, 5), torch.randn(7, 5))
    (node,) = [n for n in gm.graph.nodes if str(n.target) == "dsi.linear.default"]
    assert "test_lift.py" in node.meta["stack_trace"]
    assert node.meta["dsi_provenance"][0] == "lift.linear"
    assert "passes/lift.py:" in context.fuel.log[0] and "test_lift.py:" in context.fuel.log[0]


def test_linear_without_an_output_dimension_is_left():
    _, context = lifted(lambda x, w: F.linear(x, w), torch.randn(3, 5), torch.randn(5))
    assert_left(context, "lift.linear", "the weight has rank 1")


def test_linear_of_integers_is_left():
    _, context = lifted(lambda x, w: F.linear(x, w), torch.ones(3, 5, dtype=torch.int64), torch.ones(7, 5, dtype=torch.int64))
    assert_left(context, "lift.linear", "torch.int64")


def test_functions_of_the_same_name_are_left():
    def linear(x, w):
        return x @ w.t() + 1

    gm, context = lifted(lambda x, w: linear(x, w), torch.randn(3, 5), torch.randn(7, 5))
    assert not context.report.hits and "dsi" not in str(targets(gm))


# --------------------------------------------------------------------------------------------------------------------- attention

B, H, S, L, D, E = 2, 6, 5, 7, 4, 3


def qkv(heads_kv=H, length=L, value_size=E, dtype=torch.float32):
    return (
        torch.randn(B, H, S, D, dtype=dtype),
        torch.randn(B, heads_kv, length, D, dtype=dtype),
        torch.randn(B, heads_kv, length, value_size, dtype=dtype),
    )


sdpa = F.scaled_dot_product_attention

ATTENTIONS = {
    "plain": (lambda q, k, v: sdpa(q, k, v), {"scale": D**-0.5, "causal": False}),
    "scale": (lambda q, k, v: sdpa(q, k, v, scale=0.3), {"scale": 0.3, "causal": False}),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), {"scale": D**-0.5, "causal": True}),
    "positional": (lambda q, k, v: sdpa(q, k, v, None, 0.0, True), {"scale": D**-0.5, "causal": True}),
    "keywords": (lambda q, k, v: sdpa(value=v, key=k, query=q), {"scale": D**-0.5, "causal": False}),
    "torch_spelling": (lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v), {"scale": D**-0.5, "causal": False}),
    "aten": (lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, scale=2.0), {"scale": 2.0, "causal": False}),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    function, attributes = ATTENTIONS[name]
    gm, context = lifted(function, *qkv())
    assert context.report.hits == {"lift.attention": 1}
    (node,) = [n for n in gm.graph.nodes if str(n.target) == "dsi.attention.default"]
    assert node.kwargs == attributes


@pytest.mark.parametrize("length", [1, S - 2, S, S + 4])
def test_causal_is_aligned_at_the_top_left(length):
    """With more keys than queries, or fewer, torch lets query i see keys 0..i."""
    _, context = lifted(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(length=length))
    assert context.report.hits["lift.attention"]


MASKS = [(S, L), (1, L), (S, 1), (H, S, L), (1, 1, L), (B, 1, S, L), (B, H, S, L), (B, 1, 1, L), (1, H, S, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape, kind):
    mask = torch.rand(shape) > 0.4 if kind == "bool" else torch.randn(shape)
    _, context = lifted(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *qkv(), mask)
    assert context.report.hits["lift.attention"]


def test_a_row_that_sees_nothing_is_zero():
    mask = torch.ones(S, L, dtype=torch.bool)
    mask[2] = False
    q, k, v = qkv()
    _, context = lifted(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask)
    assert context.report.hits["lift.attention"]


def test_grouped_heads():
    _, context = lifted(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(heads_kv=2))
    assert context.report.hits["lift.attention"]


def test_one_key_head_is_broadcast():
    _, context = lifted(lambda q, k, v: sdpa(q, k, v), *qkv(heads_kv=1))
    assert context.report.hits["lift.attention"]


REPEATS = {
    "getitem_reshape": lambda t, n: t[:, :, None, :, :].expand(B, 2, n, L, t.shape[3]).reshape(B, 2 * n, L, t.shape[3]),
    "short_getitem": lambda t, n: t[:, :, None].expand(-1, -1, n, -1, -1).reshape(B, 2 * n, L, -1),
    "unsqueeze_flatten": lambda t, n: t.unsqueeze(2).expand(B, 2, n, L, t.shape[3]).flatten(1, 2),
    "negative_unsqueeze": lambda t, n: t.unsqueeze(-3).expand(B, 2, n, L, t.shape[3]).flatten(1, 2),
    "functions": lambda t, n: torch.flatten(torch.unsqueeze(t, 2).expand(B, 2, n, L, t.shape[3]), 1, 2),
    "keyword_unsqueeze": lambda t, n: t.unsqueeze(dim=2).expand(B, 2, n, L, t.shape[3]).flatten(1, 2),
}


@pytest.mark.parametrize("name", REPEATS)
def test_the_copy_of_key_and_value_heads_is_absorbed(name):
    repeat = REPEATS[name]
    gm, context = lifted(lambda q, k, v: sdpa(q, repeat(k, 3), repeat(v, 3)), *qkv(heads_kv=2))
    assert context.report.hits["lift.attention"] == 1
    (node,) = [n for n in gm.graph.nodes if str(n.target) == "dsi.attention.default"]
    assert [n.op for n in node.args[1:3]] == ["placeholder", "placeholder"]
    assert "expand" not in targets(gm), "the copies are still computed"


def test_key_and_value_may_be_one_repeated_tensor():
    repeat = REPEATS["getitem_reshape"]

    def function(q, k):
        wide = repeat(k, 3)
        return sdpa(q, wide, wide)

    q, k, _ = qkv(heads_kv=2)
    gm, _ = lifted(function, q, k)
    assert "expand" not in targets(gm)


def test_a_copy_that_is_used_elsewhere_stays():
    def function(q, k, v):
        wide = REPEATS["getitem_reshape"](k, 3)
        return sdpa(q, wide, REPEATS["getitem_reshape"](v, 3)), wide * 2

    gm, _ = lifted(function, *qkv(heads_kv=2))
    assert targets(gm).count("expand") == 1


WRITES = {
    "method": lambda k: k.mul_(2),
    "setitem": lambda k: k.__setitem__((slice(None), 0), 3.0),
    "operator": lambda k: k.__iadd__(1),
    "through_a_view": lambda k: k[:, :, 1:].zero_(),
    "function": lambda k: F.relu(k, inplace=True),
    "function_by_position": lambda k: F.relu(k, True),
    "function_with_underscore": lambda k: torch.relu_(k),
    "out": lambda k: torch.neg(k, out=k),
    "aten": lambda k: torch.ops.aten.neg_.default(k),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_copy_made_before_a_write_is_kept(name):
    """Attention must see what the copy saw, not what was written to the cache later."""

    def function(q, k, v):
        k, v = k.clone(), v.clone()
        wide_k, wide_v = REPEATS["getitem_reshape"](k, 3), REPEATS["getitem_reshape"](v, 3)
        WRITES[name](k)
        return sdpa(q, wide_k, wide_v), k

    gm, context = lifted(function, *qkv(heads_kv=2))
    assert context.report.hits["lift.attention"] == 1 and targets(gm).count("expand") == 2


NOT_REPEATS = {
    # The new axis before the heads: head h then reads key head h % 2, not h // 3.
    "other_order": lambda t, n: t.unsqueeze(1).expand(B, n, 2, L, t.shape[3]).reshape(B, 2 * n, L, t.shape[3]),
    "other_order_by_index": lambda t, n: t[:, None].expand(B, n, 2, L, t.shape[3]).reshape(B, 2 * n, L, t.shape[3]),
    "sliced": lambda t, n: t[:, :, None, 1:].expand(B, 2, n, L - 1, t.shape[3]).reshape(B, 2 * n, L - 1, t.shape[3]),
    "stepped": lambda t, n: t[:, :, None, ::1, ::1].expand(B, 2, n, L, t.shape[3]).reshape(B, 2 * n, L, t.shape[3]),
    "repeated": lambda t, n: t.repeat(1, n, 1, 1),
    "scaled": lambda t, n: (t[:, :, None] * 2).expand(B, 2, n, L, t.shape[3]).reshape(B, 2 * n, L, t.shape[3]),
}


@pytest.mark.parametrize("name", NOT_REPEATS)
def test_what_only_looks_like_the_copy_is_kept(name):
    repeat = NOT_REPEATS[name]
    gm, context = lifted(lambda q, k, v: sdpa(q, repeat(k, 3), repeat(v, 3)), *qkv(heads_kv=2))
    assert context.report.hits["lift.attention"] == 1  # lifted over the copies
    (node,) = [n for n in gm.graph.nodes if str(n.target) == "dsi.attention.default"]
    assert [n.op for n in node.args[1:3]] != ["placeholder", "placeholder"]


def test_only_one_of_key_and_value_is_copied():
    """Absorbing one would leave key and value with different head counts."""
    q, k, _ = qkv(heads_kv=2)
    v = torch.randn(B, H, L, E)
    gm, context = lifted(lambda q, k, v: sdpa(q, REPEATS["getitem_reshape"](k, 3), v), q, k, v)
    assert context.report.hits["lift.attention"] == 1 and "expand" in targets(gm)


RANKS = {
    "heads in the batch": lambda q, k, v: sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale=0.3),
    "one head alone": lambda q, k, v: sdpa(q[:, 1], k[:, 1], v[:, 1], (torch.arange(L) < 3) | (torch.arange(S)[:, None] > 1)),
    "a mask a sequence": lambda q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0], torch.arange(B * S * L).view(B, S, L) % 5 < 3),
    "windows": lambda q, k, v: sdpa(q[:, None], k[:, None], v[:, None], is_causal=True),
    "windows of queries side by side": lambda q, k, v: (lambda x: (x, x.transpose(2, 3).reshape(1, B, S, H * E), x.view(-1)))(
        sdpa(q.transpose(1, 2).contiguous().transpose(1, 2)[None], k[None], v[None])
    ),
    "windows of a mask": lambda q, k, v: sdpa(q[None, None], k[None, None], v[None, None], (torch.arange(L) < 3).expand(S, L)),
}


@pytest.mark.parametrize("name, dynamic", [*((name, None) for name in RANKS), ("heads in the batch", True)])
def test_attention_of_other_ranks(name, dynamic):
    _, context = lifted(lambda q, k, v: RANKS[name](q, k, v), *qkv(), dynamic=dynamic)
    assert context.report.hits["lift.attention_rank"] == context.report.hits["lift.attention"] == 1


OTHER_RANKS = {
    "heads of keys for several of queries": lambda q, k, v: sdpa(q[0], k[0, :1], v[0, :1]),
    "windows that are repeated": lambda q, k, v: sdpa(q[None].expand(3, -1, -1, -1, -1), k[None], v[None]),
    "a mask a window": lambda q, k, v: sdpa(q[None], k[None], v[None], torch.ones(1, B, 1, S, L, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", OTHER_RANKS)
def test_attention_of_other_ranks_that_is_left(name):
    _, context = lifted(lambda q, k, v: OTHER_RANKS[name](q, k, v), *qkv())
    assert_left(context, "lift.attention", "rank 4")


LEFT = {
    "rank 4": lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0]),
    "batch": lambda q, k, v: sdpa(q, k[:1], v[:1]),
    "no keys": lambda q, k, v: sdpa(q, k[:, :, :0], v[:, :, :0]),
}


@pytest.mark.parametrize("words", LEFT)
def test_attention_that_is_left(words):
    def function(q, k, v):
        return LEFT[words](q, k, v)

    _, context = lifted(function, *qkv())
    assert_left(context, "lift.attention", words)


def by_hand(values, **kwargs):
    """Lift of one attention call on `values`, without Dynamo, which would refuse some of them itself."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkvm"[: len(values)]]
    for node, value in zip(nodes, values, strict=True):
        node.meta["example_value"] = value
    call = graph.call_function(sdpa, tuple(nodes), kwargs)
    call.meta["example_value"] = torch.empty(B, H, S, E)
    graph.output(call)
    context = Context(Options())
    lift(torch.fx.GraphModule({}, graph), context)
    return str(context.report.misses["lift.attention"])


REFUSED = {
    "dropout_p is 0.5": lambda: by_hand(qkv(), dropout_p=0.5),  # which the guard steps aside for
    "both a mask and is_causal": lambda: by_hand((*qkv(), torch.zeros(S, L)), is_causal=True),
    "torch.complex64": lambda: by_hand(qkv(dtype=torch.complex64)),
    "the mask has rank 1": lambda: by_hand((*qkv(), torch.zeros(L))),
    "the mask has rank 5": lambda: by_hand((*qkv(), torch.zeros(1, B, H, S, L))),
    "the mask has dtype torch.int64": lambda: by_hand((*qkv(), torch.zeros(S, L, dtype=torch.int64))),
    "does not surely broadcast": lambda: by_hand((*qkv(), torch.zeros(S, L + 1))),
    "6 query heads are no multiple of 4": lambda: by_hand(qkv(heads_kv=4), enable_gqa=True),
    "without enable_gqa": lambda: by_hand(qkv(heads_kv=2)),
    "differ in heads": lambda: by_hand((qkv()[0], qkv()[1], qkv(heads_kv=2)[2]), enable_gqa=True),
    "do not fit each other": lambda: by_hand((qkv()[0], qkv()[1], qkv(length=3)[2])),
    "the dtypes": lambda: by_hand((qkv()[0], qkv()[1], qkv(dtype=torch.float64)[2])),
    "do not fit torch's schema": lambda: by_hand(qkv(), p=0.1),
    "called without value": lambda: by_hand(qkv()[:2]),
}


@pytest.mark.parametrize("words", REFUSED)
def test_every_refusal_is_a_sentence(words):
    assert words in REFUSED[words]()


# ---------------------------------------------------------------------------------------------------------------- strides and sizes


VIEWERS = {
    "view": lambda y: y.transpose(1, 2).view(B, S, H * D),
    "pointwise_then_view": lambda y: (y * 2).transpose(1, 2).view(B, S, H * D),
    "returned": lambda y: y,
    "contiguous": lambda y: y.transpose(1, 2).contiguous().view(B, S, H * D),
    "same_reshape": lambda y: y.reshape(B, H, S, D).transpose(1, 2).contiguous(),
    "reshape": lambda y: y.transpose(1, 2).reshape(B, S, H * D),
    "both": lambda y: (y.transpose(1, 2).contiguous(), y.permute(0, 2, 1, 3).view(B, S, H * D)),
}


@pytest.mark.parametrize("name", VIEWERS)
def test_strides_that_users_rely_on_are_kept(name):
    """torch's kernels return [B, S, H, D] seen as [B, H, S, D] if they are given that, and models call `.view` on it."""
    q, k, v = qkv(value_size=D)
    _, context = lifted(lambda q, k, v: VIEWERS[name](sdpa(q, k, v)), q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert context.report.hits["lift.attention"] == 1


def test_no_copy_where_the_model_makes_its_own():
    q, k, v = (torch.randn(B, S, H, D).transpose(1, 2) for _ in range(3))
    gm, _ = lifted(lambda q, k, v: sdpa(q, k, v).transpose(1, 2).contiguous().view(B, S, H * D), q, k, v)
    assert targets(gm).count("contiguous") == 1


def test_symbolic_sizes_add_no_guard():
    calls = itertools.count()

    def backend(gm, inputs):
        next(calls)
        context = Context(Options())
        lift(gm, context)
        assert context.report.hits == {"lift.attention": 1, "lift.linear": 1}
        return gm.forward

    def function(x, w):
        q = F.linear(x, w).view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2)
        return sdpa(q, q, q, is_causal=True)

    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    w = torch.randn(12, 5)
    with torch.no_grad():
        for batch, length in [(2, 3), (5, 7), (11, 13), (4, 2)]:
            x = torch.randn(batch, length, 5)
            torch.testing.assert_close(compiled(x, w), function(x, w))
    assert next(calls) == 1


def test_a_symbolic_head_size_without_a_scale_is_left():
    found = []

    def backend(gm, inputs):
        found.append(Context(Options()))
        lift(gm, found[0])
        return gm.forward

    with torch.no_grad():
        torch.compile(lambda q: sdpa(q, q, q), backend=backend, dynamic=True)(torch.randn(2, 3, 5, 7))
    assert "symbolic" in str(found[0].report.misses["lift.attention"])


def test_fuel_stops_lifting():
    x, w = torch.randn(3, 5), torch.randn(5, 5)
    gm, context = lifted(lambda x, w: F.linear(F.linear(F.linear(x, w), w), w), x, w, fuel=2)
    assert context.report.hits["lift.linear"] == 2
    assert targets(gm).count("dsi.linear.default") == 2


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    heads_kv=st.integers(1, 3),
    queries=st.integers(1, 6),
    keys=st.integers(1, 7),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_any_grouped_attention_is_lifted_exactly(batch, groups, heads_kv, queries, keys, causal, scale, seed):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads_kv * groups, queries, 4)
    k, v = torch.randn(2, batch, heads_kv, keys, 4)
    _, context = lifted(lambda q, k, v: sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=True), q, k, v)
    assert context.report.hits["lift.attention"] == 1


@pytest.mark.parametrize("name, lifts", [("llama", (15, 2)), ("gpt2", (1, 2)), ("opt", (13, 2)), ("gpt_neox", (9, 2)), ("gemma2", (15, 0))])
def test_counts_on_decoders(name, lifts):
    zoo = pytest.importorskip("zoo")
    # Which attention a soft-capped model defaults to depends on the version of transformers.
    model = zoo.decoder(name, attn="sdpa" if lifts[1] else "eager")
    ids = torch.randint(3, zoo.VOCAB, (2, 7))
    with torch.no_grad(), collecting() as contexts:
        compiled = torch.compile(model, backend="dsi", fullgraph=True, options={"executor": "reference", "check": True})
        got = compiled(input_ids=ids, use_cache=False)
    assert zoo.relative_error(got.logits, model(input_ids=ids, use_cache=False).logits) < 1e-5
    hits = contexts[0].report.hits
    assert (hits["lift.linear"], hits["lift.attention"]) == lifts
