"""Programs: equal to the graph, whichever way regions run; values freed early; sizes bound from the inputs."""

from __future__ import annotations

import operator
import weakref

import dsi.runtime.program as programs
import pytest
import sympy
import torch
from dsi.codegen.integers import Quotient, Remainder
from dsi.ir.errors import DsiInternalError
from dsi.runtime.program import ReferenceKernel, build, interpret, no_kernels, reference_kernels
from dsi.runtime.sizes import Sizes, python
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_graphs import D, Outer, decode_layer, eager_layer, layer_inputs
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, ModularIndexing

KERNELS = {"by members": no_kernels, "by kernels": reference_kernels}


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("sizes, dynamic", [((2, 1, 32, 5), ()), ((3, 7, 29, 11), (3, 7))])
def test_a_layer_equals_the_references(kernels, in_place, sizes, dynamic):
    outer, gm = decode_layer(layer_inputs(*sizes), dynamic, in_place)
    program = build(gm, outer.fakes, kernels)
    for batch, length, position in [(*sizes[:2], sizes[3])] + ([(5, 2, 0), (2, 11, 18)] if dynamic else []):
        tensors = layer_inputs(batch, length, sizes[2], position, seed=batch)
        expected = {name: value.clone() for name, value in tensors.items()}
        result = eager_layer(expected)
        given = list(tensors.values())
        (out,) = program(given)
        assert given == []
        torch.testing.assert_close(out, result, rtol=1e-5, atol=1e-5)
        assert out.stride() == result.stride()
        for name in tensors:
            torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=0)


def test_a_kernel_writes_in_place_into_the_input_itself():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    written = []

    class Spy(programs.ReferenceKernel):
        def __call__(self, inputs, outputs, sizes):
            written.extend((number, outputs[output] is inputs[number]) for output, number in self.region.in_place.items())
            super().__call__(inputs, outputs, sizes)

    program = build(gm, outer.fakes, lambda region, values, sizes, overlaps: Spy(region))
    program(list(layer_inputs(2, 1, 32, 5).values()))
    assert written == [(7, True), (8, True)]


def test_a_program_names_its_regions_in_order_with_what_runs_them():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    program = build(gm, outer.fakes, reference_kernels)
    launching = [step.text.split(" = ")[1].split("(")[0] for step in program.steps if "# reference of" in step.text]
    assert [region.name for region, _ in program.regions] == launching and len(launching) > 1
    assert all(kernel.region is region for region, kernel in program.regions)
    assert not build(gm, outer.fakes, no_kernels).regions


def test_a_functional_write_starts_from_a_clone():
    """A kernel stores only the new entries: the rest of the output must hold the old cache before it runs, and the old cache must not
    change.
    """
    outer = Outer()
    nodes = [outer.input("cache", torch.zeros(2, 9, 3)), outer.input("pos", torch.tensor([4])), outer.input("new", torch.zeros(2, 1, 3))]
    (written,) = outer.region("write", lambda c, p, n: (D.kv_write(c, p, n, dim=1),), *nodes)
    gm = outer.finish(written)

    class StoresNewEntriesOnly:
        def __call__(self, inputs, outputs, sizes):
            outputs[0].index_copy_(1, inputs[1], inputs[2])

        def describe(self):
            return "kv_write"

    program = build(gm, outer.fakes, lambda region, values, sizes, overlaps: StoresNewEntriesOnly())
    cache, new = torch.randn(2, 9, 3), torch.randn(2, 1, 3)
    kept = cache.clone()
    (out,) = program([cache, torch.tensor([7]), new])
    assert torch.equal(cache, kept)
    assert torch.equal(out, torch.index_copy(kept, 1, torch.tensor([7]), new))


def test_a_cache_with_gaps_may_not_be_written_in_place():
    """A kernel stores at the strides that its specification states for the output, and readers look there."""
    outer = Outer()
    nodes = [
        outer.input("cache", torch.zeros(2, 15, 3)[:, :9]),
        outer.input("pos", torch.tensor([4])),
        outer.input("new", torch.zeros(2, 1, 3)),
    ]
    (written,) = outer.region("write", lambda c, p, n: (D.kv_write(c, p, n, dim=1),), *nodes, in_place={0: 0})
    with pytest.raises(DsiInternalError, match="output 0 of region write may not overwrite input 0, which lies otherwise in memory"):
        build(outer.finish(written), outer.fakes, reference_kernels)


def test_values_are_freed_after_their_last_use():
    outer = Outer()
    x = outer.input("x", torch.randn(4))
    alive: list[weakref.ref] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(value))
        return value + 1

    def check(value: torch.Tensor) -> torch.Tensor:
        assert [ref() for ref in alive] == [None, None]  # the input and the first sum are gone
        return value * 2

    node = x
    for function in (note, note, check):
        node = outer.call(torch.ops.aten.add.Tensor, node, 0.0)
        node.target, node.args = function, (node.args[0],)
    program = build(outer.finish(node), outer.fakes, no_kernels)
    assert torch.equal(program([torch.ones(4)])[0], torch.full((4,), 6.0))
    assert "frees %0" in str(program)


def test_a_printed_program_shows_every_step():
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    text = str(build(gm, outer.fakes, no_kernels))
    assert "[qkv] %27 = dsi.kv_write_(%1, %3, %23, dim=2)" in text
    assert "[attend] %29 = dsi.attention.default(%19, %27, %28, %4, scale=0.25)    # frees %4, %19, %27, %28" in text
    assert "= attend(" in str(build(gm, outer.fakes, reference_kernels))


def test_results_may_be_inputs_numbers_and_none():
    outer = Outer(dynamic=(7,))
    x = outer.input("x", torch.randn(7, 2))
    size = outer.call(torch.ops.aten.sym_size.int, x, 0)
    twice = outer.graph.call_function(operator.mul, (size, 2))
    twice.meta["val"] = size.meta["val"] * 2
    constant = outer.constant("table", torch.arange(3))
    program = interpret(outer.finish(x, twice, None, 5, constant), outer.fakes, outer.context())
    real = torch.randn(4, 2)
    for _ in range(2):  # constants are not freed by the first call
        out = program([real])
        assert out[0] is real and out[1:4] == [8, None, 5] and torch.equal(out[4], torch.arange(3))


@pytest.mark.parametrize("batch", [0, 3])
def test_empty_tensors_reach_no_kernel(batch):
    outer = Outer()
    nodes = [outer.input("x", torch.randn(batch, 5)), outer.input("w", torch.randn(4, 5))]
    (y,) = outer.region("linear", lambda x, w: (D.linear(x, w),), *nodes)
    launched = []

    class Kernel(programs.ReferenceKernel):
        def __call__(self, inputs, outputs, sizes):
            launched.append(True)
            super().__call__(inputs, outputs, sizes)

    program = build(outer.finish(y), outer.fakes, lambda region, values, sizes, overlaps: Kernel(region))
    x, w = torch.randn(batch, 5), torch.randn(4, 5)
    torch.testing.assert_close(program([x, w])[0], x @ w.t())
    assert launched == [True] * bool(batch)


def test_an_empty_inner_dimension_still_gives_the_bias():
    outer = Outer()
    nodes = [outer.input("x", torch.randn(3, 0)), outer.input("w", torch.randn(4, 0)), outer.input("b", torch.randn(4))]
    (y,) = outer.region("linear", lambda x, w, b: (D.linear(x, w, b),), *nodes)
    program = build(outer.finish(y), outer.fakes, reference_kernels)
    bias = torch.randn(4)
    assert torch.equal(program([torch.randn(3, 0), torch.randn(4, 0), bias])[0], bias.expand(3, 4))


# ---------------------------------------------------------------------------------------------------------------------- sizes


A, B = sympy.symbols("a b", integer=True, positive=True)
EXPRESSIONS = [
    A * 64 + B,
    sympy.ceiling(A / 16) * B,
    sympy.floor((A + 3 * B) / 8),
    CeilDiv(A * B, 7),
    FloorDiv(A, 3),
    Mod(A * 5, 7) + sympy.Mod(A * 5, 7),
    ModularIndexing(A, 4, 3),
    Max(A, B * 2) + sympy.Max(A, 9),
    Min(A, B, 5),
    A**2 - B,
    Quotient(A + 15, 16) * Remainder(B, 7),
    sympy.Integer(12),
]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2**40), st.integers(1, 2**40))
def test_expressions_are_exact_integers(a, b):
    for expr in EXPRESSIONS:
        value = eval(python(expr), {"a": a, "b": b})
        assert isinstance(value, int) and value == int(expr.xreplace({A: sympy.Integer(a), B: sympy.Integer(b)})), expr


def test_symbols_are_read_from_sizes_strides_and_numbers():
    outer = Outer(dynamic=(5, 7))
    x = outer.input("x", torch.randn(5, 7)).meta["val"]
    sizes = Sizes(outer.fakes)
    product = sizes.compile(x.shape[0] * x.shape[1], x.stride()[0])
    assert product(*sizes.bind([torch.randn(3, 11)])) == (33, 11)
    only = Sizes([x.shape[0] * 4])
    assert only.compile(x.shape[0])(*only.bind([12])) == (3,)
    assert Sizes([]).compile(3, 4) == (3, 4)


def test_a_function_that_is_not_known_is_an_internal_error():
    with pytest.raises(DsiInternalError, match="computed by sin"):
        python(sympy.sin(A))


def test_a_size_that_no_input_gives_is_an_internal_error():
    with pytest.raises(DsiInternalError, match=r"size a .* can be read from no input"):
        Sizes([]).compile(A * 2)


# ---------------------------------------------------------------------------------------------------------- as a function of inputs


def test_a_program_as_a_function_of_its_inputs_counts_writes_and_gives_way_where_it_must():
    outer, counters, results = lengths(torch.int64, torch.int64)
    outer.call(COPY, counters[0], results[0])
    program = build(outer.finish(results[1]), outer.fakes, reference_kernels)
    elsewhere, aside = [False], []

    def otherwise(*inputs):
        aside.append(inputs)
        return ["otherwise"]

    called = program.unboxed(otherwise, [0], unless=[f"{program.name(elsewhere)}[0]"])
    given = [torch.tensor(5), torch.tensor(7)]
    versions = [value._version for value in given]
    with torch.no_grad():
        (found,) = called(*given)
        assert int(found) == 8 and int(given[0]) == 6 and not aside
        assert given[0]._version > versions[0] and given[1]._version == versions[1]
        assert [int(value) for value in program.run(list(given))] == [8] and int(given[0]) == 7  # the boxed one is another function
        elsewhere[0] = True
        assert called(*given) == ["otherwise"]
    elsewhere[0] = False
    with torch.enable_grad():
        assert called(*given) == ["otherwise"]
    assert len(aside) == 2 and int(given[0]) == 7


class WrittenOut:
    """Runs a region by its body. What `run` is at first stands in the program's own code, and says so in `done`."""

    def __init__(self, region):
        body, self.done = ReferenceKernel(region), []

        def run(inputs, outputs, sizes):
            self.done.append("called")
            body(inputs, outputs, sizes)

        def lines(inputs, outputs, name):
            return [f"{name(self.done)}.append('written out')", f"{name(body)}([{', '.join(inputs)}], [{', '.join(outputs)}], ())"]

        run.written_out = lines
        self.run, self.body, self.failures = run, body, []

    def __call__(self, inputs, outputs, sizes):
        raise AssertionError("the program calls `run`")

    def failed(self, error, inputs, outputs, sizes):
        self.failures.append(error)
        self.body(inputs, outputs, sizes)

    def describe(self):
        return ""


def test_a_kernel_is_written_out_while_it_is_the_one_that_runs():
    outer, _, results = lengths(torch.int64)
    made = []
    program = build(outer.finish(results[0]), outer.fakes, lambda region, *_: made.append(WrittenOut(region)) or made[-1])
    (kernel,) = made
    first = kernel.run
    assert [int(value) for value in program.run([torch.tensor(4)])] == [5] and kernel.done == ["written out"]
    kernel.run = lambda *given: first(*given)
    assert [int(value) for value in program.run([torch.tensor(5)])] == [6] and kernel.done == ["written out", "called"]

    def broken(inputs, outputs, sizes):
        raise RuntimeError("no room")

    kernel.run = broken
    assert [int(value) for value in program.run([torch.tensor(6)])] == [7] and [str(error) for error in kernel.failures] == ["no room"]


# ------------------------------------------------------------------------------------------------------------ copies at the end

COPY = torch.ops.aten.copy_.default


def lengths(*dtypes):
    """Counters that a region adds one to, and copies back; gives the outer graph, the counters and the results."""
    outer = Outer()
    counters = [outer.input(f"n{number}", torch.tensor(number).to(dtype)) for number, dtype in enumerate(dtypes)]
    results = outer.region("add", lambda *n: tuple(value + 1 for value in n), *counters, kind="row")
    return outer, counters, results


def copies(program):
    return [step.text for step in program.steps if "copy" in step.text]


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_the_lengths_of_all_layers_are_written_at_once(kernels):
    outer, counters, results = lengths(*[torch.int64] * 3)
    returned = [outer.call(COPY, *pair) for pair in zip(counters, results, strict=True)]
    program = build(outer.finish(returned[1]), outer.fakes, kernels)
    assert len(copies(program)) == 1
    given = [torch.tensor(5), torch.tensor(7), torch.tensor(9)]
    (found,) = program(list(given))
    assert [int(value) for value in given] == [6, 8, 10] and found is given[1]


def test_counters_of_two_dtypes_are_two_copies():
    outer, counters, results = lengths(torch.int64, torch.int32, torch.int32)
    for pair in zip(counters, results, strict=True):
        outer.call(COPY, *pair)
    program = build(outer.finish(results[0]), outer.fakes, reference_kernels)
    assert len(copies(program)) == 2
    given = [torch.tensor(5), torch.tensor(7, dtype=torch.int32), torch.tensor(9, dtype=torch.int32)]
    program(list(given))
    assert [int(value) for value in given] == [6, 8, 10]


def test_a_copy_of_what_another_copy_writes_comes_after_it():
    outer, counters, results = lengths(torch.int64, torch.int64)
    outer.call(COPY, counters[0], results[0])
    outer.call(COPY, counters[1], counters[0])  # the new value
    outer.call(COPY, counters[0], results[1])  # written twice
    program = build(outer.finish(results[0]), outer.fakes, reference_kernels)
    given = [torch.tensor(5), torch.tensor(70)]
    program(list(given))
    assert [int(value) for value in given] == [71, 6] and len(copies(program)) == 3


def test_an_input_that_is_written_twice_keeps_the_last_value():
    outer, counters, results = lengths(torch.int64, torch.int64)
    outer.call(COPY, counters[0], results[0])
    outer.call(COPY, counters[0], results[1])
    program = build(outer.finish(results[0]), outer.fakes, reference_kernels)
    given = [torch.tensor(5), torch.tensor(70)]
    program(list(given))
    assert int(given[0]) == 71 and len(copies(program)) == 2


# ------------------------------------------------------------------------------------ what may start before the kernel before it ends


def early(gm, outer) -> list[bool]:
    """Of each region in order: whether its kernel may start while the one before it runs."""
    found = []

    class Kernel:
        def __init__(self, region):
            self.allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

        def __call__(self, inputs, outputs, sizes):
            pass

        def describe(self):
            return ""

    def kernels(region, values, sizes, overlaps):
        found.append(overlaps)
        return Kernel(region)

    build(gm, outer.fakes, kernels)
    return found


def two_linears(dynamic=(), of_weight=None):
    """Two regions in a row; the second has the weight `of_weight(outer, w)`."""
    outer = Outer(dynamic)
    x, w = outer.input("x", torch.randn(5, 8)), outer.input("w", torch.randn(8, 8))
    (y,) = outer.region("first", lambda x, w: (D.linear(x, w),), x, w)
    (z,) = outer.region("second", lambda x, w: (D.linear(x, w),), y, of_weight(outer, w) if of_weight else w)
    gm = outer.finish(z)
    outer.plan()
    for region in outer.regions:
        region.spec.constants = frozenset({1})
    return gm, outer


def test_the_first_kernel_waits_for_everything_before_the_program():
    """Weights are read before the wait: whoever wrote them before the call must have finished."""
    assert early(*two_linears()) == [False, True]


def test_a_kernel_that_may_not_be_launched_is_not_waited_for():
    gm, outer = two_linears(dynamic=(5,))
    assert early(gm, outer) == [False, True]  # a size that Dynamo makes symbolic is at least 2
    size = outer.fakes[0].shape[0].node.expr
    possibly_none = sympy.Symbol(size.name, integer=True, nonnegative=True)
    for node in gm.graph.find_nodes(op="placeholder")[:1]:
        node.meta["val"].shape[0].node._expr = possibly_none
    assert early(gm, outer) == [False, False]


def test_a_weight_that_is_made_in_the_graph_is_waited_for():
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.t.default
    assert early(*two_linears(of_weight=lambda outer, w: outer.call(add, w, 1.0))) == [False, False]
    assert early(*two_linears(of_weight=lambda outer, w: outer.call(view, w))) == [False, True]
    assert early(*two_linears(of_weight=lambda outer, w: outer.call(view, outer.call(add, w, 1.0)))) == [False, False]
