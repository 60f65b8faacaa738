"""Complex arithmetic in reals: rotary embedding spelled in complex numbers becomes rope, and what is not known stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from dsi.compiler.observe import collecting

B, S, H, D = 2, 5, 3, 8
W = torch.randn(H * D, 12, generator=torch.Generator().manual_seed(1))
X = torch.randn(B, S, 12, generator=torch.Generator().manual_seed(2))
ANGLES = torch.rand(1, 16, D // 2, generator=torch.Generator().manual_seed(3)) * 6


def turned(q, table):
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(q)


def heads(x, w):
    return F.linear(x, w).view(B, -1, H, D)


def computed(x, w, angles):
    table = torch.polar(torch.ones_like(angles), angles) * 0.5
    return turned(heads(x, w), table[:, : x.shape[1], None])


def transposed(x, w, angles):
    table = torch.polar(torch.ones_like(angles), angles)[:, : x.shape[1]].unsqueeze(1)
    return turned(heads(x, w).transpose(1, 2), table)


def held(x, w, table):
    return turned(heads(x, w), table[:, : x.shape[1]].unsqueeze(-2))


def compiled(function, *args, dynamic=False):
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 1)
    with torch.no_grad(), collecting() as contexts:
        got = torch.compile(function, backend="dsi", options={"executor": "reference"})(*args)
    (context,) = contexts
    return got, context.report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [computed, transposed, held])
def test_rope_in_complex_numbers(function, dynamic, dtype):
    table = torch.polar(torch.ones_like(ANGLES), ANGLES) if function is held else ANGLES
    x, w = X.clone().to(dtype), W.to(dtype)
    got, report = compiled(function, x, w, table, dynamic=dynamic)
    wanted = function(x, w, table)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    assert report.hits["complex_in_reals"] == report.hits["rope_parts"] == 1 and not report.notes
    left = [refusal.reason for refusal in report.unfused]
    assert all("view_as_real_copy" in reason for reason in left) and len(left) == (function is held), left


def test_a_product_of_three_and_of_a_real():
    def function(x, w, angles):
        table = torch.polar(torch.ones_like(angles), angles)[:, : x.shape[1], None]
        pairs = torch.view_as_complex(heads(x, w).reshape(B, S, H, -1, 2)) * table * x[..., :1, None] * table
        return torch.view_as_real(pairs)

    got, report = compiled(function, X, W, ANGLES)
    torch.testing.assert_close(got, function(X, W, ANGLES))
    assert report.hits["complex_in_reals"] == 1 and not report.unfused and not report.notes


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, c: turned(heads(x, w), c[:, :S, None].conj()),
        lambda x, w, c: torch.fft.rfft(heads(x, w)).abs(),
        lambda x, w, c: torch.view_as_real(torch.view_as_complex(heads(x, w).reshape(B, S, H, -1, 2)).exp()),
    ],
    ids=["conjugate", "fft", "exp"],
)
def test_other_complex_arithmetic_is_left_alone(function):
    table = torch.polar(torch.ones_like(ANGLES), ANGLES)
    got, report = compiled(function, X, W, table)
    assert torch.equal(got, function(X, W, table))
    assert "complex" in report.notes[0]


def test_a_complex_result():
    def function(x, w, angles):
        table = torch.polar(torch.ones_like(angles), angles)[:, : x.shape[1], None]
        pairs = torch.view_as_complex(heads(x, w).reshape(B, S, H, -1, 2)) * table
        return pairs, torch.view_as_real(pairs)

    got, _ = compiled(function, X, W, ANGLES)
    torch.testing.assert_close(got, function(X, W, ANGLES))
    assert torch.view_as_real(got[0]).data_ptr() == got[1].data_ptr(), "one is a view of the other, as in eager"


def test_a_view_that_only_the_complex_product_has_is_read_behind_it():
    """The product of a transposed value keeps its order in memory, its twin in reals does not."""

    def function(q, table):
        product = torch.view_as_complex(q).transpose(1, 2) * torch.view_as_complex(table)[None, None]
        return torch.view_as_real(product.transpose(1, 2).view(B, S, -1)).flatten(2) + 1

    q, table = torch.randn(B, S, H, D // 2, 2), torch.randn(S, D // 2, 2)
    got, _ = compiled(function, q, table)
    torch.testing.assert_close(got, function(q, table))


def test_a_scalar_of_another_precision_has_no_say_in_the_dtype():
    def function(q, scale):
        return torch.view_as_real(torch.view_as_complex(q) * scale).flatten(3) * 2

    q, scale = torch.randn(B, S, H, D // 2, 2), torch.tensor(0.3, dtype=torch.float64)
    got, report = compiled(function, q, scale)
    wanted = function(q, scale)
    assert got.dtype == wanted.dtype == torch.float32 and report.hits["complex_in_reals"] == 1
    torch.testing.assert_close(got, wanted)
