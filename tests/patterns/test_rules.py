"""Each rule on the spellings that it is for, and on those that only look like them."""

from __future__ import annotations

import math
import operator

import aten_graphs
import pytest
import rule_graphs
import torch
import torch.nn.functional as F
from dsi.ir.spec import check_graph, output_aliases
from dsi.passes.normalise import normalise
from dsi.passes.recognise import recognise

G = torch.Generator().manual_seed(11)


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=G).to(dtype)


X = randn(2, 3, 10)
W, B10 = randn(10), randn(10)
BF = torch.bfloat16
CASES: list = []


def stages(fn, *args, symbolic: bool = False):
    """Both stages on `fn`, the specification checked, numbers compared; the graph and the hits."""
    gm, context = aten_graphs.traced(fn, *args, symbolic=symbolic)
    aliases = output_aliases(gm)
    for stage in (normalise, recognise):
        stage(gm, context)
        check_graph(gm, "aten", context.fake_mode, aliases)
    half = any(isinstance(a, torch.Tensor) and a.dtype in (BF, torch.float16) for a in args)
    torch.testing.assert_close(gm(*args), fn(*args), **({"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}))
    return gm, context


def case(name: str, hits: dict[str, int], *args: torch.Tensor):
    """Registers a function of `args` with the hits that it must have; 0 says that the rule must not fire."""

    def register(fn):
        CASES.append(pytest.param(fn, args, hits, id=name))
        return fn

    return register


@pytest.mark.parametrize(("fn", "args", "hits"), CASES)
def test_hits(fn, args, hits):
    _, context = stages(fn, *args)
    assert {name: context.report.hits[name] for name in hits} == hits


# -------------------------------------------------------------------------------------------------------------------- rms_norm


def rms(x, w, eps=1e-6, dim=-1):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps) * w


case("rms: plain", {"rms_norm": 1}, X, W)(rms)
case("rms: weight first", {"rms_norm": 1}, X, W)(lambda x, w: w * (torch.rsqrt(1e-6 + (x * x).mean(-1, keepdim=True)) * x))
case("rms: divided", {"rms_norm": 1}, X, W)(lambda x, w: x / torch.sqrt((x * x).mean(2, True) + 1e-6) * w)
case("rms: behind its linear", {"rms_norm_behind": 1}, X, randn(4, 10))(
    lambda x, w: F.linear(x, w) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
)
case("rms: of another value, behind a linear", {"rms_norm_behind": 0}, X, randn(10, 10))(
    lambda x, w: F.linear(x, w) * torch.rsqrt(x.tanh().square().mean(-1, keepdim=True) + 1e-6)
)
case("rms: behind a linear in half precision", {"rms_norm_behind": 0}, X.to(BF), randn(4, 10, dtype=BF))(
    lambda x, w: F.linear(x, w) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
)
case("rms: power", {"rms_norm": 1}, X, W)(lambda x, w: x * torch.pow((x * x).mean(2, True) + 1e-6, -0.5) * w)
case("rms: no weight", {"rms_norm": 1}, X)(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
case("rms: 1 + weight", {"rms_norm": 1}, X, W)(lambda x, w: rms(x, 1.0 + w))
case("rms: cast before", {"rms_norm": 1}, X.to(BF), W.to(BF))(lambda x, w: w * rms(x.float(), 1.0).to(BF))
case("rms: cast after", {"rms_norm": 1}, X.to(BF), W.to(BF))(lambda x, w: rms(x.float(), w).to(BF))
case("rms: cast after, 1 + weight", {"rms_norm": 1}, X.to(BF), W.to(BF))(lambda x, w: rms(x.float(), 1.0 + w.float()).to(BF))
case("rms: half throughout", {"rms_norm": 1}, X.to(BF), W.to(BF))(rms)
case("rms: product of the narrow x", {"rms_norm": 1}, X.to(BF), W.to(BF))(
    lambda x, w: w * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF)
)
case("rms: no keepdim", {"rms_norm": 1}, X, W)(lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(-1) * w)
case("rms: no keepdim, None", {"rms_norm": 1}, X, W)(lambda x, w: x / ((x * x).mean(2)[..., None] + 1e-6).sqrt() * w)
case("rms: no keepdim, cast", {"rms_norm": 1}, X.to(BF), W.to(BF))(
    lambda x, w: w * (lambda y: y * torch.rsqrt(y.pow(2).mean(-1) + 1e-6)[:, :, None])(x.float()).to(BF)
)
case("rms: sum over size", {"rms_norm": 1}, X, W)(lambda x, w: x / torch.sqrt((x * x).sum(-1, keepdim=True) / 10 + 1e-6) * w)
case("rms: sum over size, no keepdim", {"rms_norm": 1}, X, W)(
    lambda x, w: x * torch.rsqrt((x * x).sum(-1) / x.shape[-1] + 1e-6)[..., None] * w
)
CUBE = randn(4, 4, 4)
case("not rms: made elsewhere", {"rms_norm": 0, "kept_dimension": 0}, CUBE)(
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(1)
)
case("not rms: kept in the middle", {"rms_norm": 0}, CUBE)(lambda x: x * torch.rsqrt(x.pow(2).mean(1) + 1e-6).unsqueeze(1))
case("not rms: kept in front", {"rms_norm": 0, "kept_dimension": 0}, CUBE)(lambda x: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6))
case("not rms: sum over another size", {"rms_norm": 0, "sum_of_mean": 0}, X)(
    lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) / 3 + 1e-6)
)
case("not rms: sum of two dimensions", {"rms_norm": 0, "sum_of_mean": 0}, X)(
    lambda x: x / torch.sqrt((x * x).sum((1, 2), keepdim=True) / 10 + 1e-6)
)
case("not rms: sum in half", {"rms_norm": 0, "sum_of_mean": 0}, X.to(BF))(
    lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) / 10 + 1e-6)
)
case("rms: length", {"rms_norm_length": 1}, X, W)(lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 10**-0.5) * w)
case("rms: length by root", {"rms_norm_length": 1}, X)(lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / math.sqrt(10)))
case("rms: squared length", {"rms_norm": 1}, X, W)(
    lambda x, w: x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / 10 + 1e-6) * w
)
case("rms: squared length, no keepdim", {"rms_norm": 1}, X)(lambda x: x * torch.rsqrt(x.norm(dim=-1) ** 2 / 10 + 1e-6)[..., None])
NO_LENGTH = {"rms_norm_length": 0, "rms_norm": 0}
LENGTH = {"rms_norm_length": 1}
case("rms: length and eps", LENGTH, X, W)(lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 10**-0.5 + 0.3) * w)
case("rms: length of another size", LENGTH, X, W)(lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 3**-0.5 + 0.3) * w)
case("rms: bare length", LENGTH, X)(lambda x: x / x.norm(dim=-1, keepdim=True))
case("rms: unit length", LENGTH, X)(lambda x: F.normalize(x, dim=-1, eps=1.0))
case("rms: unit length by a weight", LENGTH, X, W)(lambda x, w: F.normalize(x, dim=-1) * 10**0.5 * w)
case("rms: unit length of heads", LENGTH, randn(2, 3, 4, 5))(lambda x: F.normalize(x, dim=-1))
case("not rms: unit length of another dimension", NO_LENGTH, CUBE)(lambda x: F.normalize(x, dim=1))
case("not rms: unit length by sizes", NO_LENGTH, X)(lambda x: F.normalize(x, p=1.0, dim=-1))
case("not rms: length that is at most a number", NO_LENGTH, X)(lambda x: x / x.norm(dim=-1, keepdim=True).clamp(max=1.0))
case("not rms: length between two numbers", NO_LENGTH, X)(lambda x: x / x.norm(dim=-1, keepdim=True).clamp(1.0, 2.0))
case("not rms: length and a tensor", NO_LENGTH, X, randn(1).abs())(lambda x, e: x / (x.norm(dim=-1, keepdim=True) + e))
case("not rms: length in the middle of a cube", NO_LENGTH, CUBE)(lambda x: x / x.norm(dim=-1)[:, None])
case("not rms: length of another dimension", NO_LENGTH, CUBE)(lambda x: x / (x.norm(dim=1, keepdim=True) * 4**-0.5))
case("not rms: sum of sizes", NO_LENGTH, X)(lambda x: x / (x.norm(1, dim=-1, keepdim=True) * 10**-0.5))
case("not rms: squared sum of sizes", NO_LENGTH, X)(lambda x: x * torch.rsqrt(x.norm(1, dim=-1, keepdim=True) ** 2 / 10 + 1e-6))
case("not rms: length in half", {**NO_LENGTH, "squared_length": 0}, X.to(BF))(
    lambda x: x * torch.rsqrt(x.norm(dim=-1, keepdim=True) ** 2 / 10 + 1e-6)
)
case("not rms: length of something else", NO_LENGTH, X, randn(2, 3, 10))(lambda x, y: x / (y.norm(dim=-1, keepdim=True) * 10**-0.5))
OF_SUM = {"norm_of_sum": 1, "rms_norm": 1}
case("rms: of a sum", OF_SUM, X, W)(lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 0.3) * w)
case("rms: of a sum, divided", OF_SUM, X)(lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 0.3))
case("rms: of a sum, beside", OF_SUM, X)(lambda x: x / (torch.sqrt((x * x).sum(-1, keepdim=True)) + 0.3))
case("rms: of a sum, no eps, no keepdim", OF_SUM, X)(lambda x: x / (x * x).sum(-1).sqrt()[..., None])
case("rms: of a sum, cast", OF_SUM, X.to(BF))(lambda x: (lambda y: y * torch.rsqrt(y.pow(2).sum(-1, True) + 0.3))(x.float()).to(BF))
NOT_OF_SUM = {"norm_of_sum": 0, "rms_norm": 0}
case("not rms: of another sum", NOT_OF_SUM, CUBE)(lambda x: x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + 0.3))
case("not rms: of a sum of something else", NOT_OF_SUM, X, randn(2, 3, 10))(
    lambda x, y: x * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 0.3)
)
case("not rms: of a sum in half", NOT_OF_SUM, X.to(BF))(lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 0.3))
case("not rms: of a sum of cubes", NOT_OF_SUM, X)(lambda x: x * torch.rsqrt(x.abs().pow(3).sum(-1, keepdim=True) + 0.3))
case("rms: eps beside the root", {"rms_norm": 1}, X, W)(lambda x, w: w * (x / ((x * x).mean(-1, keepdim=True).sqrt() + 0.3)))
case("rms: eps beside the root, cast", {"rms_norm": 1}, X.to(BF), W.to(BF))(
    lambda x, w: w * (lambda y: y / (y.pow(2).mean(-1, keepdim=True).sqrt() + 0.3))(x.float()).to(BF)
)
case("not rms: a tensor beside the root", {"rms_norm": 0}, X, randn(1).abs())(lambda x, e: x / ((x * x).mean(-1, keepdim=True).sqrt() + e))
case("not rms: eps under and beside the root", {"rms_norm": 0}, X)(lambda x: x / (((x * x).mean(-1, keepdim=True) + 0.1).sqrt() + 0.3))
case("not rms: offset added in half", {"rms_norm": 1}, X.to(BF), W.to(BF))(lambda x, w: (rms(x.float(), 1.0) * (1.0 + w)).to(BF))
case("not rms: other axis", {"rms_norm": 0}, randn(2, 10, 10), W)(lambda x, w: rms(x, w, dim=1))
case("not rms: mean of another tensor", {"rms_norm": 0}, X, X + 1)(lambda x, y: x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
case("not rms: cube", {"rms_norm": 0}, X.abs())(lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))
case("not rms: eps is a tensor", {"rms_norm": 0}, X, randn(1).abs())(lambda x, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e))
case("not rms: alpha", {"rms_norm": 0}, X)(lambda x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=2)))
case("rms of half without its fp32 weight", {"rms_norm": 1}, X.to(BF), W)(lambda x, w: rms(x.float(), 1.0).to(BF) * w)
case("rms of fp32 whose weight is of another size", {"rms_norm": 1}, X, randn(3, 1))(rms)


@pytest.mark.parametrize("dtype", [torch.float32, BF])
def test_torchs_own_rms_norm(dtype):
    norm = torch.nn.RMSNorm(10, eps=1e-6, dtype=dtype)
    gm, context = aten_graphs.aten_graph(norm, X.to(dtype))
    normalise(gm, context)
    recognise(gm, context)
    check_graph(gm, "aten", context.fake_mode)
    assert aten_graphs.targets(gm) == ["dsi.rms_norm.default"]


@pytest.mark.parametrize("overload", [torch.ops.aten.rms_norm.default, torch.ops.aten._fused_rms_norm.default])
def test_torchs_own_rms_norm_of_fp64_is_not_rounded(overload):
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    norm = graph.call_function(overload, (x, [10], w, 1e-6))
    graph.output(norm if overload is torch.ops.aten.rms_norm.default else graph.call_function(operator.getitem, (norm, 0)))
    args = (X.double(), W.double())
    gm, context = rule_graphs.faked(graph, *args)
    recognise(gm, context)
    assert aten_graphs.targets(gm) == ["dsi.rms_norm.default"]
    torch.testing.assert_close(gm(*args), F.rms_norm(args[0], (10,), args[1], 1e-6), rtol=1e-13, atol=1e-13)


case("rms of fp32: rounding to half before the weight stays", {"rms_norm": 1}, X, W)(lambda x, w: rms(x, 1.0).to(BF) * w)


def test_rms_cast_modes_are_told_apart():
    x, w = X.to(BF), W.to(BF)
    modes = {}
    for fn in (lambda x, w: w * rms(x.float(), 1.0).to(BF), lambda x, w: rms(x.float(), w).to(BF), rms):
        gm, _ = stages(fn, x, w)
        (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsi.rms_norm.default)
        modes[node.kwargs["cast"]] = torch.equal(gm(x, w), fn(x, w))
    assert modes == {"before": True, "after": True, "none": True}


# ------------------------------------------------------------------------------------------------------------------ layer_norm


case("layer norm", {"layer_norm": 1}, X, W, B10)(lambda x, w, b: F.layer_norm(x, [10], w, b, 1e-5))
case("layer norm: no bias", {"layer_norm": 1}, X, W)(lambda x, w: F.layer_norm(x, [10], w, None, 1e-5))
case("layer norm: bare", {"layer_norm": 1}, X)(lambda x: F.layer_norm(x, [10]))
case("not layer norm: two dimensions", {"layer_norm": 0}, X)(lambda x: F.layer_norm(x, [3, 10]))
case("not layer norm: the mean is read too", {"layer_norm": 0}, X)(lambda x: torch.native_layer_norm(x, [10], None, None, 1e-5)[:2])


def spelled(x, w, b, dim=-1, correction=0):
    d = x - x.mean(dim, keepdim=True)
    return d / torch.sqrt(x.var(dim, correction=correction, keepdim=True) + 1e-5) * w + b


case("layer norm spelled: var", {"layer_norm_spelled": 1}, X, W, B10)(spelled)
case("layer norm spelled: squares", {"layer_norm_spelled": 1}, X, W, B10)(
    lambda x, w, b: (lambda d: b + w * (d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)))(x - x.mean(-1, keepdim=True))
)


case("layer norm spelled: no keepdim", {"layer_norm_spelled": 1}, X, W, B10)(
    lambda x, w, b: (x - x.mean(-1)[..., None]) / torch.sqrt(x.var(-1, unbiased=False) + 1e-5).unsqueeze(-1) * w + b
)
case("layer norm spelled: var_mean", {"layer_norm_spelled": 1}, X, W, B10)(
    lambda x, w, b: (lambda var, mean: (x - mean) * torch.rsqrt(var + 1e-5) * w + b)(*torch.var_mean(x, -1, correction=0, keepdim=True))
)
case("layer norm spelled: var_mean, unbiased", {"layer_norm_spelled": 1}, X)(
    lambda x: (lambda var, mean: (x - mean) * torch.rsqrt(var + 1e-5))(*torch.var_mean(x, -1, keepdim=True))
)
case("not layer norm: var_mean of another dimension", {"layer_norm_spelled": 0}, CUBE)(
    lambda x: (lambda var, mean: (x - mean) * torch.rsqrt(var + 1e-5))(*torch.var_mean(x, 1, correction=0, keepdim=True))
)
case("layer norm spelled: eps beside the root", {"layer_norm_spelled": 1}, X)(
    lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + 0.3)
)


def annotated(x, w, b, dim=-1, unbiased=True):
    return w * (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True, unbiased=unbiased) + 0.3) + b


case("layer norm spelled: annotated", {"layer_norm_spelled": 1}, X, W, B10)(annotated)
case("layer norm spelled: annotated, biased", {"layer_norm_spelled": 1}, X, W, B10)(lambda x, w, b: annotated(x, w, b, unbiased=False))
case("layer norm spelled: annotated, the weight after", {"layer_norm_spelled": 1}, X, W, B10)(
    lambda x, w, b: w * ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.3)) + b
)
case("layer norm spelled: annotated, a weight a head", {"layer_norm_spelled": 1}, X, randn(3, 10))(lambda x, w: annotated(x, w, 0.0))
case("not layer norm: annotated over another axis", {"layer_norm_spelled": 0}, randn(2, 10, 10), W, B10)(
    lambda x, w, b: annotated(x, w, b, dim=1)
)
case("not layer norm: annotated of one channel", {"layer_norm_spelled": 0}, randn(2, 3, 1))(
    lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=1).nan_to_num(1.0) + 1e-5)
)
case("not layer norm: the deviation of something else", {"layer_norm_spelled": 0}, X, randn(2, 3, 10))(
    lambda x, y: (x - x.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 0.3)
)
case("not layer norm: divided by two less", {"layer_norm_spelled": 0}, X)(
    lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=2, keepdim=True) + 0.3)
)
case("not layer norm: eps of each row", {"layer_norm_spelled": 0}, X, randn(3, 1).abs())(
    lambda x, e: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + e)
)
case("layer norm spelled: unbiased, no keepdim", {"layer_norm_spelled": 1}, X)(
    lambda x: (x - x.mean(-1)[..., None]) / torch.sqrt(x.var(-1) + 1e-5).unsqueeze(-1)
)


def spelled_in_float(x, w, b):
    wide = x.float()
    d = wide - wide.mean(-1, keepdim=True)
    return (d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)).to(BF) * w + b


case("layer norm spelled: cast", {"layer_norm_spelled": 1}, X.to(BF), W.to(BF), B10.to(BF))(spelled_in_float)
case("layer norm spelled: unbiased", {"layer_norm_spelled": 1}, X, W, B10)(lambda x, w, b: spelled(x, w, b, correction=1))
case("not layer norm: other axis", {"layer_norm_spelled": 0}, randn(2, 10, 10), W, B10)(lambda x, w, b: spelled(x, w, b, dim=1))


# ---------------------------------------------------------------------------------------------------------------------- linear


W2, V2, B7 = randn(7, 10), randn(10, 7), randn(7)


PROJECTIONS = {
    "bld,dhk->blhk": (10, 3, 4),
    "bld,hkd->blhk": (3, 4, 10),
    "bld,hkd->bhlk": (3, 4, 10),
    "bld,dn->bln": (10, 7),
    "bld,nd->bln": (7, 10),
    "ldb,ld->bl": None,
}


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("equation", PROJECTIONS)
def test_projections_by_einsum(equation, batch):
    shape = PROJECTIONS[equation]
    args = (randn(batch, 3, 10), randn(*shape)) if shape else (randn(3, 10, batch), randn(3, 10))
    gm, _ = stages(lambda x, w: torch.einsum(equation, x, w), *args)
    linears = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.linear.default]
    assert len(linears) == (shape is not None), "the last one sums one dimension of a batch"
    if shape:
        assert "clone" not in " ".join(aten_graphs.targets(gm)) or equation == "bld,hkd->bhlk", "no weight is moved"


@pytest.mark.parametrize(("equation", "shape"), [("blhk,nhk->bln", (7, 3, 4)), ("blkh,nkh->bln", (7, 3, 4)), ("blhd,hdn->bln", (3, 4, 7))])
def test_output_projections_by_einsum_sum_in_the_order_of_the_weight(equation, shape):
    x, w = randn(2, 5, 3, 4), randn(*shape)
    gm, _ = stages(lambda x, w: torch.einsum(equation, x, w), x, w)
    (linear,) = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.linear.default]
    assert linear.args[0].op == "placeholder" or linear.args[0].args[0].op == "placeholder", "nor is x"
    assert "clone" not in " ".join(aten_graphs.targets(gm))


W1, B12 = randn(12, 10, 1), randn(12)


def rows_first(convolution):
    return lambda x, *weights: convolution(x.transpose(1, 2), *weights).transpose(1, 2)


case("a convolution of rows is a linear", {"pointwise_convolution": 1}, X, W1, B12)(rows_first(F.conv1d))
case("two of them, with an activation", {"pointwise_convolution": 2, "turned_activation": 1}, X, W1, randn(5, 12, 1))(
    rows_first(lambda x, w, v: F.conv1d(F.gelu(F.conv1d(x, w)), v))
)
case("a convolution of channels that lie last", {"pointwise_convolution": 1}, randn(2, 3, 5, 10), W1[..., None], B12)(
    lambda x, w, b: F.conv2d(x.permute(0, 3, 1, 2), w, b)
)
case("no linear: channels first in memory", {"pointwise_convolution": 0}, X, randn(4, 3, 1))(F.conv1d)
case("no linear: three entries", {"pointwise_convolution": 0}, X, randn(4, 10, 3))(rows_first(F.conv1d))
case("no linear: groups", {"pointwise_convolution": 0}, X, randn(4, 5, 1))(rows_first(lambda x, w: F.conv1d(x, w, groups=2)))
case("no linear: every second", {"pointwise_convolution": 0}, X, W1)(rows_first(lambda x, w: F.conv1d(x, w, stride=2)))
case("no linear: padding", {"pointwise_convolution": 0}, X, W1)(rows_first(lambda x, w: F.conv1d(x, w, padding=1)))
case("no linear: transposed", {"pointwise_convolution": 0}, X, randn(10, 4, 1))(rows_first(F.conv_transpose1d))
case("not there and back", {"turned_activation": 0}, randn(3, 3, 3))(lambda x: x.permute(1, 2, 0).relu().permute(1, 2, 0))


def test_a_product_a_head_is_no_linear():
    x, w = randn(2, 5, 3, 4), randn(3, 4, 6)
    gm, context = stages(lambda x, w: torch.einsum("blhd,hde->blhe", x, w), x, w)
    assert context.report.hits["linear_of_one"] == 0 and "aten.bmm.default" in aten_graphs.targets(gm)


case("linear: addmm as Conv1D", {"linear_flattened": 1}, X, V2, B7)(lambda x, w, b: torch.addmm(b, x.view(-1, 10), w).view(2, 3, 7))
case("linear: mm of a transposed weight", {"linear": 1}, X[0], W2)(lambda x, w: x @ w.T)
case("linear: mm as stored", {"linear": 1}, X[0], V2)(lambda x, w: x @ w)
case("linear: matmul, 3-D", {"linear_flattened": 1}, X, W2)(lambda x, w: x @ w.t())
case("linear: matmul of what cannot be flattened", {"linear_batched": 1}, randn(2, 10, 3), W2)(lambda x, w: x.transpose(1, 2) @ w.T)
case("linear: an activation next to it", {"linear": 1}, X[0], W2)(lambda x, w: torch.relu(x @ w.T))
case("linear: regrouped by the view before", {"linear": 1}, randn(2, 5, 6), randn(10, 7))(lambda x, w: x.view(6, 10) @ w)
case("not linear: alpha", {"linear": 0}, X[0], V2, B7)(lambda x, w, b: torch.addmm(b, x, w, alpha=2))
case("not linear: beta", {"linear": 0}, X[0], V2, B7)(lambda x, w, b: torch.addmm(b, x, w, beta=0.5))
case("not linear: bias a row", {"linear": 0}, X[0], V2, randn(3, 1))(lambda x, w, b: torch.addmm(b, x, w))
case("not linear: integers", {"linear": 0}, torch.arange(6).view(2, 3), torch.arange(12).view(3, 4))(lambda x, w: x @ w)
case("not linear: one row of weights repeated along K", {"linear_batched": 0}, X, randn(1, 7))(
    lambda x, w: torch.bmm(x, w.expand(2, 10, 7))
)
case("not linear: a batch of weights", {"linear_batched": 0}, X, randn(2, 10, 7))(lambda x, w: x @ w)


def test_linear_keeps_the_leading_dimensions():
    for fn, args in (
        (lambda x, w, b: torch.addmm(b, x.view(-1, 10), w).view(2, 3, 7), (X, V2, B7)),
        (lambda x, w: (x @ w.T).view(2, 3, 7, 1), (X, W2)),
    ):
        gm, _ = stages(fn, *args)
        (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsi.linear.default)
        assert node.args[0].meta["val"].shape == (2, 3, 10)


def test_linear_with_a_view_that_merges_heads_before_it():
    heads, w = randn(2, 5, 3, 2), randn(10, 7)
    gm, context = stages(lambda x, w: (x.transpose(1, 2).reshape(2, 3, 10).reshape(6, 10) @ w).view(2, 3, 7), heads, w)
    assert context.report.hits["linear_flattened"] == 1
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsi.linear.default)
    assert node.args[0].meta["val"].shape == (2, 3, 10)


def test_a_norm_that_fp64_is_rounded_for_stays_in_fp32():
    gm, _ = stages(lambda x: spelled(x.float(), torch.ones(10), torch.zeros(10)).double(), X.double())
    norms = [n for n in gm.graph.nodes if n.target is torch.ops.dsi.layer_norm.default]
    assert all(n.meta["val"].dtype == torch.float32 for n in norms)
    x = 1 + 1e-8 * X.double()  # all the same in fp32
    gm, _ = stages(lambda x: spelled_without_weight(x.float()).double(), x)
    assert not gm(x).any()


def test_a_weight_of_fp64_that_is_rounded_to_fp32_stays_so():
    args = (X.double(), W.double() / 3, B10.double())
    gm, _ = stages(lambda x, w, b: spelled(x, w.float(), b), *args)
    torch.testing.assert_close(gm(*args), spelled(args[0], args[1].float(), args[2]), rtol=1e-12, atol=1e-12)


def spelled_without_weight(x):
    d = x - x.mean(-1, keepdim=True)
    return d / torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-30)


# ----------------------------------------------------------------------------------------------------------------- activations


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def bloom_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


GELUS = {
    "gelu_erf": [
        F.gelu,
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * (x * (torch.erf(x * 0.7071067811865476) + 1)),
    ],
    "gelu_tanh": [lambda x: F.gelu(x, approximate="tanh"), gelu_new, bloom_gelu],
    "gelu_quick": [lambda x: x * torch.sigmoid(1.702 * x), lambda x: torch.sigmoid(x * 1.702) * x],
}


@pytest.mark.parametrize("kind", GELUS)
def test_gelu_by_kind(kind):
    for spelling in GELUS[kind]:
        gm, context = stages(lambda x, spelling=spelling: spelling(x), X)
        assert context.report.hits["gelu"] == 1
        (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
        assert node.args[1] == kind


case("not gelu: other cube factor", {"gelu": 0}, X)(lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.0447 * x.pow(3)))))
case("not gelu: other root", {"gelu": 0}, X)(lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3)))))
case("gelu: fp64 with all digits", {"gelu": 1}, X.double())(lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))))
case("not gelu: fp64 with the digits of fp32", {"gelu": 0}, X.double())(lambda x: bloom_gelu(x))
case("not gelu: other half", {"gelu": 0}, X)(lambda x: 0.4 * x * (1.0 + torch.erf(x / math.sqrt(2.0))))
case("not gelu: quick of another tensor", {"gelu": 0}, X, X + 1)(lambda x, y: y * torch.sigmoid(1.702 * x))
case("silu: operator", {"silu": 1}, X)(lambda x: F.silu(x))
case("silu: product", {"silu": 1, "gelu": 0}, X)(lambda x: torch.sigmoid(x) * x)
case("not silu: sigmoid of another tensor", {"silu": 0}, X, X + 1)(lambda x, y: torch.sigmoid(x) * y)
case("relu", {"relu": 1}, X)(lambda x: torch.relu(x))
case("relu squared", {"relu": 1}, X)(lambda x: torch.relu(x).pow(2))
case("not an activation: integers", {"relu": 0}, torch.arange(-3, 3))(lambda x: torch.relu(x))
case("tanh", {"tanh": 1}, X)(lambda x: torch.tanh(x))
case("gated: silu", {"gated": 1}, X, X + 1)(lambda g, u: u * F.silu(g))
case("gated: gelu", {"gated": 1}, X, X + 1)(lambda g, u: gelu_new(g) * u)
case("not gated: broadcast", {"gated": 0}, X, W)(lambda g, u: u * F.silu(g))
case("not gated: mixed dtypes", {"gated": 0}, X.to(BF), X + 1)(lambda g, u: u * F.silu(g))


def both(g, u):
    a = F.silu(g)
    return u * a, a.cos()


case("not gated: the activation is read too", {"gated": 0}, X, X + 1)(both)


# ------------------------------------------------------------------------------------------------------------------------ rope


Q = randn(2, 3, 5, 8)
COS, SIN = randn(2, 5, 8), randn(2, 5, 8)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


case("rope: half", {"rope": 1}, Q, COS, SIN)(lambda q, c, s: q * c.unsqueeze(1) + rotate_half(q) * s.unsqueeze(1))
case("rope: half, commuted", {"rope": 1}, Q, COS, SIN)(lambda q, c, s: s[:, None] * rotate_half(q) + c[:, None] * q)
case("rope: half by chunks", {"rope": 1}, Q, COS, SIN)(
    lambda q, c, s: q * c[:, None] + torch.cat([-q.chunk(2, -1)[1], q.chunk(2, -1)[0]], -1) * s[:, None]
)
case("rope: interleaved", {"rope": 1}, Q, COS, SIN)(lambda q, c, s: q * c[:, None] + rotate_pairs(q) * s[:, None])
case("rope: of a transposed value", {"rope": 1}, randn(2, 5, 3, 8), COS, SIN)(
    lambda q, c, s: (lambda q: q * c[:, None] + rotate_half(q) * s[:, None])(q.transpose(1, 2))
)
case("not rope: the sign is on the other half", {"rope": 0}, Q, COS, SIN)(
    lambda q, c, s: q * c[:, None] + torch.cat((q[..., 4:], -q[..., :4]), -1) * s[:, None]
)
case("not rope: not cut in the middle", {"rope": 0}, Q, COS, SIN)(
    lambda q, c, s: q * c[:, None] + torch.cat((-q[..., 3:], q[..., :3]), -1) * s[:, None]
)
case("not rope: halves not exchanged", {"rope": 0}, Q, COS, SIN)(
    lambda q, c, s: q * c[:, None] + torch.cat((-q[..., :4], q[..., 4:]), -1) * s[:, None]
)
case("not rope: another tensor is turned", {"rope": 0}, Q, Q + 1, COS, SIN)(lambda q, p, c, s: q * c[:, None] + rotate_half(p) * s[:, None])
case("not rope: turned along another axis", {"rope": 0}, randn(2, 3, 8, 8), randn(8, 8), randn(8, 8))(
    lambda q, c, s: q * c + torch.cat((-q[:, :, 4:], q[:, :, :4]), 2) * s
)
case("not rope: difference", {"rope": 0}, Q, COS, SIN)(lambda q, c, s: q * c[:, None] - rotate_half(q) * s[:, None])
case("not rope: fp32 tables of a half value", {"rope": 0}, Q.to(BF), COS, SIN)(lambda q, c, s: q * c[:, None] + rotate_half(q) * s[:, None])
case("not rope: pairs stacked the other way", {"rope": 0}, Q, COS, SIN)(
    lambda q, c, s: q * c[:, None] + torch.stack((-q[..., 1::2], q[..., ::2]), -2).flatten(-2) * s[:, None]
)


def filled(a, b, width, order=(0, 1)):
    """What AOTAutograd makes of `whole[..., :3] = a` and `whole[..., 3:] = b`."""
    whole, n = a.new_empty(*a.shape[:-1], width), a.shape[-1]
    for part, start, end in ((a, 0, n), (b, n, 2**63 - 1))[:: 1 if order == (0, 1) else -1]:
        whole = whole.slice_scatter(torch.ops.aten.copy(whole[..., start:end], part), 2, start, end)
    return whole


A3, B5 = randn(2, 4, 3), randn(2, 4, 5)
case("filled parts", {"filled_parts": 1}, A3, B5)(lambda a, b: filled(a, b, 8) * 2)
case("filled parts, the last first", {"filled_parts": 1}, A3, B5)(lambda a, b: filled(a, b, 8, (1, 0)) * 2)
case("filled parts: one is repeated", {"filled_parts": 1}, A3, B5)(lambda a, b: filled(a, b[..., :1], 8) * 2)
case("not filled parts: some entries stay", {"filled_parts": 0}, A3, B5, randn(2, 4, 9))(
    lambda a, b, x: x.slice_scatter(a, 2, 0, 3).slice_scatter(b, 2, 3, 8)
)


def parts(a, b, c, s):
    return a * c - b * s, b * c + a * s


C4, S4 = randn(2, 1, 5, 4), randn(2, 1, 5, 4)
case("rope by parts: halves", {"rope_parts": 1}, Q, C4, S4)(lambda q, c, s: torch.cat(parts(*q.chunk(2, -1), c, s), -1))
case("rope by parts: pairs", {"rope_parts": 1}, Q, C4, S4)(
    lambda q, c, s: torch.stack(parts(q[..., ::2], q[..., 1::2], c, s), -1).flatten(-2)
)
case("rope by parts: pairs of a view", {"rope_parts": 1}, Q, C4, S4)(
    lambda q, c, s: torch.stack(parts(*q.reshape(2, 3, 5, 4, 2).unbind(-1), c, s), -1).flatten(3)
)
case("not rope by parts: turned the other way", {"rope_parts": 0}, Q, C4, S4)(
    lambda q, c, s: (lambda a, b: torch.cat([a * c + b * s, b * c - a * s], -1))(*q.chunk(2, -1))
)
case("not rope by parts: halves joined as pairs", {"rope_parts": 0}, Q, C4, S4)(
    lambda q, c, s: torch.stack(parts(*q.chunk(2, -1), c, s), -1).flatten(-2)
)
case("not rope by parts: a table an entry", {"rope_parts": 0}, Q[..., :1, :2], randn(2, 1, 5, 4), randn(2, 1, 5, 4))(
    lambda q, c, s: torch.cat(parts(*q.chunk(2, -1), c, s), -1)
)


def partial(q, c, s, turn=rotate_half, r=8, after=8):
    head = q[..., :r]
    return torch.cat([head * c[:, None] + turn(head) * s[:, None], q[..., after:]], -1)


LONG = randn(2, 3, 5, 13)
case("partial rope: half", {"rope": 1, "partial_rope": 1}, LONG, COS, SIN)(partial)
case("partial rope: interleaved", {"rope": 1, "partial_rope": 1}, LONG, COS, SIN)(lambda q, c, s: partial(q, c, s, rotate_pairs))
case("not partial rope: the tail starts later", {"rope": 1, "partial_rope": 0}, LONG, COS, SIN)(lambda q, c, s: partial(q, c, s, after=9))


def tail_of_another(q, p, c, s):
    head = q[..., :8]
    return torch.cat([head * c[:, None] + rotate_half(head) * s[:, None], p[..., 8:]], -1)


case("not partial rope: the tail of another tensor", {"rope": 1, "partial_rope": 0}, LONG, LONG + 1, COS, SIN)(tail_of_another)


# ------------------------------------------------------------------------------------------------------------------- KV writes


CACHE, POS, NEW = randn(2, 3, 7, 4), torch.tensor([4, 1]), randn(2, 3, 2, 4)


def put(cache, pos, new, index=(None, None)):
    return torch.ops.aten.index_put(cache, [*index, pos], new)


case("kv write: index_copy", {"kv_write": 1}, CACHE, POS, NEW)(lambda c, p, n: torch.index_copy(c, 2, p, n))
case("kv write: index_put", {"kv_write": 1}, CACHE, POS, NEW)(put)
case("kv write: scattered", {"scattered_rows": 1, "kv_write": 1}, CACHE, POS, NEW)(
    lambda c, p, n: c.scatter(2, p.view(1, 1, -1, 1).expand_as(n), n)
)
case("kv write: keys and values are scattered", {"scattered_rows": 2, "kv_write": 2}, CACHE, POS[:, None], NEW)(
    lambda c, p, n: (c.scatter(-2, p.expand(2, 3, 2, 4), n), (c * 2).scatter(-2, p.expand(2, 3, 2, 4), n))
)
case("not scattered rows: a position a sequence", {"scattered_rows": 0}, CACHE, POS, NEW[:, :, :1])(
    lambda c, p, n: c.scatter(2, p.view(2, 1, 1, 1).expand_as(n), n)
)
case("not scattered rows: a part of each", {"scattered_rows": 0}, CACHE, POS, NEW[..., :3])(
    lambda c, p, n: c.scatter(2, p.view(1, 1, -1, 1).expand_as(n), n)
)
case("not scattered rows: added", {"scattered_rows": 0}, CACHE, POS, NEW)(
    lambda c, p, n: c.scatter_add(2, p.view(1, 1, -1, 1).expand_as(n), n)
)


def layers(cache, pos, new, read=0):
    """A write into one of two layers that lie in one tensor, one into the other, and both read."""
    first = cache[0].index_copy(1, pos, new[0])
    cache = torch.select_scatter(cache, first, 0, 0)
    second = torch.slice_scatter(cache[1], cache[read] * 2, 1, 0)
    cache = torch.select_scatter(cache, second, 0, -1)
    return cache, cache[0] + cache[1], cache[-2, :, 1:2]


case("written part: of two layers", {"written_part": 5, "kv_write": 1}, CACHE, POS, NEW)(layers)
case("written part: the other layer is read", {"written_part": 5, "kv_write": 1}, CACHE, POS, NEW)(lambda *args: layers(*args, read=1))
case("written part: slices", {"written_part": 3}, X, randn(1, 3, 10))(
    lambda x, a: (lambda y: (y[1:].cos(), y[:1].sin(), y[0:1].exp()))(torch.slice_scatter(x, a, 0, 1, 5))
)
case("not a written part: more is read", {"written_part": 0}, X, randn(2, 2, 10))(
    lambda x, a: (lambda y: (y[:, :2].cos(), y[:, 2:].sin(), y[:, ::2].exp()))(torch.slice_scatter(x, a, 1, 1, 3))
)
case("not a written part: another dimension", {"written_part": 0}, X, randn(2, 10))(lambda x, a: torch.select_scatter(x, a, 1, 0)[0].cos())
case("not kv write: broadcast values", {"kv_write": 0}, CACHE, POS, randn(2, 1))(put)
case("not kv write: accumulated", {"kv_write": 0}, CACHE, POS, NEW)(lambda c, p, n: torch.ops.aten.index_put(c, [None, None, p], n, True))
case("not kv write: two index tensors", {"kv_write": 0}, CACHE, POS, randn(2, 3, 4))(
    lambda c, p, n: torch.ops.aten.index_put(c, [None, p % 3, p], n[:, 0, None, :].expand(2, 2, 4).clone())
)
case("not kv write: a matrix of positions", {"kv_write": 0}, CACHE, torch.tensor([[4, 1]]), randn(2, 3, 1, 2, 4))(put)
case("not kv write: a bool mask", {"kv_write": 0}, CACHE, torch.arange(7) > 4, NEW)(put)


def test_positions_on_another_device_are_left_to_indexing():
    graph = torch.fx.Graph()
    cache, pos, new = (graph.placeholder(name) for name in ("cache", "pos", "new"))
    graph.output(graph.call_function(torch.ops.aten.index_put.default, (cache, [None, None, pos], new)))
    gm, context = rule_graphs.faked(graph, CACHE.to("meta"), POS, NEW.to("meta"))
    recognise(gm, context)
    assert aten_graphs.targets(gm) == ["aten.index_put.default"]


case("embedding", {"embedding": 1}, randn(9, 4), torch.tensor([[3, 8], [0, 1]]))(lambda t, i: F.embedding(i, t, padding_idx=0))


# ------------------------------------------------------------------------------------------------------------------- normalise


case("cast there and back", {"cast_chain": 1, "no_op_cast": 0}, X.to(BF))(lambda x: x.float().to(BF).cos())
case("not a cast chain: it rounds", {"cast_chain": 0}, X)(lambda x: x.to(BF).float().cos())
case("x * 1", {"neutral_element": 1}, X)(lambda x: (x * 1.0).cos())
case("integers + 0", {"neutral_element": 1}, torch.arange(6))(lambda x: (x + 0) * 2)
case("not neutral: floats + 0", {"neutral_element": 0}, X)(lambda x: (x + 0).cos())
case("not neutral: integers * 1.0", {"neutral_element": 0}, torch.arange(6))(lambda x: (x * 1.0).cos())
case("no-op view", {"no_op_view": 1}, X)(lambda x: x.view(2, 3, 10).cos())
case("no-op slice", {"no_op_view": 1}, X)(lambda x: torch.ops.aten.slice(x, 1, 0, 9).cos())
case("not a no-op: a square transposed", {"no_op_view": 0}, randn(5, 5))(lambda x: x.t().cos())
case("not a no-op: shifted", {"no_op_view": 0}, X)(lambda x: x[:, 1:].cos())
case("outer product: bmm", {"outer_product": 1}, randn(4), torch.arange(3).view(1, 3))(
    lambda f, p: (f[None, :, None].expand(1, -1, 1).float() @ p[:, None, :].float()).transpose(1, 2)
)
case("not an outer product: K = 2", {"outer_product": 0}, randn(2, 4, 2), randn(2, 2, 3))(lambda a, b: a @ b)
case("split", {"split_spelling": 3}, X)(lambda x: [p.cos() for p in x.split([2, 3, 5], -1)])
case("chunk", {"split_spelling": 2}, X)(lambda x: [p.cos() for p in x.chunk(2, -1)])
case("unbind", {"split_spelling": 3}, X)(lambda x: [p.cos() for p in x.unbind(1)])


def test_minus_zero_survives():
    minus = torch.tensor([-0.0, 0.0])
    for fn in (lambda x: x * 1.0 * 2, lambda x: (x + 0) * 2, lambda x: (x - 0) * 2):
        gm, _ = stages(fn, minus)
        assert torch.equal(torch.signbit(gm(minus)), torch.signbit(fn(minus)))


def test_the_copy_behind_dropout_goes_and_returned_copies_stay():
    gm, _ = stages(lambda x: (F.dropout(x, 0.1, training=False).cos(), x.clone()), X)
    assert aten_graphs.targets(gm) == ["aten.cos.default", "aten.clone.default"]


def test_a_layout_that_a_copy_makes_is_kept():
    gm, _ = stages(lambda x: x.transpose(1, 2).contiguous().view(2, 30) * 2, X)
    assert "aten.clone.default" in aten_graphs.targets(gm)


@pytest.mark.parametrize("size", [(2, 3, 10), (5, 7, 10)])
def test_symbolic_sizes(size):
    def fn(x, w, v, b):
        y = rms(x, w)
        return torch.addmm(b, y.view(-1, y.size(-1)), v).view(*y.shape[:-1], 7)

    x = randn(*size)
    gm, context = stages(fn, x, W, V2, B7, symbolic=True)
    assert (context.report.hits["rms_norm"], context.report.hits["linear_flattened"]) == (1, 1)
    other = randn(3, 11, 10)
    torch.testing.assert_close(gm(other, W, V2, B7), fn(other, W, V2, B7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "number",
    [
        lambda x: torch.full([], 2.0, dtype=x.dtype),
        lambda x: torch.ops.aten.scalar_tensor(2.0, dtype=x.dtype),
    ],
)
def test_a_constant_tensor_without_dimensions_is_a_number(number):
    query, key, value = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4)
    gm, context = stages(lambda q, k, v: (q @ k.mT / number(q)).softmax(-1) @ v, query, key, value)
    assert context.report.hits["attention"] == 1
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.dsi.attention.default)
    assert node.kwargs["scale"] == 0.5


def test_a_tensor_with_one_element_is_no_number():
    _, context = stages(lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps[0]), X, torch.tensor([1e-6]))
    assert context.report.hits["rms_norm"] == 0
    query, key, value = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4)
    _, context = stages(lambda q, k, v: (q @ k.mT / q[0, 0, 0, 0].abs()).softmax(-1) @ v, query, key, value)
    assert context.report.hits["scaled_queries"] == context.report.hits["attention"] == 1
