"""Regions by library kernels: what lies around a product computes what the region does, and what a library does not compute is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dsi.codegen import Choice, cost, generate, library
from dsi.codegen.devices import H200
from dsi.codegen.epilogue import epilogue
from dsi.codegen.kernel import LibraryCall
from dsi.ir.evaluate import evaluate_plan

from tests.ir.bodies import body_of, dsi

from . import plans
from .quantised import quantised
from .support import check
from .test_bodies import assert_kernel_computes, heads, randoms
from .test_cost import LLAMA, on_meta

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIBRARY = Choice("library", None, 1, 1)
CASES = {
    "llama_qkv": lambda dtype, **sizes: plans.llama_qkv(dtype, 2, 3, **sizes),
    "norms_of_heads": lambda dtype, **sizes: plans.llama_qkv(dtype, 2, 3, qk_norm=True, **sizes),
    "interleaved": lambda dtype, **sizes: plans.llama_qkv(dtype, 1, 5, style="interleaved", **sizes),
    "gpt2_qkv": lambda dtype, **sizes: plans.gpt2_qkv(dtype, 1, 5, **sizes),
    "neox_qkv": lambda dtype, **sizes: plans.neox_qkv(dtype, 2, 3, **sizes),
    "gate_up": lambda dtype, **sizes: plans.gate_up(dtype, 3, **sizes),
    "projection": lambda dtype, **sizes: plans.projection(dtype, 3, kind="gelu_tanh", **sizes),
    "projection_kn": lambda dtype, **sizes: plans.projection(dtype, 3, kn=True, **sizes),
}


def calls(spec):
    (kernel,) = generate(spec, LIBRARY)
    return [isinstance(launch, LibraryCall) for launch in kernel.launches]


@pytest.mark.parametrize("dtype, symbolic", [(F32, False), (F32, True), (BF16, True), (F16, False)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_prologue_product_and_epilogue_compute_the_region(interpreter, name, dtype, symbolic):
    check(CASES[name](dtype, symbolic=symbolic), interpreter, choice=LIBRARY)


def test_each_weight_is_one_product_and_each_segment_one_epilogue():
    assert calls(plans.llama_qkv(BF16).spec) == [False, True, True, True, False, False, False]
    assert calls(plans.gpt2_qkv(BF16).spec) == [False, True, False, False, False]
    assert calls(plans.gate_up(BF16).spec) == [False, True, True, False]
    assert calls(plans.projection(BF16, strided=True).spec) == [True, False]  # the rows lie in even steps


def body_spec(function, inputs, dynamic=()):
    from dsi.ir.analysis import kernel_spec, plan_region

    body = body_of(function, inputs, dynamic)
    return kernel_spec("region", body, plan_region(body))


def test_a_bare_linear_is_the_library_s_kernel_alone(interpreter):
    x, w = randoms(F32, (3, 5, 16), (24, 16))

    def bare(x, w):
        return dsi.linear(x, w)

    assert calls(body_spec(bare, [x, w], (3, 5))) == [True]
    assert_kernel_computes(bare, [x, w], interpreter, (3, 5), choice=LIBRARY)
    assert_kernel_computes(bare, [x[:, 1:4], w], interpreter, choice=LIBRARY)  # rows in no even steps are copied


def test_attention_without_a_mask_is_the_library_s_kernel_alone(interpreter):
    q, k, v = randoms(F32, (2, 5, 64), (2, 5, 32), (2, 5, 32))

    def causal(q, k, v):
        y = dsi.attention(heads(q, 16), heads(k, 16), heads(v, 16), scale=0.3, causal=True)
        return y.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)

    for dynamic in ((), (2, 5)):
        assert calls(body_spec(causal, [q, k, v], dynamic)) == [True]
        assert_kernel_computes(causal, [q, k, v], interpreter, dynamic, choice=LIBRARY)


def rope_of_normed_heads(y, wq, wk, wv, g, cos, sin):
    """Norm of each head, rope, the heads before the tokens."""
    q, k = (dsi.rope(dsi.rms_norm(heads(dsi.linear(y, w), 8), g, eps=1e-5), cos, sin, style="half") for w in (wq, wk))
    return q, k, heads(dsi.linear(y, wv), 8)


def interleaved_heads(y, w, b):
    """q, k and v of each head side by side in one weight."""
    parts = dsi.linear(y, w, b).view(y.shape[0], y.shape[1], 2, 3, 8)
    return tuple(parts[:, :, :, number].transpose(1, 2) * 2.0 for number in range(3))


def gated_with_sum(y, w, u, r):
    return torch.nn.functional.silu(dsi.linear(y, w)) * dsi.linear(y, u) + r


@pytest.mark.parametrize("dynamic", [(), (2, 5)], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "function, shapes",
    [
        (rope_of_normed_heads, ((2, 5, 16), (32, 16), (16, 16), (16, 16), (8,), (1, 1, 5, 8), (1, 1, 5, 8))),
        (interleaved_heads, ((2, 5, 16), (48, 16), (48,))),
        (gated_with_sum, ((2, 5, 16), (24, 16), (24, 16), (2, 5, 24))),
    ],
)
def test_an_epilogue_s_row_plan_means_the_segment(function, shapes, dynamic):
    from dsi.ir.analysis import bind_sizes, plan_region

    inputs = randoms(F32, *shapes)
    body = body_of(function, inputs, dynamic)
    plan, sizes = plan_region(body), bind_sizes(body, inputs)
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    rows = inputs[0].reshape(-1, inputs[0].shape[-1])
    for segment in plan.segments:
        weights = list(dict.fromkeys(window.weight for window in segment.windows))
        row = epilogue(plan, segment, {weight: len(inputs) + n for n, weight in enumerate(weights)})
        stores = tuple(dataclasses.replace(store, output=n) for n, store in enumerate(row.stores))
        found = evaluate_plan(dataclasses.replace(row, stores=stores), [*inputs, *(rows @ inputs[w].T for w in weights)], sizes)
        for store, value in zip(segment.stores, found, strict=True):
            torch.testing.assert_close(value, expected[store.output], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: quantised(lambda: plans.projection(BF16, 3)), "dtype"),
        (lambda: plans.attention(BF16, mask="bool"), "mask"),
        (lambda: plans.attention(BF16, softcap=30.0), "softcap"),
        (lambda: plans.attention(BF16, causal=True, window=4), "window"),
        (lambda: plans.attention(BF16, bias=True), "bias"),
        (lambda: plans.post_norm(BF16), "contraction"),
    ],
)
def test_what_a_library_does_not_compute_is_refused(make, reason):
    spec = make().spec
    assert reason in library.why_not(spec) and not library.possible(spec, LIBRARY)
    allowed = dataclasses.replace(spec, library=True)
    assert all(choice.schedule != "library" for choice in cost.candidates(allowed, None))


def test_a_weight_of_which_little_is_used_is_no_product():
    x, w = randoms(F32, (3, 16), (96, 16))
    spec = body_spec(lambda x, w: dsi.linear(x, w[8:24]), [x, w])
    assert "not used" in library.why_not(spec)
    assert library.why_not(body_spec(lambda x, w: dsi.linear(x, w[:80]), [x, w])) == ""


def test_with_many_rows_it_is_tried_where_it_is_allowed():
    for rows, tried in ((1, False), (64, False), (512, True), (2048, True)):
        spec = on_meta(lambda rows=rows: plans.gate_up(BF16, rows, 4096, 14336))
        assert all(choice.schedule != "library" for choice in cost.candidates(spec))
        found = cost.candidates(dataclasses.replace(spec, library=True))
        assert [choice.schedule for choice in found].count("library") == tried
        assert {choice.schedule for choice in found} - {"library"}, "a kernel of ours is always a candidate"


def test_prefill_of_a_large_model_is_predicted_to_be_faster_with_it():
    for make in (
        lambda rows: plans.gate_up(BF16, rows, 4096, 14336),
        lambda rows: plans.llama_qkv(BF16, rows, 1, **LLAMA),
        lambda rows: plans.projection(BF16, rows, 14336, 4096, strided=False),
    ):
        spec = dataclasses.replace(on_meta(lambda make=make: make(2048)), library=True)
        (choice,) = cost.choices(spec)
        floor = float(cost.work(spec.plan)) / H200.matrix[2]
        assert choice.schedule == "library" and floor < cost.predict(spec, choice) < 1.6 * floor


def test_small_linears_keep_their_own_kernel():
    spec = dataclasses.replace(on_meta(lambda: plans.projection(F16, 128, 768, 768, kn=True, strided=False)), library=True)
    (choice,) = cost.choices(spec)
    assert choice.schedule == "tiled"


def test_a_kernel_s_text_says_what_runs_in_order():
    (kernel,) = generate(plans.gate_up(BF16).spec, LIBRARY)
    steps = kernel.source[kernel.source.index("# in order:") :].splitlines()[1:5]
    assert [text.strip("# ").split("(")[0] for text in steps] == [
        "gate_up_rows",
        "workspace 1[3, 37] = cuBLAS",
        "workspace 2[3, 37] = cuBLAS",
        "gate_up_epilogue",
    ]
