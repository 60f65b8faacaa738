"""int8 weights on a CUDA device, through generated kernels only: the numbers of the dequantised weights, by itself and in CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from dsi.codegen.pointwise import HELPERS
from dsi.compiler.observe import collecting
from dsi.ir.quantised_ops import linear_int8_reference
from dsi.quantize.formats import Format, Grouping
from rounded import rounded
from torch import nn

import dsi
from tests.codegen.interpret import load_module

pytestmark = pytest.mark.gpu

MODES = {"kernels": {"library": False}, "graphs": {"library": False, "mode": "reduce-overhead"}}
GROUPS = {"row": ({}, Format()), "inner 32": ({"group_size": 32}, Format(Grouping("inner", 32)))}
SLACK = 1.3  # error against float64 over eager's own: two roundings of one small sample


def compiled(model, **options):
    return torch.compile(model, backend="dsi", options={"dtype": "int8", **options})


def check(found, expected, exact, dtype):
    """fp32: at most 1e-5 from the dequantised weights in eager. Half precision: no further from float64 than eager's half precision is."""
    if dtype == torch.float32:
        assert zoo.relative_error(found, expected) <= 1e-5
    else:
        assert zoo.relative_error(found, exact) <= SLACK * zoo.relative_error(expected, exact)


def ran_kernels(contexts) -> None:
    """Every region that holds an int8 linear has a kernel: none ran by references."""
    regions = [r for context in contexts for r in context.report.regions if "linear_int8" in r.label]
    assert regions and all(region.kernels for region in regions), [str(r) for c in contexts for r in c.report.unfused]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("gpt2", "llama_tied", "gpt_neox", "bloom", "gemma2"))
@pytest.mark.parametrize("rows", ((1, 1), (3, 12)), ids=("a row", "36 rows"))
def test_a_decoder_computes_with_what_int8_stands_for(name, dtype, mode, rows):
    model = zoo.decoder(name, dtype).cuda()
    half = rounded(copy.deepcopy(model))
    wide = rounded(copy.deepcopy(model).float()).double()  # from the same weights, whose int8 is the same
    ids = torch.randint(3, zoo.VOCAB, rows, generator=torch.Generator().manual_seed(7)).cuda()
    with torch.no_grad(), collecting() as contexts:
        exact, expected = (m(input_ids=ids, use_cache=False).logits for m in (wide, half))
        run = compiled(model, **MODES[mode])
        for _ in range(3):
            found = run(input_ids=ids, use_cache=False).logits
            check(found, expected, exact, dtype)
    ran_kernels(contexts)


@pytest.mark.parametrize("rows", (1, 4, 16, 64, 200))
@pytest.mark.parametrize("grouping", GROUPS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_rows_and_groups(rows, grouping, dtype):
    """A gated MLP with a norm before and a residual after, and an outlier in every row."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gate, self.up = nn.RMSNorm(160), nn.Linear(160, 208, bias=False), nn.Linear(160, 208, bias=False)
            self.down = nn.Linear(208, 160)

        def forward(self, x):
            h = self.norm(x)
            return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    options, form = GROUPS[grouping]
    model = Mlp().cuda().to(dtype).eval()
    x = torch.randn(rows, 160, device="cuda").to(dtype)
    x[:, 11] *= 30
    half, wide = rounded(copy.deepcopy(model), form), rounded(copy.deepcopy(model).float(), form).double()
    with torch.no_grad(), collecting() as contexts:
        found = compiled(model, library=False, **options)(x)
        check(found, half(x), wide(x.double()), dtype)
    ran_kernels(contexts)


@pytest.mark.parametrize("rows", (1, 16, 100))
def test_activations_in_int8(rows):
    """Both linears round their rows: the norm behind the second says that it is no head, whose input would stay as it is."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(160, 208), nn.GELU(), nn.Linear(208, 160), nn.LayerNorm(160)).cuda().half().eval()
    x = torch.randn(rows, 160, device="cuda").half()
    packed = copy.deepcopy(model)
    dsi.quantise_model(packed)

    def exact(activations: str) -> torch.Tensor:
        """In float64, rounded to fp16 where a kernel ends: steps and codes are found from what was stored."""

        def linear(h: torch.Tensor, by: nn.Module) -> torch.Tensor:
            return linear_int8_reference(h.double(), by.weight, by.scales, by.bias.double(), activations=activations)

        h = nn.functional.gelu(linear(x, packed[0])).half()
        return packed[3].double()(linear(h, packed[2]).half().double())

    with torch.no_grad(), collecting() as contexts:
        found = compiled(model, activations="int8", library=False)(x)
        wanted, plain = exact("int8"), exact("")
    ran_kernels(contexts)
    # Every entry of the result is rounded to fp16, by 2**-11 of it at most. As much again for sums in fp32 that fp16 takes the other way.
    assert zoo.relative_error(found, wanted) < 2.0**-10 < 0.1 * zoo.relative_error(plain, wanted)


WORDS = """
import triton
import triton.language as tl

{helpers}

@triton.jit
def products(one_ptr, other_ptr, total_ptr, out_ptr, DP4A: tl.constexpr):
    k = tl.arange(0, 1024)
    one, other = tl.load(one_ptr + k[None, :]), tl.load(other_ptr + k[None, :])
    fourth = tl.arange(0, 256)
    total = tl.load(total_ptr + fourth[None, :])
    tl.store(out_ptr + fourth[None, :], dot16(one, other, total, DP4A))
"""


def test_products_of_words_by_dp4a_and_without(tmp_path):
    """Random bytes, the smallest among them, which the interpreter's tests take the other way."""
    source = WORDS.format(helpers="\n\n".join(HELPERS[name][0] for name in ("dot4", "quarters", "dot16")))
    module = load_module(source, tmp_path)
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randint(-128, 128, (4096,), generator=generator).to(torch.int8) for _ in range(2))
    one[:64], other[:32] = -128, -128
    total = torch.randint(-(2**20), 2**20, (256,), generator=generator, dtype=torch.int32)
    expected = total + (one.int() * other.int()).view(256, 16).sum(1)
    for dp4a in (True, False):
        out = torch.empty(256, dtype=torch.int32, device="cuda")
        module.products[(1,)](one.cuda().view(torch.int32), other.cuda().view(torch.int32), total.cuda(), out, DP4A=dp4a, num_warps=2)
        assert torch.equal(out.cpu().long(), expected)


@torch.no_grad()
def test_recorded_graphs_see_what_becomes_of_weights():
    # Four kernels: a program of as few launches as a replay with its copies is not recorded.
    layers = [[nn.Linear(160, 208), nn.GELU(), nn.Linear(208, 160)] for _ in range(2)]
    model = nn.Sequential(*layers[0], nn.GELU(), *layers[1]).cuda().half().eval()
    x = torch.randn(2, 160, device="cuda").half()
    run = compiled(model, mode="reduce-overhead")
    with collecting() as contexts:
        run(x)
    assert not [note for context in contexts for note in context.report.notes if "launched by itself" in note]

    def agrees() -> None:
        for _ in range(3):
            found = run(x).clone()
            assert zoo.relative_error(found, rounded(copy.deepcopy(model))(x)) < 4e-3

    agrees()
    model[0].weight.mul_(3)
    agrees()
    model[2].weight = nn.Parameter(torch.randn_like(model[2].weight))
    agrees()
    model[2].weight.data.mul_(0.5)
    dsi.refresh(model)
    agrees()
