"""A device takes 65,535 programs along the second and third axis of a grid: where there are more, all lie along the first."""

from __future__ import annotations

import pytest
import sympy
import torch
from dsi.codegen import Choice, generate, grids
from dsi.codegen.devices import H200
from dsi.ir.analysis import kernel_spec, plan_region
from dsi.ir.errors import Refused
from dsi.ir.tolerances import disagreement

from bench import audit
from tests.ir.bodies import body_of, dsi

from . import plans
from .support import check, execute


def seeded(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).half()


def attention(q, k):
    return dsi.attention(q, k, k, None, None, scale=0.5)


def spec_of(function, *inputs):
    body = body_of(function, inputs)
    return kernel_spec("many", body, plan_region(body))


CASES = {
    "attention": (attention, (seeded(5, 2, 20, 16), seeded(5, 2, 7, 16)), Choice("attention", None, 16, 16, 16, 16, 4, 1)),
    "decode": (attention, (seeded(5, 2, 1, 16), seeded(5, 2, 40, 16)), Choice("attention_decode", None, 1, 16, 16, 1, 4, 1, split=2)),
    "linear": (lambda x, w: dsi.linear(x, w, None), (seeded(40, 20), seeded(50, 20)), Choice("tiled", None, 16, 16, 16, 16, 4, 1)),
    "row": (lambda x: x + 1, (seeded(3, 100),), Choice("row", None, 2, 32, 1, 1, 4, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_along_one_axis_compute_the_same(name, interpreter, monkeypatch):
    """As if a device took two along an axis."""
    function, inputs, choice = CASES[name]
    spec = spec_of(function, *inputs)
    expected = function(*inputs)
    (kernel,) = generate(spec, choice)
    monkeypatch.setattr(grids, "MOST", 1)
    (flat,) = generate(spec, choice)
    for before, after in zip(kernel.launches, flat.launches, strict=True):
        assert len(before.grid) > 1 and after.grid == (sympy.prod(before.grid),)
    (got,) = execute(flat, list(inputs), [torch.empty_like(expected)], int, interpreter)
    assert not (difference := disagreement(got, expected)), f"{difference}\n{flat.source}"


def test_sizes_that_are_not_known_may_stand_beside_those_that_are(interpreter, monkeypatch):
    monkeypatch.setattr(grids, "MOST", 1)
    case = plans.projection(torch.float16, 40, 20, 50, symbolic=True)
    choice = Choice("tiled", None, 16, 16, 16, 16, 4, 1)
    (kernel,) = generate(case.spec, choice)
    assert len(kernel.launches[-1].grid) == 1 and kernel.launches[-1].grid[0].free_symbols
    check(case, interpreter, kernel)


def test_attention_over_very_many_windows_compiles():
    with torch.device("meta"):
        q = torch.empty(70000, 2, 16, 16, dtype=torch.float16)
    spec = spec_of(attention, q, q)
    kernel = generate(spec, device=H200)[0]
    assert len(kernel.launches[0].grid) == 1
    for found in audit.looked_at(spec, kernel, H200.capability):
        assert not found.problem, f"{found.problem}\n{kernel.source}"


@pytest.mark.parametrize(
    "function, sizes, what",
    [
        (lambda x: x + 1, [(2**31 + 8,)], "columns"),
        (lambda x: x + 1, [(2**20, 2**12, 1)], "rows"),
        (lambda x, w: dsi.linear(x, w, None), [(1, 16), (2**31, 16)], "columns"),
        (attention, [(1, 1, 1, 16), (1, 1, 2**31, 16)], "keys"),
    ],
)
def test_positions_beyond_32_bits_have_no_kernel(function, sizes, what):
    """They would wrap around, and lie before the tensor."""
    with torch.device("meta"):
        inputs = [torch.empty(size, dtype=torch.float16) for size in sizes]
    with pytest.raises(Refused, match=rf"^.*\d{{10}} {what} are more than a kernel counts in 32 bits"):
        generate(spec_of(function, *inputs))
