"""The IR specification: right graphs pass, and each thing that a stage may not do is found and named."""

import operator

import pytest
import torch
from dsi.ir import ops
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import Region
from dsi.ir.spec import check_graph, output_aliases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


def traced(function, *shapes):
    """A functional ATen graph of `function` on float32 inputs of these shapes, as AOTAutograd would make it."""
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="real")(*inputs)
    returned = gm.graph.output_node().args[0]
    gm.graph.output_node().args = (returned if isinstance(returned, (tuple, list)) else (returned,),)
    return gm, mode


def node_of(gm, target):
    (node,) = [n for n in gm.graph.nodes if n.target is target]
    return node


def assert_fails(gm, level, words, **kwargs):
    with pytest.raises(DsiInternalError) as caught:
        check_graph(gm, level, **kwargs)
    for word in [words] if isinstance(words, str) else words:
        assert word in str(caught.value), str(caught.value)


def mlp():
    return traced(lambda x, w: (ops.linear(x, w).relu() + 1, x.transpose(0, 1)), (3, 5), (7, 5))


@pytest.mark.parametrize("level", ["aten", "regions", "lowered"])
def test_a_right_graph_passes(level):
    gm, mode = mlp()
    check_graph(gm, level, mode, output_aliases(gm))
    check_graph(gm, level)  # the mode is found from the values


def test_missing_value():
    gm, _ = mlp()
    del node_of(gm, aten.relu.default).meta["val"]
    assert_fails(gm, "aten", ["relu", 'no meta["val"]'])


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: torch.empty(3, 8), "shape (3, 8) against (3, 7)"),
        (lambda: torch.empty(3, 7, dtype=torch.float16), "dtype torch.float16 against torch.float32"),
        (lambda: torch.empty(7, 3).t(), "strides (1, 3) against (7, 1)"),
        (lambda: torch.empty(3, 7, device="meta"), "device meta against cpu"),
        (lambda: (torch.empty(3, 7),), "against FakeTensor"),
    ],
)
def test_wrong_value(wrong, words):
    gm, mode = mlp()
    with mode:
        node_of(gm, aten.relu.default).meta["val"] = wrong()
    if "against FakeTensor" in words:
        words = "against"
    assert_fails(gm, "aten", ["relu", words])


def test_strides_of_a_dimension_of_size_one_mean_nothing():
    gm, mode = traced(lambda x: x + 1, (1, 5))
    with mode:
        node_of(gm, aten.add.Tensor).meta["val"] = torch.empty_strided((1, 5), (77, 1))
    check_graph(gm, "aten")


def test_an_operator_that_its_inputs_do_not_fit():
    gm, _ = mlp()
    node = node_of(gm, ops.linear)
    node.args = (node.args[1], node.args[1].args[0] if node.args[1].args else node.args[0])
    with pytest.raises(DsiInternalError):
        check_graph(gm, "aten")


def test_a_function_of_torch_is_not_of_this_level():
    gm, _ = mlp()
    node_of(gm, aten.relu.default).target = torch.relu
    assert_fails(gm, "aten", "neither an operator overload nor scalar arithmetic")


def test_a_method_is_not_of_this_level():
    gm, _ = mlp()
    node = node_of(gm, aten.relu.default)
    with gm.graph.inserting_after(node):
        method = gm.graph.call_method("relu", (node.args[0],))
    method.meta = dict(node.meta)
    assert_fails(gm, "aten", "call_method")


def test_order():
    gm, _ = mlp()
    node_of(gm, ops.linear).append(node_of(gm, ops.linear).args[0])
    assert_fails(gm, "aten", "not well formed")


# ----------------------------------------------------------------------------------------------------------------------- mutation


def with_epilogue():
    gm, _mode = traced(lambda cache, x: (x + 1, cache * 2), (3, 5), (3, 5))
    cache = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(gm.graph.output_node()):
        copy = gm.graph.call_function(aten.copy_.default, (cache, node_of(gm, aten.add.Tensor)))
    copy.meta["val"] = cache.meta["val"]
    return gm, cache, copy


def test_the_epilogue_may_write_to_inputs():
    gm, _, _ = with_epilogue()
    check_graph(gm, "aten")


def test_nothing_reads_an_input_after_the_epilogue():
    gm, _cache, copy = with_epilogue()
    copy.append(node_of(gm, aten.mul.Tensor))
    assert_fails(gm, "aten", ["copy_", "reads cache"])


def test_the_epilogue_writes_to_inputs_only():
    gm, _, copy = with_epilogue()
    copy.args = (node_of(gm, aten.mul.Tensor), copy.args[1])
    assert_fails(gm, "aten", "no input of the graph")


@pytest.mark.parametrize("target, args", [(aten.add_.Tensor, (1,)), (aten.zero_.default, ())])
def test_nothing_else_writes(target, args):
    gm, _, copy = with_epilogue()
    copy.target, copy.args = target, (copy.args[0], *args)
    assert_fails(gm, "aten", "it writes to an argument")
    assert_fails(gm, "lowered", "it writes to an argument")


def test_kv_writes_are_in_place_only_after_lowering():
    mode = FakeTensorMode()
    graph = torch.fx.Graph()
    with mode:
        values = {"cache": torch.empty(2, 3, 8, 4), "pos": torch.empty(1, dtype=torch.int64), "new": torch.empty(2, 3, 1, 4)}
    nodes = [graph.placeholder(name) for name in values]
    for node in nodes:
        node.meta["val"] = values[node.name]
    write = graph.call_function(ops.kv_write_, tuple(nodes), {"dim": 2})
    write.meta["val"] = None
    graph.output((nodes[2],))
    gm = torch.fx.GraphModule({}, graph)
    assert_fails(gm, "regions", "it writes to an argument")
    check_graph(gm, "lowered")


# ----------------------------------------------------------------------------------------------------------------------- aliasing


def test_aliases_of_outputs():
    gm, _ = traced(lambda x, y: (x.transpose(0, 1)[1:], x + y, y, x.sum()), (3, 5), (3, 5))
    x, y = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    assert output_aliases(gm) == (frozenset([x]), frozenset(), frozenset([y]), frozenset())


def test_a_new_alias_is_found():
    """A rule that takes x * 1 for x gives the user a tensor that writes into the input."""
    gm, _ = traced(lambda x: (x * 1, x + 1), (3, 5))
    before = output_aliases(gm)
    mul = node_of(gm, aten.mul.Tensor)
    mul.replace_all_uses_with(mul.args[0])
    gm.graph.erase_node(mul)
    check_graph(gm, "aten")
    assert_fails(gm, "aten", "output 0 now aliases the input", aliases=before)


def test_an_output_less_is_found():
    gm, _ = traced(lambda x: (x * 1, x + 1), (3, 5))
    before = output_aliases(gm)
    gm.graph.output_node().args = (gm.graph.output_node().args[0][:1],)
    assert_fails(gm, "aten", "returns 1 values where it returned 2", aliases=before)


# ------------------------------------------------------------------------------------------------------------------------- regions


def with_region():
    """relu(linear(x, w)) as one region, and one operator after it."""
    body, mode = traced(lambda x, w: (ops.linear(x, w).relu(),), (3, 5), (7, 5))
    region = Region("r0", "linear", body, None)
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    root.r0 = body
    inputs = []
    for inner in region.inputs:
        inputs.append(graph.placeholder(inner.name))
        inputs[-1].meta["val"] = inner.meta["val"]
    call = graph.call_module("r0", tuple(inputs))
    call.meta.update(region=region, val=tuple(n.meta["val"] for n in region.outputs))
    item = graph.call_function(operator.getitem, (call, 0))
    item.meta["val"] = call.meta["val"][0]
    graph.output((item,))
    return torch.fx.GraphModule(root, graph), call, region, mode


def test_a_right_region_passes():
    gm, _, _, _ = with_region()
    check_graph(gm, "regions")
    check_graph(gm, "lowered")


def test_no_region_before_they_are_made():
    gm, _, _, _ = with_region()
    assert_fails(gm, "aten", "before regions are made")


def test_a_module_that_is_no_region():
    gm, call, _, _ = with_region()
    del call.meta["region"]
    assert_fails(gm, "regions", 'no meta["region"]')


def test_a_region_whose_body_is_another():
    gm, _call, region, _ = with_region()
    region.body = torch.fx.GraphModule({}, region.body.graph)
    assert_fails(gm, "regions", "not the region's body")


def test_a_region_called_with_another_value():
    gm, call, _, _ = with_region()
    call.args = (call.args[1], call.args[1])
    assert_fails(gm, "regions", ["differs from the value passed", "(3, 5) against (7, 5)"])


def test_a_region_whose_value_is_not_its_bodys():
    gm, call, _, mode = with_region()
    with mode:
        call.meta["val"] = (torch.empty(3, 8),)
    assert_fails(gm, "regions", "differs from what the region's body returns")


def test_a_wrong_body():
    gm, _, region, _ = with_region()
    del region.outputs[0].meta["val"]
    with pytest.raises(DsiInternalError, match="body"):
        check_graph(gm, "regions")


def test_a_body_writes_to_nothing():
    gm, _, region, _ = with_region()
    node = region.outputs[0]
    node.target = aten.relu_.default
    assert_fails(gm, "regions", "it writes to an argument")


def test_regions_write_in_place_only_after_lowering():
    gm, _, region, _ = with_region()
    region.in_place[0] = 0
    assert_fails(gm, "regions", "before lowering")
    # The input is then an alias of the output.
    assert output_aliases(gm) == (frozenset([region.inputs[0].name]),)
    region.in_place[0] = 2
    assert_fails(gm, "lowered", "writes to input 2 and has 2")


def test_symbolic_sizes():
    """The values of a dynamic graph are compared as expressions, and no guard is left behind."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def backend(gm, inputs):
        def inner(aten_graph, fakes):
            env = aten_graph.graph.output_node().args[0][0].meta["val"].fake_mode.shape_env
            before = len(env.guards)
            check_graph(aten_graph, "aten")
            seen.append(len(env.guards) - before)
            return make_boxed_func(aten_graph.forward)

        return aot_autograd(fw_compiler=inner, keep_inference_input_mutations=True)(gm, inputs)

    def function(x, w):
        y = torch.nn.functional.linear(x, w)
        return y.view(x.shape[0] * x.shape[1], -1)[1:], torch.cat([y, y], 1)

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(torch.randn(2, 3, 5), torch.randn(7, 5))
    assert seen == [0]
