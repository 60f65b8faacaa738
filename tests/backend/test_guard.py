"""Stepping aside: where only the uncompiled graph is exact, it is what runs, and one note says so."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler import observe
from dsi.compiler.observe import collecting
from dsi.ir.randomness import is_random
from torch import nn
from torch.autograd import forward_ad


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(5, 11), nn.Linear(11, 5), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


def compile_with(model, **kwargs):
    return torch.compile(model, backend="dsi", options={"executor": "reference"}, **kwargs)


def notes(contexts):
    return [note for context in contexts for note in context.report.notes]


def assert_aside(contexts, word):
    assert notes(contexts) and word in notes(contexts)[0], notes(contexts)
    assert not any(context.report.hits for context in contexts)


def assert_compiled(contexts, lifts):
    assert notes(contexts) == []
    assert sum(context.report.hits["lift.linear"] for context in contexts) == lifts


def test_gradients_are_exact():
    model = Mlp()
    x = torch.randn(3, 5, requires_grad=True)
    with collecting() as contexts:
        got = torch.autograd.grad(compile_with(model)(x).square().sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert_aside(contexts, "an output wants gradients")


def test_second_derivatives_are_exact():
    model = Mlp()
    x = torch.randn(3, 5, requires_grad=True)

    def penalty(function):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, model.up.weight])

    assert all(torch.equal(a, b) for a, b in zip(penalty(compile_with(model)), penalty(model), strict=True))


def test_training_step_with_every_parameter_updated():
    torch.manual_seed(3)
    one, two = Mlp(), Mlp()
    two.load_state_dict(one.state_dict())
    x = torch.randn(4, 5)
    for model, call in ((one, one), (two, compile_with(two))):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            call(x).square().mean().backward()
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_mutated_input_that_wants_gradients():
    weight = torch.randn(7, 5, requires_grad=True)

    def accumulate(total, x):
        total.add_(F.linear(x, weight))
        return x.sum()

    grads = []
    for function in (accumulate, compile_with(accumulate)):
        total = torch.zeros(3, 7)
        with collecting() as contexts:
            function(total, torch.ones(3, 5))
        total.square().sum().backward()
        grads.append(weight.grad.clone())
        weight.grad = None
    assert torch.equal(*grads)
    assert_aside(contexts, "written to wants gradients")


def test_no_grad_inside_the_function_is_compiled():
    """Dynamo hands such a graph over with gradients on: what counts is what the outputs want."""
    model = Mlp()

    def infer(x):
        with torch.no_grad():
            return model(x)

    x = torch.randn(3, 5)
    with collecting() as contexts:
        got = compile_with(infer)(x)
    torch.testing.assert_close(got, model(x).detach())
    assert not got.requires_grad
    assert_compiled(contexts, 2)


def test_the_decorator_is_compiled():
    model = Mlp()
    x = torch.randn(3, 5)
    with collecting() as contexts:
        got = torch.no_grad()(compile_with(model))(x)
    torch.testing.assert_close(got, model(x).detach())
    assert_compiled(contexts, 2)


def test_gradients_on_but_wanted_by_nothing():
    weight = torch.randn(7, 5)
    x = torch.randn(3, 5)
    with collecting() as contexts:
        got = compile_with(lambda x: F.linear(x, weight))(x)
    torch.testing.assert_close(got, F.linear(x, weight))
    assert_compiled(contexts, 1)


def test_enable_grad_inside_no_grad():
    weight = torch.randn(7, 5, requires_grad=True)

    def function(x):
        with torch.enable_grad():
            return F.linear(x, weight)

    compiled = compile_with(function)
    with torch.no_grad():
        out = compiled(torch.ones(2, 5))
    assert out.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(grad, torch.full((7, 5), 2.0))


def test_the_same_model_for_training_and_inference():
    model = Mlp()
    compiled = compile_with(model)
    x = torch.randn(3, 5)
    with torch.no_grad(), collecting() as contexts:
        compiled(x)
    assert_compiled(contexts, 2)
    compiled(x).sum().backward()
    got = model.up.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(got, model.up.weight.grad)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast(where):
    model = Mlp().eval()

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    function = inside if where == "inside" else model
    x = torch.randn(3, 5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "outside"), collecting() as contexts:
        got, wanted = compile_with(function)(x), function(x)
    assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert_aside(contexts, "autocast")


def test_autocast_that_is_switched_off_where_it_is_off():
    """Around norms and rotary embeddings, so that they stay in float32 whatever the caller does."""
    model = Mlp().eval()

    def function(x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=False), torch.autocast("cpu", enabled=False):
            return model(x)

    x = torch.randn(3, 5)
    with torch.no_grad(), collecting() as contexts:
        compiled = compile_with(function)
        torch.testing.assert_close(compiled(x), function(x))
        assert_compiled(contexts, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # another state is another compilation
            assert torch.equal(compiled(x), function(x))
    assert "autocast is on" in contexts[1].report.notes[0]


def test_autocast_that_is_switched_on_and_off():
    model = Mlp().eval()

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            with torch.autocast("cpu", enabled=False):
                return y, model(x)

    x = torch.randn(3, 5)
    with torch.no_grad(), collecting() as contexts:
        for got, wanted in zip(compile_with(function)(x), function(x), strict=True):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert_aside(contexts, "autocast is switched on")


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_keyword": lambda x: F.dropout(x, p=0.5, training=True),
    "dropout_method": lambda x: x.bernoulli(0.3),
    "in_place": lambda x: x.clone().uniform_(),
    "rand": lambda x: x + torch.rand(3, 5),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randperm": lambda x: x[torch.randperm(3)],
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "aten": lambda x: torch.ops.aten.bernoulli.p(x, 0.5),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_draw_what_eager_draws(name):
    x = torch.randn(3, 5)
    weight = torch.randn(5, 5)

    def function(x):
        return RANDOM[name](F.linear(x, weight))

    with torch.no_grad(), collecting() as contexts:
        torch.manual_seed(7)
        wanted = [function(x), function(x)]
        compiled = compile_with(function)
        torch.manual_seed(7)
        got = [compiled(x), compiled(x)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert_aside(contexts, "random")


def test_forward_mode_derivatives_are_those_of_eager():
    x, tangent, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5, 5)

    def function(x):
        return torch.tanh(F.linear(x, weight))

    with torch.no_grad(), collecting() as contexts:
        compiled = compile_with(function)
        compiled(x)
        assert_compiled(contexts, 1)
        with forward_ad.dual_level():
            got, wanted = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))) for f in (compiled, function))
    torch.testing.assert_close(got.tangent, wanted.tangent)
    torch.testing.assert_close(got.primal, wanted.primal)
    assert any("derivatives" in note for note in notes(contexts))


NOT_RANDOM = {
    "dropout_in_eval": lambda x: F.dropout(x, 0.5, training=False),
    "dropout_of_nothing": lambda x: F.dropout(x, 0.0, training=True),
    "attention_without_dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0),
    "rrelu_in_eval": lambda x: F.rrelu(x, training=False),
}


@pytest.mark.parametrize("name", NOT_RANDOM)
def test_operators_that_draw_nothing_are_compiled(name):
    weight = torch.randn(5, 5)
    x = torch.randn(3, 5)

    def function(x):
        return NOT_RANDOM[name](F.linear(x, weight))

    with torch.no_grad(), collecting() as contexts:
        torch.testing.assert_close(compile_with(function)(x), function(x))
    assert_compiled(contexts, 1)


@pytest.mark.parametrize("name", ["__str__", "__eq__", "overloads", "not an identifier", ""])
def test_names_that_are_no_operators_are_not_random(name):
    node = torch.fx.Graph().create_node("call_method", name)
    assert not is_random(node)


_LIBRARY = torch.library.Library("dsi_test_guard", "FRAGMENT")
_LIBRARY.define("noise(Tensor x) -> Tensor")
_LIBRARY.impl("noise", lambda x: x + torch.rand_like(x), "CompositeImplicitAutograd")


def test_a_random_operator_that_only_aten_shows():
    """A composite hides its random part from Dynamo's graph: the second look, after AOTAutograd, sees it."""
    weight = torch.randn(5, 5)

    def function(x):
        return torch.ops.dsi_test_guard.noise(F.linear(x, weight))

    x = torch.randn(3, 5)
    with torch.no_grad(), collecting() as contexts:
        torch.manual_seed(7)
        wanted = function(x)
        torch.manual_seed(7)
        got = torch.compile(function, backend="dsi")(x)  # the default executor must not be chosen either
    assert torch.equal(got, wanted)
    assert "random" in notes(contexts)[0]


def test_complex_values():
    def function(x, w):
        return torch.view_as_real(torch.view_as_complex(F.linear(x, w).reshape(3, 2, 2)) * 1j)

    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with torch.no_grad(), collecting() as contexts:
        assert torch.equal(compile_with(function)(x, w), function(x, w))
    assert_aside(contexts, "complex")


@pytest.mark.parametrize("where", ["input", "inside"])
def test_values_that_are_negated_only_where_they_are_read(where):
    """Their memory has the other sign, and kernels read memory."""
    turned = torch.randn(3, 5, dtype=torch.complex64).conj().imag
    assert turned.is_neg()
    x, w = (turned, torch.randn(4, 5)) if where == "input" else (torch.randn(3, 5), torch.randn(4, 5))

    def function(x, w):
        return F.linear(x if where == "input" else torch._neg_view(x), w)

    with torch.no_grad(), collecting() as contexts:
        assert torch.equal(compile_with(function)(x, w), function(x, w))
    assert_aside(contexts, "negated")


def test_values_that_torch_quantises():
    x = torch.randn(4, 4).t()
    with torch.no_grad(), collecting() as contexts:
        got = compile_with(lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8).dequantize() * 2)(x)
    assert torch.equal(got, x.round().clamp(0, 255) * 2)
    assert_aside(contexts, "quantised by torch itself")


def test_tensor_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3, 5), torch.randn(3, 5))
    weight = torch.randn(7, 5)
    with torch.no_grad(), collecting() as contexts:
        got = compile_with(lambda x: F.linear(x, weight))(x)
    assert torch.equal(got.b, F.linear(x.b, weight))
    assert_aside(contexts, "subclass (TwoTensor)")


def test_function_transforms():
    weight = torch.randn(4, 5)

    def function(x):
        return torch.func.vmap(torch.func.grad(lambda row: F.linear(row, weight).square().sum()))(x)

    x = torch.randn(3, 5)
    with collecting() as contexts:
        torch.testing.assert_close(compile_with(function)(x), function(x))
    assert_aside(contexts, "transforms functions")


def test_said_once():
    observe._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            compile_with(nn.Linear(5, 7))(torch.randn(3, 5))
    assert len([w for w in caught if "stepped aside" in str(w.message)]) == 1
