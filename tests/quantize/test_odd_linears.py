"""quantise_model beside what else may be done to a linear: hooks, computed weights, other classes, state dicts, casts."""

from __future__ import annotations

import warnings

import pytest
import torch
import zoo
from dsi.ir.errors import DsiError
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.modules import QuantisedLinear
from dsi.quantize.plain import is_plain
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

import dsi

X = torch.linspace(-1, 1, 96).reshape(3, 32)


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).eval().requires_grad_(False)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() < 0.02 * other.norm())


def test_hooks_move_along_and_can_be_removed():
    model = two()
    seen: list[str] = []
    model[0].register_forward_hook(lambda module, args, result: result * 10)
    model[1].register_forward_pre_hook(lambda module, args, kwargs: seen.append(type(module).__name__), with_kwargs=True)
    last = model[1].register_forward_hook(lambda module, args, result: result + 100)
    before = model(X)
    dsi.quantise_model(model)
    assert near(model(X), before) and seen == ["Linear", "QuantisedLinear"]
    last.remove()
    assert near(model(X), before - 100)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 10


class Clamped(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-20, 20))


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(2, -1)


class Adapted(nn.Linear):
    """A low-rank term that is still zero."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.low = nn.Parameter(torch.zeros(sizes[1], sizes[0]))

    def forward(self, x):
        return super().forward(x) + x @ self.low.t()


class Spelled(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind, plain", [(Scaled, False), (Clamped, False), (Router, False), (Adapted, False), (Spelled, True)])
def test_a_linear_of_another_class_is_asked_what_it_computes(kind, plain, dtype):
    assert is_plain(kind(320, 48).to(dtype)) == plain


def test_falcons_linears_become_int8():
    model = zoo.decoder("falcon_mqa")
    dsi.quantise_model(model)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())


def computed(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def parametrised(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def patched(model: nn.Sequential) -> None:
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) * 10


def derived(model: nn.Sequential) -> None:
    model[0] = Scaled(32, 48)


def complex_numbers(model: nn.Sequential) -> None:
    model.side = nn.Linear(4, 4, dtype=torch.complex64)
    model.forward = lambda x: model[1](model[0](x))


def empty(model: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.side = nn.Linear(4, 0)
    model.forward = lambda x: model[1](model[0](x))


def lazy(model: nn.Sequential) -> None:
    model.side = nn.LazyLinear(4)
    model.forward = lambda x: model[1](model[0](x))


@pytest.mark.parametrize(
    "change, words",
    [
        (lazy, r"side \(its weight has no sizes yet"),
        (computed, r"0 \(its weight is computed"),
        (parametrised, r"0 \(a ParametrizedLinear, which does more"),
        (patched, r"0 \(its forward was replaced"),
        (derived, r"0 \(a Scaled, which does more"),
        (complex_numbers, r"side \(its dtype is complex64"),
        (empty, r"side \(it has no entries"),
    ],
)
def test_what_is_more_than_a_linear_stays_and_is_named(change, words):
    model = two()
    change(model)
    before = model(X)
    with pytest.warns(UserWarning, match=f"stay as they are: {words}"):
        dsi.quantise_model(model)
    assert near(model(X), before) and isinstance(model[1], QuantisedLinear)
    assert sum(isinstance(m, QuantisedLinear) for m in model) == (2 if hasattr(model, "side") else 1)


def test_a_skipped_one_needs_no_warning():
    model = two()
    patched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsi.quantise_model(model, skip="0")


def test_a_linear_and_a_conv1d_with_one_weight_read_it_in_two_layouts():
    model = nn.Sequential(nn.Linear(32, 32), Conv1D(32, 32)).requires_grad_(False)
    model[1].weight = model[0].weight
    before = model(X)
    assert near(dsi.quantise_model(model)(X), before)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"activations": "int4"}, "activations is one of '', 'int8', not 'int4'"),
        ({"skip": [0]}, "skip: 0 is no name"),
        ({"format": Grouping("inner", 32)}, "format is a dsi.quantize.Format"),
        ({}, r"1\.weight holds nan or infinite"),
    ],
)
def test_mistakes_are_found_before_anything_is_replaced(given, words):
    model = two()
    if not given:
        model[1] = nn.Linear(48, 16, dtype=torch.float64)
        model[1].weight.data[0, 0] = 1e300  # no fp32 scale
    with pytest.raises(DsiError, match=words):
        dsi.quantise_model(model, **given)
    assert not any(isinstance(m, QuantisedLinear) for m in model)


def test_neither_a_structure_without_numbers_nor_what_is_no_module_is_taken():
    with torch.device("meta"):
        model = two()
    with pytest.raises(DsiError, match=r"0\.weight is on the meta device"):
        dsi.quantise_model(model)
    with pytest.raises(DsiError, match=r"takes a torch\.nn\.Module, and was given a dict"):
        dsi.quantise_model({})


def test_a_model_that_casts_to_the_dtype_of_the_weight_is_told():
    """Mamba's head is read so in transformers."""

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, 16)

        def forward(self, x):
            return self.head(x.to(self.head.weight.dtype))

    model = dsi.quantise_model(Casting())
    with pytest.raises(DsiError, match=r"was given int8: .* leave it floating-point by its name"):
        model(X)
    model = Casting().requires_grad_(False)
    before = model(X)
    dsi.quantise_model(model, skip=["head"])
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_floats_is_not_truncated_to_int8(strict):
    model, floats = dsi.quantise_model(two()), two().state_dict()
    before = model(X)
    with pytest.raises(RuntimeError, match=r"0\.weight is float32 in the state dict and int8 in the model"):
        model.load_state_dict(floats, strict=strict)
    assert torch.equal(model(X), before)


def test_scales_of_a_state_dict_keep_their_dtype():
    wide, narrow = two(), dsi.quantise_model(two(), format=Format(scales=torch.float16))
    for module in wide:
        module.weight.mul_(1e-6)  # scales that fp16 does not hold
    dsi.quantise_model(wide)
    assert narrow[0].scales.dtype == torch.float16
    narrow.load_state_dict(wide.state_dict())
    assert narrow[0].scales.dtype == torch.float32 and torch.equal(narrow(X), wide(X))


def test_a_float_does_not_take_the_place_of_an_int8_weight():
    model = zoo.decoder("llama_tied")
    dsi.quantise_model(model)
    ids = torch.tensor([[3, 50, 7]])
    before = model(input_ids=ids).logits
    for replace in (model.tie_weights, lambda: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(199, 64)))):
        with pytest.raises(DsiError, match="holds an int8 weight, which a float32 one cannot replace"):
            replace()
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("tied", ["head", "both"])
@pytest.mark.parametrize("pattern", ["model.embed_tokens", "*.embed_tokens.weight", "lm_head"])
def test_a_tied_head_is_skipped_by_either_name_of_its_weight(pattern, tied):
    model = zoo.decoder("llama_tied")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsi.quantise_model(model, skip=[pattern], tied=tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight
