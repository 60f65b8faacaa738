"""From a region's graph to a kernel that computes it: plans as `plan_region` makes them, kernels under the interpreter."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from dsi.codegen import generate
from dsi.codegen.integers import normalise
from dsi.ir.analysis import bind_sizes, kernel_spec, plan_region
from dsi.ir.tolerances import disagreement

from tests.ir.bodies import body_of, dsi

from .support import execute, pick

B, S = 3, 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
SYMBOLIC = pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])


def heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], -1, size).transpose(1, 2)


def assert_kernel_computes(function, inputs, interpreter, dynamic=(), region="region", choice=None) -> str:
    """Runs the kernel of `function`'s body; returns its source. The reference is `function` in fp64."""
    body = body_of(function, inputs, dynamic)
    plan = plan_region(body)
    spec = kernel_spec(region, body, plan)
    sizes = bind_sizes(body, inputs)
    numbers = {symbol: sympy.Integer(n) for symbol, n in sizes.items()}

    def value(expr) -> int:
        return int(normalise(sympy.sympify(expr).xreplace(numbers)))

    kernels = generate(spec, choice)
    count = plan.queries if hasattr(plan, "queries") else plan.rows
    kernel = pick(kernels, value(count))
    outputs = []
    for tensor, store in zip(spec.outputs, stores_in_order(plan, len(spec.outputs)), strict=True):
        shape, strides = [value(s) for s in tensor.sizes], [value(s) for s in tensor.strides]
        fresh = torch.empty_strided(shape, strides, dtype=tensor.dtype).fill_(0 if not tensor.dtype.is_floating_point else float("nan"))
        outputs.append(inputs[store.base].clone() if store.base is not None else fresh)
    outputs = execute(kernel, inputs, outputs, value, interpreter)
    expected = function(*(v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in inputs))
    for number, (result, wanted) in enumerate(zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True)):
        difference = disagreement(result, wanted.to(result.dtype))
        assert not difference, f"output {number}: {difference}\n{kernel.source}"
    return kernel.source


def stores_in_order(plan, count):
    from dsi.codegen.cost import all_stores

    by_output = {store.output: store for store in all_stores(plan)}
    return [by_output[i] for i in range(count)]


def randoms(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) / (s[-1] ** 0.5 if len(s) == 2 else 1.0)).to(dtype) for s in shapes]


@DTYPES
@SYMBOLIC
@pytest.mark.parametrize("length", [1, S])
def test_llama_qkv(interpreter, dtype, symbolic, length):
    def qkv(x, g, wq, wk, wv, cos, sin, keys, values, pos):
        h = dsi.rms_norm(x, g, eps=1e-5, cast="before")
        q, k, v = (heads(dsi.linear(h, w), 8) for w in (wq, wk, wv))
        q, k = (dsi.rope(t, cos.unsqueeze(1), sin.unsqueeze(1), style="half") for t in (q, k))
        return q, dsi.kv_write(keys, pos, k, dim=2), dsi.kv_write(values, pos, v, dim=2)

    shapes = ((B, length, 32), (32,), (32, 32), (16, 32), (16, 32), (1, length, 8), (1, length, 8), (B, 2, 20, 8), (B, 2, 20, 8))
    inputs = [*randoms(dtype, *shapes), torch.randperm(20)[:length]]
    assert_kernel_computes(qkv, inputs, interpreter, (B, length) if symbolic and length > 1 else (B,) if symbolic else ())


@SYMBOLIC
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("turned", [2, 4, 8])
def test_partial_rope_without_a_gather(interpreter, symbolic, style, turned):
    def qk(x, w, cos, sin):
        return dsi.rope(heads(dsi.linear(x, w), 8), cos, sin, style=style)

    inputs = randoms(torch.float32, (B, S, 16), (32, 16), (1, 1, S, turned), (1, 1, S, turned))
    source = assert_kernel_computes(qk, inputs, interpreter, (B, S) if symbolic else ())
    assert "tl.gather" not in source


def test_rope_spelled_out_without_a_gather(interpreter):
    def qk(x, w, cos, sin):
        y = heads(dsi.linear(x, w), 8)
        low, high = y.chunk(2, -1)
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
        return y * cos + torch.cat([-high, low], -1) * sin, y * cos + turned * sin

    # Two outputs of one linear that pair its columns in two ways: held together, and right whatever the layout.
    assert_kernel_computes(qk, randoms(torch.float32, (B, S, 16), (32, 16), (S, 8), (S, 8)), interpreter)


@SYMBOLIC
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_of_each_head(interpreter, symbolic, norm):
    def qk(x, w, v, g, b, cos, sin):
        q, k = (dsi.linear(x, t).view(x.shape[0], x.shape[1], -1, 12) for t in (w, v))
        q, k = (dsi.rms_norm(t, g, eps=1e-5) if norm == "rms" else dsi.layer_norm(t, g, b, eps=1e-5) for t in (q, k))
        return tuple(dsi.rope(t.transpose(1, 2), cos, sin, style="half") for t in (q, k))

    inputs = randoms(torch.float32, (B, S, 16), (48, 16), (12, 16), (12,), (12,), (S, 12), (S, 12))
    assert_kernel_computes(qk, inputs, interpreter, (B, S) if symbolic else ())


@DTYPES
@pytest.mark.parametrize("name", ["mish", "softplus", "elu", "leaky_relu", "hardswish", "glu", "expm1", "log1p", "exp2", "floor", "ceil"])
def test_activations_after_a_linear(interpreter, dtype, name):
    def mlp(x, w):
        return getattr(F, name, getattr(torch, name, None))(dsi.linear(x, w) * 3)

    assert_kernel_computes(mlp, randoms(dtype, (B, 16), (24, 16)), interpreter)


@DTYPES
@SYMBOLIC
def test_parts_that_are_written(interpreter, dtype, symbolic):
    """In a kernel of rows, before a linear and behind it."""

    def turned(x, y):
        y = y.clone()
        y[..., :4] = y[..., 4:8] * 2
        y[..., 9::2] = x[..., :4]
        y[:, 0] = x[:, 1]
        return y

    def behind(y, x):
        y = y.clone()
        y[:, 0] = x[:, 1]
        return y

    inputs = randoms(dtype, (B, S, 16), (16, 16))
    for function in (lambda x, w: turned(x, x) * w[:, 0], lambda x, w: behind(dsi.linear(turned(x, x), w), x)):
        assert_kernel_computes(torch.func.functionalize(function), inputs, interpreter, (B, S) if symbolic else ())


@DTYPES
@pytest.mark.parametrize("place", ["beside", "least"])
@pytest.mark.parametrize("rows", [1, 7])
def test_an_epsilon_that_is_not_under_the_root(interpreter, dtype, place, rows):
    """In a prologue, in a kernel of rows, and of each head; the first row is 0."""

    def project(x, g, b, w):
        y = dsi.linear(dsi.rms_norm(x, g, eps=0.5, place=place), w)
        return dsi.rms_norm(y.view(rows, 3, 8), None, eps=0.5, place=place)

    x, *rest = randoms(dtype, (rows, 16), (16,), (16,), (24, 16))
    x[0] = 0
    assert_kernel_computes(project, [x, *rest], interpreter)
    assert_kernel_computes(lambda x, g, b: dsi.layer_norm(x, g, b, eps=0.5, place=place), [x, *rest[:2]], interpreter)


@DTYPES
@SYMBOLIC
def test_gpt2_qkv(interpreter, dtype, symbolic):
    def qkv(x, g, b, w, bias, keys, values, pos):
        h = dsi.layer_norm(x, g, b, eps=1e-5)
        y = dsi.linear(h.view(-1, 16), w, bias, kn=True).view(x.shape[0], x.shape[1], 48)
        q, k, v = (heads(t, 4) for t in y.split(16, 2))
        return q, dsi.kv_write(keys, pos, k, dim=2), dsi.kv_write(values, pos, v, dim=2)

    inputs = randoms(dtype, (B, S, 16), (16,), (16,), (16, 48), (48,), (B, 4, 20, 4), (B, 4, 20, 4))
    assert_kernel_computes(qkv, [*inputs, torch.randperm(20)[:S]], interpreter, (B, S) if symbolic else ())


@DTYPES
@SYMBOLIC
def test_attention_reads_heads_out_of_tokens(interpreter, dtype, symbolic):
    """q, k and v are views of what projections wrote; the mask is bool; the result goes back to tokens."""

    def attend(q, k, v, mask):
        q, k, v = (heads(t, 8) for t in (q, k, v))
        return dsi.attention(q, k, v, mask, scale=0.3).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    inputs = [*randoms(dtype, (B, S, 32), (B, 11, 16), (B, 11, 16)), torch.rand(B, 1, S, 11) < 0.7]
    assert_kernel_computes(attend, inputs, interpreter, (B, S, 11) if symbolic else ())


@SYMBOLIC
def test_gated_product(interpreter, symbolic):
    def mlp(x, g, u, v):
        h = dsi.rms_norm(x, g, eps=1e-5, offset=1.0, cast="after")
        return dsi.gated(dsi.linear(h, u), dsi.linear(h, v), "gelu_tanh")

    assert_kernel_computes(mlp, randoms(torch.float32, (B, S, 16), (16,), (18, 16), (18, 16)), interpreter, (B, S) if symbolic else ())


@SYMBOLIC
def test_projection_of_heads_with_residual(interpreter, symbolic):
    """x is gathered from heads: its inner index takes two strides."""

    def project(a, w, b, residual):
        return dsi.linear(a.transpose(1, 2).reshape(a.shape[0], a.shape[2], 24), w, b) + residual

    inputs = randoms(torch.float32, (B, 4, S, 6), (10, 24), (10,), (B, S, 10))
    assert_kernel_computes(project, inputs, interpreter, (B, S) if symbolic else ())


@SYMBOLIC
def test_embeddings_and_norm(interpreter, symbolic):
    def embed(ids, types, words, positions, kinds, g, b):
        place = torch.arange(ids.shape[1])
        total = dsi.embedding(words, ids) + dsi.embedding(kinds, types) + dsi.embedding(positions, place)
        return dsi.layer_norm(total, g, b, eps=1e-12)

    inputs = [torch.randint(19, (B, S)), torch.randint(2, (B, S)), *randoms(torch.float32, (19, 24), (31, 24), (2, 24), (24,), (24,))]
    assert_kernel_computes(embed, inputs, interpreter, (B, S) if symbolic else ())


@SYMBOLIC
def test_rotary_tables(interpreter, symbolic):
    """cos and sin of positions times frequencies, doubled by a cat."""

    def tables(start, frequencies, like):
        positions = torch.arange(like.shape[1]) + start
        angles = positions[:, None].float() * frequencies[None, :]
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    inputs = [torch.tensor(7), 10000.0 ** -(torch.arange(4) / 4), torch.zeros(1, S)]
    assert_kernel_computes(tables, inputs, interpreter, (S,) if symbolic else ())


@DTYPES
@pytest.mark.parametrize("rows", [(1, 1), (B, S), (4, 40)], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("k", [24, 5])
def test_linears_of_one_column(interpreter, dtype, rows, k):
    """Scores of reward models and regressions."""
    inputs = randoms(dtype, (*rows, k), (1, k), (1,))
    assert_kernel_computes(lambda x, w, b: dsi.activation(dsi.linear(x, w, b), "silu"), inputs, interpreter, rows[:1])
    assert_kernel_computes(lambda x, w: dsi.linear(x, w, kn=True), [inputs[0], inputs[1].t().contiguous()], interpreter, rows[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (B, S), (4, 40)], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("narrow", [(1, 11), (11, 1), (1, 1)])
def test_operands_that_repeat_themselves(interpreter, dtype, rows, kn, narrow):
    """Expanded along the contracted dimension or the other: their memory has a stride of 0, and what is beyond the end is not 0."""
    x, once, w = randoms(dtype, (*rows, 11), (*rows, 1), narrow)
    for each in (x, once.expand(*rows, 11)):
        assert_kernel_computes(lambda x, w: dsi.linear(x, w, kn=kn) + 1, [each, w.expand(11, 11)], interpreter)


@SYMBOLIC
def test_padded_mask(interpreter, symbolic):
    """A mask made as long as the cache, cut and padded on other sides."""

    def padded(mask, x):
        wide = torch.ops.aten.constant_pad_nd(mask, [0, 4], 0)
        return wide > 0, torch.ops.aten.constant_pad_nd(x, [2, -1, -1, 3], 1.5) * 2

    inputs = [torch.randint(2, (B, S)), *randoms(torch.float32, (4, 7))]
    mask, x = (padded(*inputs)[i] for i in (0, 1))
    assert mask.shape == (B, S + 4) and x.shape == (6, 8)
    assert_kernel_computes(
        lambda mask: torch.ops.aten.constant_pad_nd(mask, [0, 4], 0) > 0, inputs[:1], interpreter, (B, S) if symbolic else ()
    )
    assert_kernel_computes(lambda x: torch.ops.aten.constant_pad_nd(x, [2, -1, -1, 3], 1.5) * 2, inputs[1:], interpreter)


def test_positions_that_count_from_the_end(interpreter):
    """A window's cache rolls, and its last entry is written."""

    def write(cache, new, pos):
        place = torch.where(pos < 0, pos + cache.shape[2], pos)
        return dsi.kv_write(cache, place, new * 2, dim=2)

    inputs = [*randoms(torch.float32, (2, 3, 7, 4), (2, 3, 1, 4)), torch.tensor([-1])]
    assert_kernel_computes(write, inputs, interpreter)
