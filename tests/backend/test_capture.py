"""The one pass that traces plain graphs gives AOTAutograd's graph, and leaves to AOTAutograd whatever is not plain."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
import zoo
from dsi.compiler import capture as capture_module
from dsi.compiler import plain
from dsi.compiler.backend import dsi
from torch import fx, nn
from tracers import call

from bench.generate import cache_argument, static_cache

# ---------------------------------------------------------------------------------------------------------- the same graph as AOTAutograd's


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma"])
def test_a_decode_steps_graph_is_aotautograds(name):
    model = zoo.decoder(name)
    with torch.no_grad():
        cache = static_cache(model, 16)
        model(input_ids=torch.tensor([[3, 4, 5]]), **{cache_argument(model): cache})
    _, tracers = call(model, input_ids=torch.tensor([[7]]), **{cache_argument(model): cache})
    ((_, record),) = tracers.own
    assert record[0] and record[3], "weights that keep their place, and caches that are written to"


def test_an_encoders_graph_is_aotautograds():
    _, tracers = call(zoo.encoder("bert"), input_ids=torch.tensor([[3, 4, 5]]))
    assert not tracers.refusals() and len(tracers.own) == 1


def test_writes_to_inputs_are_at_the_end():
    def step(buffer, row, at):
        buffer[1] = row * 2
        buffer.index_add_(0, at, row[None])
        return buffer.sum(0) + buffer[1:3].t()[:, 0]

    row, at = torch.ones(3), torch.tensor([2])
    buffer, again = torch.zeros(4, 3), torch.zeros(4, 3)
    result, tracers = call(step, buffer, row, at)
    assert not tracers.refusals()
    assert torch.equal(result, step(again, row, at)) and torch.equal(buffer, again)
    assert tracers.own[0][0][-2][0] == "aten.copy_.default", "the last node but the output"


PLAIN = {
    "a write to a parameter": (lambda p, x: (p.mul_(2), x + 1)[1], nn.Parameter(torch.ones(3, 4)), torch.ones(2)),
    "a write to a part of a parameter": (lambda p, x: (p[0].mul_(2), x + 1)[1], nn.Parameter(torch.ones(3, 4)), torch.ones(2)),
    "a result put where it is told": (lambda x, y: torch.add(x, 1, out=y) * 2, torch.ones(2), torch.zeros(2)),
    "writes to several tensors": (lambda x, y: (torch._foreach_add_([x, y], 1), x * 2)[1], torch.ones(2), torch.zeros(2)),
    "an input that repeats its memory": (lambda x: x * 2, torch.ones(1, 3).expand(4, 3)),
    "several results": (lambda x: torch.topk(x, 2), torch.arange(12.0).reshape(3, 4)),
    "dropout that drops nothing": (lambda x: F.dropout(x, 0.5, False) * 2, torch.ones(3)),
    "statistics": (nn.BatchNorm1d(4), torch.arange(12.0).reshape(3, 4)),
    "an empty input": (lambda x: x.sum() + 1, torch.ones(0, 3)),
}


@pytest.mark.parametrize("what", PLAIN)
def test_what_is_plain_is_traced(what):
    function, *inputs = copy.deepcopy(PLAIN[what])
    again, *own = copy.deepcopy(PLAIN[what])
    got, tracers = call(function, *inputs)
    assert not tracers.refusals()
    with torch.no_grad():
        expected = again(*own)
    for a, b in zip(torch.utils._pytree.tree_leaves((got, inputs)), torch.utils._pytree.tree_leaves((expected, own)), strict=True):
        assert torch.equal(a, b)


def test_properties_that_are_views_are_traced_and_others_left():
    x = torch.arange(6.0).reshape(2, 3)
    result, tracers = call(lambda x: x.T * 2 + x.mT, x)
    assert not tracers.refusals() and torch.equal(result, x.T * 3)
    graph = fx.Graph()
    graph.call_function(getattr, (graph.placeholder("x"), "grad")).meta["example_value"] = torch.ones(3)
    with pytest.raises(plain.Refusal, match="getattr"):
        plain.look_at_nodes(graph)


def test_dsi_compiles_what_one_pass_has_traced(caplog):
    """The backend itself, and the option that has AOTAutograd trace instead."""
    model = zoo.decoder("llama")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for tracer, seconds in (("auto", True), ("aot", False)):
            torch._dynamo.reset()
            with caplog.at_level(logging.INFO, logger="dsi.compiler"), capture_seconds() as found:
                options = {"executor": "reference", "tracer": tracer, "check": True}
                got = torch.compile(model, backend=dsi, options=options)(ids, use_cache=False).logits
            torch.testing.assert_close(got, expected)
            assert [("capture" in context.report.seconds) for context in found] == [seconds]
    assert not [r for r in caplog.records if "traced by AOTAutograd" in r.getMessage()]


def capture_seconds():
    from dsi.compiler.observe import collecting

    return collecting()


# --------------------------------------------------------------------------------------------------------------------- in a call


def test_a_call_counts_writes_and_takes_no_gradients():
    seen = []
    run = capture_module.as_called(lambda inputs: seen.append(torch.is_grad_enabled()) or inputs, (1,))
    x, y = torch.ones(2), torch.ones(2)
    versions = x._version, y._version
    run(x, y)
    assert seen == [False] and torch.is_grad_enabled()
    assert (x._version, y._version) == (versions[0], versions[1] + 1)
    with torch.no_grad():
        run(x, y)
        assert not torch.is_grad_enabled()

    def fail(inputs):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        capture_module.as_called(fail, ())()
    assert torch.is_grad_enabled()
