"""What a user of torch.compile relies on: shapes that change, breaks, aliases, mutation, weights that change, threads, copies."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler.observe import collecting
from torch import nn

import dsi

EXECUTORS = ["reference", "auto"]


@pytest.fixture(params=EXECUTORS)
def executor(request):
    return request.param


def compile_with(model, executor="reference", **kwargs):
    return torch.compile(model, backend="dsi", options={"executor": executor, "check": True}, **kwargs)


class Block(nn.Module):
    """A small pre-norm transformer layer with a gate."""

    def __init__(self, width: int = 12, heads: int = 3):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 20), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.heads, e // self.heads).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, e))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def check(got, wanted):
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------------- shapes


@torch.no_grad()
def test_batch_and_length_change_without_a_storm_of_recompiles(executor):
    model = Block().eval()
    compiled = compile_with(model, executor)
    sizes = [(2, 7), (3, 7), (3, 5), (5, 11), (4, 13), (2, 2), (6, 3)]
    if executor == "reference":  # in Dynamo a size of 1 is a graph of its own
        sizes += [(1, 7), (7, 1), (1, 1), (1, 9), (9, 1)]
    with collecting() as contexts:
        for batch, length in sizes:
            x = torch.randn(batch, length, 12)
            check(compiled(x), model(x))
    assert len(contexts) <= (3 if executor == "auto" else 6)


@torch.no_grad()
def test_strides_that_torch_states_wrongly(executor):
    """A batch norm of channels that lie last (PatchTST): on a CPU its result has none of the gaps that tracing says it has."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm, self.head = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(60, 4)

        def forward(self, x):
            x = x + self.mix(x)
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(len(x), 60))

    model, x = Normed().eval(), torch.randn(3, 5, 12)
    check(torch.compile(model, backend="dsi", options={"executor": executor})(x), model(x))
    assert dsi.explain(model, x).regions


@pytest.mark.parametrize("dynamic, graphs", [(True, 1), (False, 3)])
@torch.no_grad()
def test_dynamic_as_asked(dynamic, graphs):
    model = Block().eval()
    compiled = compile_with(model, dynamic=dynamic, fullgraph=True)
    with collecting() as contexts:
        for batch, length in [(2, 3), (5, 7), (4, 2)]:
            x = torch.randn(batch, length, 12)
            check(compiled(x), model(x))
    assert len(contexts) == graphs


@torch.no_grad()
def test_empty_batch(executor):
    model = Block().eval()
    compiled = compile_with(model, executor)
    for x in (torch.randn(0, 5, 12), torch.randn(2, 5, 12), torch.randn(2, 0, 12)):
        check(compiled(x), model(x))
        assert compiled(x).shape == x.shape


@torch.no_grad()
def test_the_exception_of_an_empty_batch_is_eagers():
    """Some models refuse an empty batch themselves; what they raise must arrive."""

    class Refusing(Block):
        def forward(self, x):
            if x.shape[0] == 0:
                raise ValueError("batch_size has to be > 0")
            return super().forward(x)

    compiled = compile_with(Refusing().eval())
    compiled(torch.randn(2, 5, 12))
    with pytest.raises(ValueError, match="batch_size has to be > 0"):
        compiled(torch.randn(0, 5, 12))
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(12, 5)).eval()
    x = torch.randn(0, 3, 11)  # the wrong width too
    for call in (model, compile_with(model)):
        with pytest.raises(Exception, match=r"0x11|shapes|12"):
            call(x)


@torch.no_grad()
def test_inputs_that_are_not_contiguous(executor):
    model = Block().eval()
    compiled = compile_with(model, executor)
    wide = torch.randn(4, 6, 24)
    views = [wide[..., ::2], wide[::2, :, :12], torch.randn(12, 6, 4).permute(2, 1, 0), torch.randn(1, 6, 12).expand(4, 6, 12)]
    for x in views[:2] if executor == "auto" else views:
        check(compiled(x), model(x))


# ----------------------------------------------------------------------------------------------------------------- graphs and values


@torch.no_grad()
def test_several_graphs_after_a_break(executor):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            if x.sum() > 0:  # and one that depends on data
                x = -x
            return self.second(x)

    model = Broken().eval()
    with collecting() as contexts:
        compiled = compile_with(model, executor)
        for sign in (1, -1):
            x = torch.randn(2, 5, 12) * sign
            check(compiled(x), model(x))
    assert len([c for c in contexts if c.report.hits["lift.attention"]]) >= 2


@dataclass
class Output:
    states: torch.Tensor
    pooled: tuple[torch.Tensor, ...]
    name: str = "out"


@torch.no_grad()
def test_the_type_of_the_output_is_kept():
    block = Block().eval()

    def function(x):
        y = block(x)
        return Output(y, (y.sum(1), y[0])), {"list": [y, 3, None], "size": y.shape[0]}

    output, more = compile_with(function)(torch.randn(2, 5, 12))
    assert type(output) is Output and type(output.pooled) is tuple and output.name == "out"
    assert more["list"][1:] == [3, None] and more["size"] == 2 and more["list"][0] is output.states


@torch.no_grad()
def test_model_outputs_of_transformers():
    transformers = pytest.importorskip("transformers")
    import zoo

    model = zoo.encoder("bert")
    ids = torch.randint(3, zoo.VOCAB, (2, 5))
    got = compile_with(model)(input_ids=ids, output_hidden_states=True)
    wanted = model(input_ids=ids, output_hidden_states=True)
    assert isinstance(got, transformers.utils.ModelOutput) and type(got) is type(wanted) and got.keys() == wanted.keys()
    check(got.to_tuple(), wanted.to_tuple())


_LIBRARY = torch.library.Library("dsi_test_behaviour", "FRAGMENT")
_LIBRARY.define("mystery(Tensor x, int n) -> Tensor")
_LIBRARY.impl("mystery", lambda x, n: torch.flip(x, [-1]) * n, "CPU")
torch.library.register_fake("dsi_test_behaviour::mystery", lambda x, n: torch.empty_like(x), lib=_LIBRARY)


@torch.no_grad()
def test_an_operator_that_dsi_does_not_know_stays(executor):
    block = Block().eval()

    def function(x):
        y = torch.ops.dsi_test_behaviour.mystery(block(x), 3)
        return block(torch.cumsum(y.sort(-1).values, 1))

    x = torch.randn(2, 5, 12)
    with collecting() as contexts:
        check(compile_with(function, executor, fullgraph=True)(x), function(x))
    assert contexts[0].report.hits["lift.attention"] == 2
    assert any("mystery" in str(refusal) for refusal in contexts[0].report.unfused)


@torch.no_grad()
def test_control_flow_inside_the_graph():
    block = Block().eval()

    def function(x):
        return torch.cond(x.sum() > 0, lambda x: block(x), lambda x: x * 2, (x,))

    compiled = compile_with(function, fullgraph=True)
    for x in (torch.rand(2, 5, 12), -torch.rand(2, 5, 12)):
        check(compiled(x), function(x))


# ----------------------------------------------------------------------------------------------------------- aliasing and mutation


@torch.no_grad()
def test_the_same_tensor_twice(executor):
    linear = nn.Linear(5, 5)

    def function(x, y):
        y.add_(1)
        return linear(x) + y

    compiled = compile_with(function, executor)
    for same in (True, False, True):
        x = torch.randn(3, 5)
        y = x if same else torch.randn(3, 5)
        x2, y2 = (x.clone(),) * 2 if same else (x.clone(), y.clone())
        check((compiled(x, y), x, y), (function(x2, y2), x2, y2))


@torch.no_grad()
def test_views_of_each_other(executor):
    linear = nn.Linear(5, 5)

    def function(x, y):
        x.mul_(2)
        y.add_(linear(x[:3]))
        return x + 1, y * 2

    base, other = (torch.arange(30.0).view(6, 5) / 7 for _ in range(2))
    check((compile_with(function, executor)(base, base[3:]), base), (function(other, other[3:]), other))


@torch.no_grad()
def test_an_input_is_written_to_and_returned(executor):
    linear = nn.Linear(5, 5)

    def function(state, x):
        state[:, 1:3].copy_(linear(x)[:, :2])
        return state, state.t(), x, x[1:]

    compiled = compile_with(function, executor)
    got, wanted = torch.zeros(3, 5), torch.zeros(3, 5)
    x = torch.randn(3, 5)
    a, b = compiled(got, x), function(wanted, x)
    check((got, a), (wanted, b))
    assert a[0] is got and a[2] is x  # the very objects, as in eager
    for i in (1, 3):
        assert a[i]._base is not None
    a[1].zero_()
    a[3].zero_()
    assert not got.any() and not x[1:].any()


@torch.no_grad()
def test_outputs_that_alias_each_other():
    linear = nn.Linear(5, 5)

    def function(x):
        y = linear(x)
        return y, y.view(-1), y

    a, flat, same = compile_with(function)(torch.randn(3, 5))
    flat.zero_()
    assert not a.any() and same is a


@torch.no_grad()
def test_a_result_is_not_an_input():
    """x * 1 and x + 0 are new tensors to a user, whatever a rewrite makes of them."""
    x = torch.randn(3, 5)
    kept = x.clone()
    for function in (lambda x: x * 1, lambda x: x + 0, lambda x: x.clone(), lambda x: x.contiguous().clone()):
        torch._dynamo.reset()
        got = compile_with(function)(x)
        same = function(x).data_ptr() == x.data_ptr()
        assert (got.data_ptr() == x.data_ptr()) == same
        if not same:
            got.zero_()
            assert torch.equal(x, kept)


# ---------------------------------------------------------------------------------------------------------------------------- weights


@torch.no_grad()
def test_weights_that_change_take_effect_without_recompiling(executor):
    torch.manual_seed(5)
    model, other = Block().eval(), Block().eval()
    compiled = compile_with(model, executor)
    x = torch.randn(2, 5, 12)
    with collecting() as contexts:
        check(compiled(x), model(x))
        model.qkv.weight.mul_(-2)
        model.norm.bias.copy_(torch.randn(12))
        check(compiled(x), model(x))
        model.load_state_dict(other.state_dict())
        check(compiled(x), other(x))
        model.up.weight = nn.Parameter(torch.randn(20, 12))
        check(compiled(x), model(x))
        model.out.weight.data = torch.randn(12, 12)
        check(compiled(x), model(x))
    assert len(contexts) == 1


@torch.no_grad()
def test_tied_weights(executor):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.block, self.head = nn.Embedding(11, 12), Block(), nn.Linear(12, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.block(self.table(ids)))

    model = Tied().eval()
    compiled = compile_with(model, executor)
    ids = torch.randint(0, 11, (2, 5))
    check(compiled(ids), model(ids))
    model.table.weight.mul_(3)
    check(compiled(ids), model(ids))


@torch.no_grad()
def test_deepcopy_before_and_after_compiling():
    model = Block().eval()
    compiled = compile_with(model)
    x = torch.randn(2, 5, 12)
    before = copy.deepcopy(compiled)
    check(compiled(x), model(x))
    after, plain = copy.deepcopy(compiled), copy.deepcopy(model)
    wanted = model(x)
    model.qkv.weight.zero_()
    for twin in (before, after, plain, compile_with(plain)):
        check(twin(x), wanted)
    assert not torch.allclose(compiled(x), wanted)


# ------------------------------------------------------------------------------------------------------------------ threads and modes


@torch.no_grad()
def test_four_threads_compile_together(executor):
    models = [Block(12, heads).eval() for heads in (1, 2, 3, 4)]
    x = torch.randn(2, 5, 12)
    wanted = [model(x) for model in models]
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(i: int) -> None:
        try:
            with torch.no_grad():
                compiled = torch.compile(models[i], backend="dsi", options={"executor": executor})
                start.wait()
                for _ in range(3):
                    check(compiled(x), wanted[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


class Cached(nn.Module):
    """Keeps what it has seen in a buffer that is made at the first call, as lazily allocated caches are."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(5, 5), None

    def forward(self, x, position):
        if self.cache is None:
            self.cache = torch.zeros(3, 8, 5)
        self.cache.index_copy_(1, position, self.linear(x))
        return self.cache.sum(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_made_inside(executor, mode):
    torch.manual_seed(2)
    model, twin = Cached(), Cached()
    twin.load_state_dict(model.state_dict())
    compiled = compile_with(model, executor)
    with mode():
        for step in range(4):
            x, position = torch.randn(3, 1, 5), torch.tensor([step])
            check(compiled(x, position), twin(x, position))
        check(model.cache, twin.cache)


def test_a_cache_made_in_inference_mode_is_not_written_outside():
    """Eager raises; to go on with a stale cache would be worse."""
    model = Cached()
    compiled = compile_with(model)
    x = torch.randn(3, 1, 5)
    with torch.inference_mode():
        compiled(x, torch.tensor([0]))
    with torch.no_grad(), pytest.raises(Exception, match=r"[Ii]nference"):
        compiled(x, torch.tensor([1]))


def test_inference_mode_and_no_grad_in_turn():
    model = Block().eval()
    compiled = compile_with(model)
    x = torch.randn(2, 5, 12)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            check(compiled(x), model(x))
    with torch.inference_mode():
        y = compiled(x)
    assert y.is_inference()


@torch.no_grad()
def test_half_precision(executor):
    for dtype in (torch.bfloat16, torch.float16) if executor == "reference" else (torch.bfloat16,):
        model = Block().eval().to(dtype)
        x = torch.randn(2, 5, 12, dtype=dtype)
        torch.testing.assert_close(compile_with(model, executor)(x), model(x), rtol=5e-2, atol=5e-2)
        torch._dynamo.reset()
