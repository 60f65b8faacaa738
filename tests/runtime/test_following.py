"""What a region's kernel gets to know of the weights that follow: the next linear's, where they lie so that it can ask for them."""

from __future__ import annotations

import sympy
import torch
from dsi.codegen.following import PITCH, ROWS
from dsi.runtime.following import extents, following_weights
from dsi.runtime.program import build, reference_kernels
from lowered_graphs import D, Outer


def chain(*weights, made=False):
    """Linears one behind another, each a region with the weights at one place of `weights`; gives the graph and the calls in order."""
    outer = Outer()
    value = outer.input("x", torch.randn(5, 64))
    given = [[outer.input(f"w{n}_{m}", torch.randn(*sizes) / 8) for m, sizes in enumerate(each)] for n, each in enumerate(weights)]
    for number, nodes in enumerate(given):
        if made and number:
            nodes = [outer.call(torch.ops.aten.mul.Tensor, node, 2.0) for node in nodes]
        value = outer.region(f"linear_{number}", lambda x, *w: tuple(D.linear(x, each) for each in w), value, *nodes)[0]
    gm = outer.finish(value)
    outer.plan()
    for region in outer.regions:
        region.spec.constants = frozenset(range(1, len(region.inputs)))
    return gm, outer, [node for node in gm.graph.nodes if node.op == "call_module"]


def names(node):
    return [weight.name for weight in following_weights(node)]


def test_the_weights_of_the_next_linear_follow():
    _, _, calls = chain([(64, 64)], [(32, 64), (16, 64), (16, 64)], [(64, 32)])
    assert [names(call) for call in calls] == [["w1_0", "w1_1", "w1_2"], ["w2_0"], []]


def test_of_many_weights_the_first_three():
    _, _, calls = chain([(64, 64)], [(32, 64)] * 5)
    assert names(calls[0]) == ["w1_0", "w1_1", "w1_2"]


def test_weights_that_lie_otherwise_do_not():
    """Rows that are no whole lines apart, too few rows for all launches to share a kernel, and weights that the graph makes."""
    for second, more in (([(64, 56)], {}), ([(40, 64)], {}), ([(64, 64)], {"made": True})):
        outer_width = second[0][1]
        _, _, calls = chain([(outer_width, 64)], second, **more)
        assert names(calls[0]) == []


def test_rows_and_distance_are_arguments_of_a_launch():
    weights = [torch.empty(32, 64, dtype=torch.bfloat16), torch.empty(16, 64, dtype=torch.bfloat16)]
    assert extents(weights) == {**dict(zip([s.name for s in ROWS], map(sympy.Integer, (32, 16, 0)), strict=True)), PITCH.name: 128}
    assert not any(extents(()).values())


def test_a_program_hands_them_to_kernels_behind_their_inputs():
    gm, outer, _ = chain([(64, 64)], [(32, 64), (16, 64)], [(16, 32)])
    seen, told = [], []

    def kernels(region, values, sizes, overlaps):
        told.append(len(values) - len(region.inputs))
        kernel = reference_kernels(region, values, sizes, overlaps)
        run = kernel.__call__

        class Spy:
            describe = kernel.describe

            def __call__(self, inputs, outputs, sizes):
                seen.append([id(value) for value in inputs[len(region.inputs) :]])
                run(inputs, outputs, sizes)

        return Spy()

    x, *weights = (torch.randn(*fake.shape) for fake in outer.fakes)
    (found,) = build(gm, outer.fakes, kernels)([x, *weights])
    assert told == [2, 1, 0] and seen == [[id(weights[1]), id(weights[2])], [id(weights[3])], []]
    torch.testing.assert_close(found, x @ weights[0].T @ weights[1].T @ weights[3].T, rtol=1e-4, atol=1e-4)
