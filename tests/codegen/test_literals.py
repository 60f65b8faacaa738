"""What is contracted, summed or normalised may be one number throughout (`zeros_like`, `ones`, `full`): it is a tile like any other."""

from __future__ import annotations

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.devices import H200
from dsi.ir.analysis import kernel_spec, plan_region
from dsi.ir.tolerances import disagreement

from bench import audit
from tests.ir.bodies import body_of, dsi

from .support import execute


def seeded(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).half()


def choice(schedule: str) -> Choice:
    return Choice(schedule, None, 4 if schedule == "gemv" else 16, 16, 16, 16, 4, 1)


ROWS = (seeded(3, 20), seeded(24, 20))
HEADS = (seeded(1, 2, 3, 16), seeded(1, 2, 5, 16))
CASES = {
    **{
        f"linear, {schedule}": (lambda x, w: dsi.linear(torch.ones_like(x), w, None), ROWS, choice(schedule))
        for schedule in ("gemv", "skinny", "tiled")
    },
    "a norm before a linear": (
        lambda x, w: dsi.linear(dsi.layer_norm(torch.full_like(x, 0.5), None, None, eps=1e-5) + 1, w, None),
        ROWS,
        choice("tiled"),
    ),
    "what is not finite": (lambda x, w: dsi.linear(torch.full_like(x, float("inf")), w, None), ROWS, choice("tiled")),
    "a norm": (lambda x, w: dsi.layer_norm(torch.ones_like(x), None, None, eps=1e-5) + x, ROWS, None),
    "a root mean square": (lambda x, w: dsi.rms_norm(torch.full_like(x, 3), None, eps=1e-5) + x, ROWS, None),
    "a norm in several steps": (
        lambda x, w: dsi.layer_norm(torch.ones_like(x), None, None, eps=1e-5) + x,
        ROWS,
        Choice("row", None, 2, 16, 0, 0, 4, 1),
    ),
    "queries": (lambda q, k: dsi.attention(torch.ones_like(q), k, k, None, None, scale=1.0), HEADS, None),
    "keys": (lambda q, k: dsi.attention(q, torch.zeros_like(k), k, None, None, scale=1.0), HEADS, None),
    "values": (lambda q, k: dsi.attention(q, k, torch.ones_like(k), None, None, scale=1.0), HEADS, None),
}


def kernel_of(name: str):
    function, inputs, wanted = CASES[name]
    body = body_of(function, inputs)
    spec = kernel_spec("literal", body, plan_region(body))
    return spec, generate(spec, wanted, H200)[0]


@pytest.mark.parametrize("name", CASES)
def test_numbers(name, interpreter):
    function, inputs, _ = CASES[name]
    _, kernel = kernel_of(name)
    expected = function(*inputs)
    (got,) = execute(kernel, list(inputs), [torch.empty_like(expected)], int, interpreter)
    assert not (difference := disagreement(got, expected)), f"{difference}\n{kernel.source}"


@pytest.mark.parametrize("name", CASES)
def test_triton_compiles_them(name):
    spec, kernel = kernel_of(name)
    for found in audit.looked_at(spec, kernel, H200.capability):
        assert not found.problem, f"{found.problem}\n{kernel.source}"
