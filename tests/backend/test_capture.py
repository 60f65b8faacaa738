"""The one pass that traces plain graphs gives AOTAutograd's graph, and leaves to AOTAutograd whatever is not plain."""

import logging

import pytest
import torch
import zoo
from dsi.compiler import backend as backend_module
from dsi.compiler import capture as capture_module
from dsi.compiler.backend import dsi
from torch import fx, nn
from torch.fx.node import map_arg

from bench.generate import cache_argument, static_cache

REFERENCE = {"executor": "reference"}


def described(gm: fx.GraphModule) -> list[object]:
    """A line a node: what it calls, with what (nodes by number), where it is from, and shape, strides, dtype and device of its value."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines: list[object] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        kind = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else None
        from_epilogue = node.target is torch.ops.aten.copy_.default
        trace = node.meta.get("stack_trace", "") if node.op == "call_function" and not from_epilogue else ""
        place = [
            line for line in trace.splitlines() if line.strip(" ^~")
        ]  # a view may be made where it is read: the same line, another part
        called = node.target if node.op == "call_function" else node.op
        lines.append((str(called), str(map_arg((node.args, node.kwargs), lambda n: number[n])), kind, place))
    return lines


@pytest.fixture
def both(monkeypatch):
    """Graphs that both ways of tracing have given, a pair a compilation; or the reason in place of the first."""
    found = []

    def compiled(gm, example_inputs, observer, names):
        own = capture_module.capture(gm, example_inputs)
        tracing = torch._guards.TracingContext.get()
        static = list(tracing.fw_metadata.static_input_indices) if not isinstance(own, str) else None
        tracing.fw_metadata = None
        found.append([own if isinstance(own, str) else (described(own.gm), static)])
        return backend_module._through_aot(gm, example_inputs, observer, names)

    real = backend_module._compile_aten

    def compile_aten(gm, fake_inputs, observer):
        found[-1].append((described(gm), list(torch._guards.TracingContext.get().fw_metadata.static_input_indices)))
        return real(gm, fake_inputs, observer)

    monkeypatch.setattr(backend_module, "_compiled", compiled)
    monkeypatch.setattr(backend_module, "_compile_aten", compile_aten)
    return found


def call(function, *args, **kwargs):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(function, backend=dsi, options=REFERENCE)(*args, **kwargs)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma"])
def test_a_decode_steps_graph_is_aotautograds(both, name):
    model = zoo.decoder(name)
    with torch.no_grad():
        cache = static_cache(model, 16)
        model(input_ids=torch.tensor([[3, 4, 5]]), **{cache_argument(model): cache})
    call(model, input_ids=torch.tensor([[7]]), **{cache_argument(model): cache})
    ((own, theirs),) = both
    assert not isinstance(own, str), own
    assert own[1] == theirs[1] and own[1]
    assert own[0] == theirs[0]


def test_writes_to_inputs_are_at_the_end(both):
    buffer, row = torch.zeros(4, 3), torch.ones(3)

    def step(buffer, row, at):
        buffer[1] = row * 2
        buffer.index_add_(0, at, row[None])
        return buffer.sum(0) + buffer[1:3].t()[:, 0]

    out = call(step, buffer, row, torch.tensor([2]))
    ((own, theirs),) = both
    assert own == theirs
    again = torch.zeros(4, 3)
    assert torch.equal(out, step(again, row, torch.tensor([2]))) and torch.equal(buffer, again)


# ---------------------------------------------------------------------------------------------------------------- what is left to it


class Twice(nn.Module):
    """Returns its buffer, having written to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count += x
        return self.count


def overlapping(x, y):
    x.add_(1)
    return x * y


def with_memory_of_one():
    base = torch.arange(4.0)
    return base[:3], base[1:]


LEFT = {
    "a view of an input is returned": (lambda x: (x.view(-1), x + 1), (torch.ones(2, 2),), "shows memory"),
    "an input that was written to is returned": (lambda x: x.add_(1), (torch.ones(2),), "shows memory"),
    "a buffer that was written to is returned": (Twice(), (torch.ones(2),), "shows memory"),
    "two outputs share memory": (lambda x: (x * 2).chunk(2), (torch.ones(4),), "shows memory"),
    "inputs that overlap are written to": (overlapping, with_memory_of_one(), "shares its memory"),
    "a constant": (lambda x: x + torch.tensor([1.0, 2.0]), (torch.ones(2),), "tensor"),
    "sizes that depend on values": (lambda x: x[x > 0].sum(), (torch.ones(3),), "not fixed"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_plain_is_left_and_right(what, monkeypatch, caplog):
    function, inputs, reason = LEFT[what]
    own = [torch.as_strided(x.clone(), x.shape, x.stride()) for x in inputs] if len(inputs) == 1 else list(with_memory_of_one())
    with caplog.at_level(logging.INFO, logger="dsi.compiler"), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = call(function, *inputs)
    said = [record.getMessage() for record in caplog.records if "traced by AOTAutograd" in record.getMessage()]
    assert said and reason in said[0], said
    if isinstance(function, Twice):
        function = Twice()
    with torch.no_grad():
        expected = function(*own)
    for a, b in zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (got, expected)), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(inputs, own, strict=True))


def test_an_alias_stays_an_alias():
    x = torch.ones(2)
    out = call(lambda x: x.add_(1), x)
    out += 5
    assert torch.equal(x, torch.full((2,), 7.0))


def test_symbolic_sizes_are_left(caplog):
    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    with caplog.at_level(logging.INFO, logger="dsi.compiler"):
        assert torch.equal(call(lambda x: torch.relu(x) * 2, x), torch.relu(x) * 2)
    assert any("not fixed" in record.getMessage() or "SymInt" in record.getMessage() for record in caplog.records)


def test_inference_mode_is_left(caplog):
    with caplog.at_level(logging.INFO, logger="dsi.compiler"), torch.inference_mode():
        assert call(torch.relu, torch.ones(2)).sum() == 2
    assert any("plain tensor" in record.getMessage() or "inference mode" in record.getMessage() for record in caplog.records)


def test_a_changed_shape_of_an_input_is_left():
    """Dynamo breaks its graph there today; a graph that has it is not traced."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(3)
    graph.call_method("unsqueeze_", (x, 0))
    with pytest.raises(capture_module.Unfit, match="unsqueeze_"):
        capture_module._look_at_nodes(graph)


def test_a_captured_graph_runs_without_gradients():
    seen = []
    run = capture_module.without_gradients(lambda inputs: seen.append(torch.is_grad_enabled()) or inputs)
    assert run(1, 2) == [1, 2] and torch.is_grad_enabled() and seen == [False]
    with torch.no_grad():
        run(1)
        assert not torch.is_grad_enabled()

    def fail(inputs):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        capture_module.without_gradients(fail)()
    assert torch.is_grad_enabled()
