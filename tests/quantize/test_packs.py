"""Packs: made once a weight, made again when the weight changes, and gone when nobody needs them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from dsi.ir.errors import DsiError
from dsi.quantize.formats import ROW
from dsi.quantize.int8 import quantise
from dsi.runtime import packs
from torch import nn

import dsi


@pytest.fixture
def rounds(monkeypatch):
    """The names of weights in the order in which they are rounded."""
    names: list[str] = []

    def counted(weight, form, *, kn, name):
        names.append(name)
        return quantise(weight, form, kn=kn, name=name)

    monkeypatch.setattr(packs, "quantise", counted)
    return names


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def compiled(model, **options):
    return torch.compile(model, backend="dsi", options={"dtype": "int8", "executor": "reference", **options})


def expected(model, x):
    wide = [(quantise(m.weight).dequantise(), m.bias) for m in (model.up, model.down)]
    return nn.functional.linear(nn.functional.linear(x, *wide[0]).relu(), *wide[1])


@torch.no_grad()
def test_a_weight_is_rounded_once_for_all_graphs_and_calls(rounds):
    model = Two()
    run = compiled(model)
    for rows in (3, 1, 3, 7, 1):  # two graphs: one of a fixed size, one of any
        x = torch.randn(rows, 32)
        torch.testing.assert_close(run(x), expected(model, x))
    assert rounds == ["up.weight", "down.weight"]


@torch.no_grad()
def test_what_changes_a_weight_makes_its_pack_anew(rounds):
    model, x = Two(), torch.randn(3, 32)
    run = compiled(model)
    run(x)

    def changed_by(change) -> list[str]:
        del rounds[:]
        change()
        torch.testing.assert_close(run(x), expected(model, x))
        return list(rounds)

    assert changed_by(lambda: model.up.weight.mul_(2)) == ["up.weight"]
    assert changed_by(lambda: model.up.bias.mul_(2)) == []
    assert changed_by(lambda: setattr(model.up, "weight", nn.Parameter(torch.randn(48, 32)))) == ["up.weight"]
    assert changed_by(lambda: setattr(model.up.weight, "data", torch.randn(48, 32))) == ["up.weight"]
    assert changed_by(lambda: model.load_state_dict(Two().state_dict())) == ["up.weight", "down.weight"]


@torch.no_grad()
def test_other_memory_at_the_same_address_is_other_memory(rounds):
    """An allocator hands out an address again, after `model.half().float()` for one."""
    model, x, buffer = Two(), torch.randn(3, 32), np.random.default_rng(0).standard_normal((48, 32), dtype=np.float32)
    run = compiled(model)
    model.up.weight.data = torch.from_numpy(buffer)
    run(x)
    model.up.weight.data = torch.zeros(48, 32)
    buffer *= -2
    model.up.weight.data = torch.from_numpy(buffer)
    torch.testing.assert_close(run(x), expected(model, x))
    run(x)
    assert rounds == ["up.weight", "down.weight", "up.weight"]


@torch.no_grad()
def test_memory_of_another_shape_gets_a_pack_of_that_shape():
    model, x = Two(), torch.randn(3, 32)
    run = compiled(model)
    run(x)
    model.up.weight.data, model.up.bias.data, model.down.weight.data = torch.randn(80, 32), torch.randn(80), torch.randn(32, 80)
    torch.testing.assert_close(run(x), expected(model, x))


@torch.no_grad()
def test_a_weight_that_is_read_in_two_formats_has_two_packs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return x @ self.w @ self.w.t()

    model, x = Both(), torch.randn(3, 32)
    wanted = x @ quantise(model.w, kn=True).dequantise().t() @ quantise(model.w).dequantise().t()
    torch.testing.assert_close(compiled(model)(x), wanted)


@torch.no_grad()
def test_a_write_that_torch_does_not_see_needs_refresh(rounds):
    model, x = Two(), torch.randn(3, 32)
    run = compiled(model)
    before = run(x)
    model.up.weight.data.mul_(2)
    assert torch.equal(run(x), before), "if this is seen now, the documents are wrong"
    assert dsi.refresh(model) == 2 and dsi.refresh(nn.Linear(2, 2)) == 0
    torch.testing.assert_close(run(x), expected(model, x))
    assert rounds == ["up.weight", "down.weight"] * 2


@torch.no_grad()
def test_a_pack_stays_where_it_is_when_it_is_made_again():
    """Recorded CUDA graphs read it there."""
    pack, weight = packs.Pack(packs.Wanted(0, "w", False, ROW)), torch.randn(4, 32)
    first = [t.data_ptr() for t in pack.of(weight)]
    weight.mul_(3)
    again = pack.of(weight)
    assert [t.data_ptr() for t in again] == first and torch.equal(again[1], quantise(weight).scales)


@torch.no_grad()
def test_equal_layers_that_share_a_graph_have_packs_of_their_own(rounds):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Two() for _ in range(3))

    model, x = Stack(), torch.randn(3, 32)
    for layer in model.layers:
        layer.compile(backend="dsi", options={"dtype": "int8", "executor": "reference"})
    for _ in range(2):
        for layer in model.layers:
            torch.testing.assert_close(layer(x), expected(layer, x))
    assert len(rounds) == 6
    assert dsi.refresh(model) == 6


@torch.no_grad()
def test_packs_go_with_their_model():
    model = Two()
    run = compiled(model)
    run(torch.randn(3, 32))
    (pack, *_) = packs._packs[model.up.weight].values()
    gone, weight = weakref.ref(pack), weakref.ref(model.up.weight)
    del pack, model, run
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None and weight() is None


@torch.no_grad()
def test_a_weight_that_is_not_finite_is_refused_by_name_at_the_first_call():
    model = Two()
    model.down.weight[0, 0] = float("nan")
    with pytest.raises(DsiError, match=r"down\.weight holds nan or infinite entries"):
        compiled(model)(torch.randn(3, 32))


def test_under_inference_mode():
    with torch.inference_mode():
        model, x = Two(), torch.randn(3, 32)
        run = compiled(model)
        torch.testing.assert_close(run(x), expected(model, x))
        model.up.weight.mul_(2)
        dsi.refresh(model)
        torch.testing.assert_close(run(x), expected(model, x))


@torch.no_grad()
def test_on_the_cpu_executor(rounds):
    model = Two()
    run = torch.compile(model, backend="dsi", options={"dtype": "int8"}, dynamic=False)
    for x in (torch.randn(1, 32), torch.randn(1, 32)):
        torch.testing.assert_close(run(x), expected(model, x), rtol=1e-5, atol=1e-5)
    model.down.weight.mul_(2)
    torch.testing.assert_close(run(x), expected(model, x), rtol=1e-5, atol=1e-5)
    assert rounds == ["up.weight", "down.weight", "down.weight"]
