"""What AOTAutograd has to trace: each refusal of the one pass is made, and the result is eager's all the same."""

import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler import capture as capture_module
from dsi.compiler import plain
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from tracers import Tracers, call


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


@torch.library.custom_op("dsi_tests::shout", mutates_args=())
def shout(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@shout.register_fake
def _(x):
    return torch.empty_like(x)


def without(x):
    with torch.no_grad():
        return x * 2


def behind_autograd(x):
    x.data.mul_(2)
    return x + 1


def asserting(x):
    torch._assert_async((x > 0).all())
    return x * 2


ONES = (torch.ones(2, 2),)
LEFT = {
    "a view of an input is returned": (lambda x: (x.view(-1), x + 1), ONES, "shows memory"),
    "an input that was written to is returned": (lambda x: x.add_(1), ONES, "shows memory"),
    "a buffer that was written to is returned": (Twice(), (torch.ones(2),), "shows memory"),
    "two outputs share memory": (lambda x: (x * 2).chunk(2), ONES, "shows memory"),
    "inputs that overlap are written to": (overlapping, with_memory_of_one, "shares its memory"),
    "a write behind autograd's back": (behind_autograd, ONES, "_get_data_attr"),
    "a constant": (lambda x: x + torch.tensor([1.0, 2.0]), ONES, "constant"),
    "sizes that depend on values": (lambda x: x[x > 0].sum(), ONES, "not fixed"),
    "a value that is read": (lambda x: x * x.sum().item(), ONES, "no tensor"),
    "random numbers": (lambda x: F.dropout(x, 1.0) + torch.rand_like(x) * 0, ONES, "random"),
    "another's operator": (lambda x: shout(x) * 2, ONES, "dsi_tests"),
    "an operator of another's schema": (lambda x: torch.ops.dsi_tests.shout.default(x) * 2, ONES, "dsi_tests"),
    "a branch": (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), ONES, "get_attr"),
    "a transform of functions": (lambda x: torch.func.vmap(lambda row: row.sum() * 2)(x), ONES, "functorch"),
    "an assertion": (asserting, ONES, "_assert_async"),
    "complex numbers": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), ONES, "complex"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_plain_is_left_and_right(what):
    function, given, words = LEFT[what]
    inputs, own = (given() if callable(given) else copy.deepcopy(given) for _ in range(2))
    if isinstance(function, Twice):
        function.count.zero_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        got, tracers = call(function, *inputs)
    assert [reason for reason in tracers.refusals() if words in reason], tracers.own
    if isinstance(function, Twice):
        function.count.zero_()
    with torch.no_grad():
        expected = function(*own)
    for a, b in zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (got, expected)), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(inputs, own, strict=True))


def test_an_alias_stays_an_alias():
    x = torch.ones(2)
    out, _ = call(lambda x: x.add_(1), x)
    out += 5
    assert torch.equal(x, torch.full((2,), 7.0))


def test_symbolic_sizes_are_left():
    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    result, tracers = call(lambda x: torch.relu(x) * 2, x)
    assert torch.equal(result, torch.relu(x) * 2)
    assert tracers.refusals() and ("SymInt" in tracers.refusals()[0] or "not fixed" in tracers.refusals()[0])


@pytest.mark.parametrize(
    "mode, words",
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
        (lambda: torch.enable_grad(), "gradients are on"),
    ],
)
def test_states_that_change_how_operators_run_are_left(mode, words):
    tracers, x = Tracers(), torch.ones(2, requires_grad=True)
    torch._dynamo.reset()
    with torch.no_grad(), mode():
        torch.compile(lambda x: torch.relu(x).argmax(), backend=tracers)(x)
    assert len(tracers.own) == 1 and words in tracers.own[0]


def test_gradients_that_are_switched_in_the_graph_are_left():
    tracers = Tracers()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(without, backend=tracers)(torch.ones(2)), torch.full((2,), 2.0))
    assert "_set_grad_enabled" in tracers.own[0]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


STATES = {
    "a dispatch mode": Mode,
    "inference mode": torch.inference_mode,
    "random states": lambda: torch._functorch.config.patch(functionalize_rng_ops=True),
    "to return fakes": lambda: patch.object(torch._guards.TracingContext.get(), "fakify_first_call", True),
    "compiled autograd": lambda: patch.object(torch._dynamo.compiled_autograd, "in_compiled_autograd_region", True),
    "functorch": lambda: patch.object(torch._C._functorch, "peek_interpreter_stack", lambda: 1),
}


@pytest.mark.parametrize("words", STATES)
def test_states_of_the_compilation_are_left(words):
    found = []

    def backend(gm, inputs):
        with STATES[words]():
            found.append(capture_module.capture(gm, inputs))
        found.append(capture_module.capture(gm, inputs))
        return gm.forward

    torch.compile(torch.relu, backend=backend)(torch.ones(2))
    assert words in found[0] and not isinstance(found[1], str)


def test_inference_mode_of_a_call_changes_nothing():
    """Dynamo leaves it while it compiles."""
    tracers, x = Tracers(), torch.ones(2)
    with torch.inference_mode():
        result = torch.compile(torch.relu, backend=tracers)(x)
    tracers.assert_equal()
    assert not tracers.refusals() and result.is_inference()


def test_a_graph_of_another_tracer_is_left():
    assert "not of a compilation" in capture_module.capture(fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(2)])


class Mine(torch.Tensor):
    """A subclass."""


def test_inputs_that_are_no_plain_tensors_are_refused():
    graph = fx.Graph()
    for name in ("x", "y"):
        graph.placeholder(name).meta["example_value"] = torch.ones(3)
    tracing = SimpleNamespace(fake_mode=FakeTensorMode(), tensor_to_context={})
    same = torch.ones(3)
    with torch.inference_mode():
        made_in_inference_mode = torch.ones(3)
    assert len(plain.look_at_inputs(graph, [same, torch.ones(3)], tracing)) == 2
    cases = [
        ([same, same], "the same tensor"),
        ([same, Mine(torch.ones(3))], "Mine"),
        ([same, 3], "int"),
        ([same, torch.ones(3).to_sparse()], "sparse"),
        ([same, torch.quantize_per_tensor(same, 1.0, 0, torch.quint8)], "quantised"),
        ([same, made_in_inference_mode], "inference mode"),
        ([same, torch.ones(3, dtype=torch.complex64)], "complex"),
    ]
    for values, words in cases:
        with pytest.raises(plain.Refusal, match=words):
            plain.look_at_inputs(graph, values, tracing)


def test_an_input_that_dynamo_has_changed_is_refused():
    graph = fx.Graph()
    graph.placeholder("x").meta["example_value"] = torch.ones(3)
    tracing = SimpleNamespace(fake_mode=FakeTensorMode(), tensor_to_context={})
    x = torch.ones(3)
    fake = tracing.fake_mode.from_tensor(x)
    fake.unsqueeze_(0)
    with pytest.raises(plain.Refusal, match="changed its shape"):
        plain.look_at_inputs(graph, [x], tracing)


def test_views_that_are_conjugate_or_negative_are_not_plain():
    value = torch.ones(2, dtype=torch.complex64)
    assert "complex" in plain.why_not_plain(value.conj())
    assert "negative" in plain.why_not_plain(value.conj().imag)
    assert plain.why_not_plain(value.real) == ""


@pytest.mark.parametrize("name", ["unsqueeze_", "t_", "resize_", "set_", "detach_", "requires_grad_", "rename_", "share_memory_"])
def test_methods_that_change_more_than_values_are_refused(name):
    """Dynamo breaks its graph at most of them today; a graph that has one is not traced."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_method(name, (x, 0)).meta["example_value"] = torch.ones(3)
    with pytest.raises(plain.Refusal, match=name):
        plain.look_at_nodes(graph)


def test_a_parameter_that_dynamo_does_not_mark_is_refused():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    with pytest.raises(plain.Refusal, match="keeps its place"):
        capture_module._static([x, w], [torch.ones(2), nn.Parameter(torch.ones(2))])
    w.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    assert capture_module._static([x, w], [torch.ones(2), nn.Parameter(torch.ones(2))]) == [1]


def test_records_of_another_torch_are_refused():
    record = type("Record", (), {"__dataclass_fields__": {"one": None}, "__init__": lambda self, one, other: None})
    with pytest.raises(plain.Refusal, match="other records"):
        capture_module._filled(record, one=1)
