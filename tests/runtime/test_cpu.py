"""The CPU executor: compiled graphs equal the references, write caches in place, take symbolic sizes, and do without a compiler."""

from __future__ import annotations

import threading
import warnings

import dsi.runtime.cpu as cpu
import pytest
import torch
from dsi.compiler.observe import collecting
from dsi.runtime import inductor_api
from dsi.runtime.cpu import NO_COMPILER, compile_cpu
from lowered_graphs import D, Outer, decode_layer, eager_layer, layer_inputs


def check_layer(run, batch, length, cache, position, seed=1):
    tensors = layer_inputs(batch, length, cache, position, seed)
    expected = {name: value.clone() for name, value in tensors.items()}
    result = eager_layer(expected)
    given = list(tensors.values())
    (out,) = run(given)
    assert given == []  # boxed: the list is emptied, so that memory can be freed early
    torch.testing.assert_close(out, result, rtol=5e-5, atol=5e-5)
    assert out.stride() == result.stride()
    for name in ("keys", "values"):
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_decode_step_equals_the_references(in_place):
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5), in_place=in_place)
    run = compile_cpu(gm, outer.fakes, outer.context())
    assert run._boxed_call
    for position in (5, 0, 31):
        check_layer(run, 2, 1, 32, position, seed=position)


def test_symbolic_batch_and_length_need_no_new_compilation():
    outer, gm = decode_layer(layer_inputs(3, 7, 29, 5), dynamic=(3, 7))
    run = compile_cpu(gm, outer.fakes, outer.context())
    for batch, length, position in ((3, 7, 5), (5, 2, 0), (2, 11, 18)):
        check_layer(run, batch, length, 29, position)


def test_sizes_given_as_numbers():
    """AOTAutograd passes a symbolic size as an input of its own."""
    outer = Outer(dynamic=(7,))
    x = outer.input("x", torch.randn(7, 6))
    size = outer.size_input("size", x.meta["val"].shape[0])
    flat = outer.call(torch.ops.aten.view.default, x, [size, 2, 3])
    scaled = outer.call(torch.ops.aten.mul.Tensor, flat, size)
    run = compile_cpu(outer.finish(scaled, size), outer.fakes, outer.context())
    for n in (7, 4):
        real = torch.randn(n, 6)
        out, number = run([real, n])
        assert torch.equal(out, real.view(n, 2, 3) * n)
        assert number == n


def test_the_time_of_each_part_is_recorded():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    context = outer.context()
    compile_cpu(gm, outer.fakes, context)
    assert set(context.report.seconds) >= {"expand", "inductor"}
    assert all(seconds > 0 for seconds in context.report.seconds.values())


@pytest.mark.parametrize(
    "mode, tuned", [("default", False), ("reduce-overhead", False), ("max-autotune", True), ("max-autotune-no-cudagraphs", True)]
)
def test_mode_reaches_inductor(mode, tuned, monkeypatch):
    from torch._inductor import compile_fx, config

    seen = []

    def note(gm, inputs, **kwargs):
        seen.append((config.max_autotune, config.triton.cudagraphs, kwargs["is_inference"]))
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx_inner", note)
    before = config.max_autotune
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    compile_cpu(gm, outer.fakes, outer.context(mode=mode))
    assert seen == [(tuned, False, True)]
    assert config.max_autotune == before


@pytest.fixture
def no_compiler(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(cpu, "_warned", threading.Event())
    with config.patch({"cpp.cxx": (None, "/nowhere/c++")}):
        yield


def test_without_a_compiler_it_warns_once_and_still_computes(no_compiler):
    assert inductor_api.cpp_compiler() is None
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler was found"):
        outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
        context = outer.context()
        run = compile_cpu(gm, outer.fakes, context)
    assert context.report.notes == [NO_COMPILER]
    for position in (5, 0):
        check_layer(run, 2, 1, 32, position)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer, gm = decode_layer(layer_inputs(3, 7, 29, 5), dynamic=(3, 7))
        context = outer.context()
        run = compile_cpu(gm, outer.fakes, context)
    assert context.report.notes == [NO_COMPILER]
    check_layer(run, 5, 2, 29, 0)


def masked(x):
    mask = torch.full((8, 8), -10000.0)
    mask[torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(1)] = 0
    return torch.softmax(x + mask, dim=-1)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_graph_that_inductor_cannot_compile_runs(failures, monkeypatch):
    """0 is a graph which some versions of Inductor fail to fuse."""
    compile_graph, left = inductor_api.compile_graph, [KeyError("buf1")] * failures

    def failing(*args, **kwargs):
        if left:
            raise left.pop()
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(inductor_api, "compile_graph", failing)
    x = torch.randn(8, 8)
    with torch.no_grad(), collecting() as contexts, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = torch.compile(masked, backend="dsi", options={"cache": False})(x)
    torch.testing.assert_close(got, masked(x))
    said = [str(warning.message) for warning in warned if "Inductor cannot compile" in str(warning.message)]
    assert len(said) == (failures == 2)
    notes = "".join(contexts[0].report.notes)
    assert failures == 0 or {1: "a loop of its own", 2: "operator by operator"}[failures] in notes
    assert failures != 2 or "KeyError: 'buf1'" in said[0]


def test_with_a_compiler_there_is_neither_warning_nor_note():
    assert inductor_api.cpp_compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
        context = outer.context()
        compile_cpu(gm, outer.fakes, context)
    assert context.report.notes == []


def test_four_threads_compile_at_once():
    errors = []
    graphs = [decode_layer(layer_inputs(1 + number, 1, 19, 5)) for number in range(4)]

    def work(number):
        try:
            outer, gm = graphs[number]
            run = compile_cpu(gm, outer.fakes, outer.context())
            check_layer(run, 1 + number, 1, 19, 3, seed=number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_an_operator_that_inductor_does_not_know_runs_as_it_is():
    outer = Outer()
    x = outer.input("x", torch.randn(5, 5))
    values = outer.call(torch.ops.aten.linalg_matrix_exp.default, x)
    run = compile_cpu(outer.finish(values), outer.fakes, outer.context())
    real = torch.randn(5, 5)
    torch.testing.assert_close(run([real])[0], torch.linalg.matrix_exp(real))


def test_strides_of_outputs_are_those_of_the_graph():
    outer = Outer()
    x = outer.input("x", torch.randn(4, 6))
    turned = outer.call(torch.ops.aten.permute.default, outer.call(torch.ops.aten.mul.Tensor, x, 3.0), [1, 0])
    (plain,) = outer.region("r", lambda a: (D.activation(a.transpose(0, 1), "relu"),), x)
    run = compile_cpu(outer.finish(turned, plain), outer.fakes, outer.context())
    real = torch.randn(4, 6)
    a, b = run([real])
    assert torch.equal(a, (real * 3).t()) and a.stride() == (1, 6)
    assert torch.equal(b, real.t().relu()) and b.stride() == (4, 1)


def test_layers_that_share_a_mask_convert_it_once():
    from dsi.runtime.deduplicate import deduplicate
    from dsi.runtime.expand import expand

    outer = Outer()
    q, k, v = (outer.input(name, torch.randn(2, 4, 3, 16)) for name in "qkv")
    mask = outer.input("mask", torch.rand(2, 1, 3, 3) < 0.5)
    results = [outer.region(f"attend_{i}", lambda *a: (D.attention(*a, scale=0.25),), q, k, v, mask)[0] for i in range(2)]
    flat = expand(outer.finish(*results), outer.fakes, outer.mode)

    def conversions():
        return [node for node in flat.graph.nodes if node.target is torch.ops.aten.where.self]

    assert len(conversions()) == 2
    deduplicate(flat)
    assert len(conversions()) == 1


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_softmax_over_another_dimension_is_no_attention(dim):
    """Inductor's own pattern tables turn both into fused attention."""
    outer = Outer()
    q, k, v = (outer.input(name, torch.randn(2, 4, 8, 8)) for name in "qkv")

    def spelled(q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1)).div(3.0)
        return (torch.matmul(scores.softmax(dim=dim), v),)

    run = compile_cpu(outer.finish(*outer.region("spelled", spelled, q, k, v)), outer.fakes, outer.context())
    real = [torch.randn(2, 4, 8, 8) for _ in range(3)]
    torch.testing.assert_close(run(list(real))[0], spelled(*real)[0], rtol=1e-5, atol=1e-5)
