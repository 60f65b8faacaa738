"""Whatever the graph, its regions read each other in no circle and compute what it computes."""

from __future__ import annotations

import networkx
import torch
from dsi.passes.fuse.convexity import Partition
from fuse.graphs import D, fused
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

B, S, E = 2, 3, 16
SHAPE = (B, S, E)

# name -> (number of values read, what it computes from them and the weights)
OPERATORS = {
    "linear": (1, lambda w, a: D.linear(a, w["square"], w["bias"])),
    "other_linear": (1, lambda w, a: D.linear(a, w["other"])),
    "add": (2, lambda w, a, b: a + b),
    "mul": (2, lambda w, a, b: a * torch.tanh(b)),
    "relu": (1, lambda w, a: torch.relu(a)),
    "shift": (1, lambda w, a: a * 0.5 + w["bias"]),
    "norm": (1, lambda w, a: D.layer_norm(a, w["bias"], None, eps=1e-5)),
    "rms": (1, lambda w, a: D.rms_norm(a, w["bias"], eps=1e-6)),
    "cumsum": (1, lambda w, a: torch.cumsum(a, -1) * 0.1),
    "regroup": (1, lambda w, a: torch.relu(a.view(B * S, 2, E // 2)).view(SHAPE)),
    "swap": (1, lambda w, a: (a.transpose(0, 1) * 2).transpose(0, 1)),
    "halves": (1, lambda w, a: torch.cat([a[..., E // 2 :], -a[..., : E // 2]], -1)),
    "half_product": (2, lambda w, a, b: torch.cat([a[..., : E // 2] * b[..., E // 2 :], b[..., E // 2 :]], -1)),
    "row": (1, lambda w, a: a + a[:, :1]),
    "flat": (1, lambda w, a: (a.reshape(B, S * E) + 1).view(SHAPE)),
    "attention": (
        3,
        lambda w, a, b, c: (
            D.attention(*(t.view(B, S, 2, E // 2).transpose(1, 2) for t in (a, b, c)), scale=0.3).transpose(1, 2).reshape(SHAPE)
        ),
    ),
    "write": (2, lambda w, a, b: D.kv_write(b.contiguous(), w["pos"], a[:, :2], dim=1)),
}

steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), *[st.integers(0, 99)] * 3), min_size=1, max_size=9)


def program(chosen, returned):
    def run(x: Tensor, y: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
        values = [x, y]
        for operator, *reads in chosen:
            count, compute = OPERATORS[operator]
            # The latest values are the likeliest to be read, as in a model.
            values.append(compute(weights, *(values[-1 - (r * r // 99) % len(values)] for r in reads[:count])))
        return [values[-1], *(values[2 + r % (len(values) - 2)] for r in returned)]

    return run


def inputs():
    weights = {"square": torch.randn(E, E) / 4, "other": torch.randn(E, E) / 4, "bias": torch.randn(E), "pos": torch.tensor([2, 0])}
    return torch.randn(SHAPE), torch.randn(SHAPE), weights


@given(chosen=steps, returned=st.lists(st.integers(0, 99), max_size=2), symbolic=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs(chosen, returned, symbolic):
    torch.manual_seed(len(chosen))
    gm, ctx = fused(program(chosen, returned), *inputs(), symbolic=False if any(c[0] in FIXED for c in chosen) else symbolic)
    graph = networkx.DiGraph((a, n) for n in gm.graph.nodes for a in n.all_input_nodes)
    assert networkx.is_directed_acyclic_graph(graph)
    for region in ctx.report.regions:
        assert region.plan is not None and region.key and set(region.roles) <= {n.name for n in region.members}


# Written with literal sizes: a symbolic trace of these would only add guards.
FIXED = {"regroup", "flat", "attention"}


def test_storing_for_a_later_reader_never_makes_a_circle():
    # The second linear reads the norm and, on the way through the first, depends on it: only the first can store it for the sum.
    def f(x: Tensor, y: Tensor, weights: dict[str, Tensor]) -> Tensor:
        h = D.layer_norm(x + y, weights["bias"], None, eps=1e-5)
        first = torch.cumsum(D.linear(h, weights["square"]), -1)
        return D.linear(h * first, weights["other"]) + h

    _, ctx = fused(f, *inputs())
    assert [r.label for r in ctx.report.regions] == ["add + layer_norm + linear", "mul + linear + add"]
    assert [o.name for o in ctx.report.regions[0].outputs] == ["layer_norm", "linear"]


@given(chosen=steps, returned=st.lists(st.integers(0, 99), max_size=2))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_left_out_of_a_walk_could_not_have_been_reached(chosen, returned):
    asked = []
    reaches, floor = Partition.reaches, Partition._floor

    def both(self, source, targets):
        found = reaches(self, source, targets)
        Partition._floor = lambda self, source: -1  # all of the graph
        try:
            assert reaches(self, source, targets) is found
        finally:
            Partition._floor = floor
        asked.append(floor(self, source))
        return found

    torch.manual_seed(len(chosen))
    Partition.reaches = both
    try:
        fused(program(chosen, returned), *inputs(), symbolic=False)
    finally:
        Partition.reaches = reaches
    event(f"left out: {any(place > 5 for place in asked)}")  # more than the inputs
