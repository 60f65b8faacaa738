"""A model whose linears hold int8 weights, made in place: the floating-point weights are freed one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from dsi.ir.errors import DsiError
from dsi.ir.quantised_ops import ACTIVATIONS
from torch import Tensor, nn

from .conv1d import is_conv1d
from .feeds import mlp_weights
from .formats import INT8, ROW, Format, Grouping
from .int8 import quantise, short
from .modules import QuantisedEmbedding, QuantisedLinear, refuse_save_pretrained
from .plain import is_plain
from .wrappers import bare, own_name, put

Tied = Literal["head", "both", "keep"]

# What torch calls around a module's forward. The dictionaries themselves move, so that the handles of hooks stay good.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Place(NamedTuple):
    """Where a module hangs: the parent, the attribute, and all dotted names of the module in the model."""

    parent: nn.Module
    attribute: str
    name: str


def quantise_model(
    model: nn.Module,
    *,
    groups: int | None = None,
    mlp_extra_grouping: bool = False,
    skip: Sequence[str] = (),
    format: Format = INT8,
    tied: Tied = "head",
    activations: Literal["", "int8"] = "",
    example: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Replace each `nn.Linear` and transformers `Conv1D` of `model` by a `QuantisedLinear`, in place; returns `model`.

    What `torch.compile` has wrapped, as a whole or in parts, is compiled afterwards as before; names are those of the model inside.

    `format`: the number format; `groups` (flat, row-major, as DeepSpeed counts them) instead of its grouping. `mlp_extra_grouping`: twice
    the groups for linears next to an activation, which a run of the model shows (`example`: arguments for it; a transformers model has its
    own). Weights whose entries the flat groups do not divide regularly get a scale a row, and a warning says which.
    `skip`: patterns (as in `fnmatch`) of names of modules or weights that stay as they are.
    `tied`: what happens to a head that shares its weight with an embedding. "head": the head gets an int8 copy, the table stays. "both":
    one int8 table with a scale a row serves both. "keep": both stay as they are.
    `activations="int8"`: rows of their inputs are rounded to int8, too, except for the head that `model.get_output_embeddings()` names.

    Hooks of a linear move along. A linear that is something else besides (its forward was replaced, its weight is computed, its class is
    another, and computes something else) stays as it is, and a warning says which and why.

    Raises `DsiError` for a weight that is not finite (by name) or not there (on the meta device), for `groups` beside another grouping than
    rows, and for a table that "both" cannot replace; nothing is replaced then.
    """
    if not isinstance(model, nn.Module):
        raise DsiError(f"quantise_model takes a torch.nn.Module, and was given a {type(model).__name__}")
    form, skip = _form(format, groups, mlp_extra_grouping), _patterns(skip)
    if tied not in ("head", "both", "keep"):
        raise DsiError(f"tied is 'head', 'both' or 'keep', not {tied!r}")
    if activations not in ACTIVATIONS:
        raise DsiError(f"activations is one of {', '.join(map(repr, ACTIVATIONS))}, not {activations!r}")
    given, model = model, bare(model)
    near = mlp_weights(model, example) if mlp_extra_grouping else set()
    linears = _linears(model)
    tables = _tables(model)
    # A weight has the names of all that hold it: a head's is the table's, too.
    named = {m: [*places, *(place for _, place in tables.get(id(m._parameters.get("weight")), ()))] for m, places in linears.items()}
    wanted = {module: places for module, places in linears.items() if not any(_matches(named[module], pattern) for pattern in skip)}
    others = {places[0].name: why for module, places in wanted.items() if (why := _why_left(module)) is not None}
    wanted = {module: places for module, places in wanted.items() if places[0].name not in others}
    unused = [p for p in skip if not any(_matches(places, p) for places in named.values())]
    if unused:
        warnings.warn(f"dsi: skip: no linear is called {', '.join(map(repr, unused))}", stacklevel=2)
    _check(wanted, tables, tied)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    shared: dict[tuple[int, bool], QuantisedLinear] = {}
    coarse: list[str] = []
    for module, places in wanted.items():
        weight: Tensor = module.weight
        table = tables.get(id(weight))
        if table is not None and tied == "keep":
            continue
        key = id(weight), is_conv1d(module)
        rows = "" if module is head else activations
        if key not in shared:
            mine = _fitting(form.grouping.doubled() if id(weight) in near else form.grouping, module, places[0].name, coarse)
            if table is not None and tied == "both":
                mine = ROW
            found = quantise(weight, Format(mine, form.scales), kn=is_conv1d(module), name=f"{places[0].name}.weight")
            new = shared[key] = QuantisedLinear(found, module.bias, form=Format(mine, form.scales), activations=rows, dtype=weight.dtype)
            if table is not None and tied == "both":
                _replace_tables(table, new, weight.dtype)
        else:  # layers that share a weight share its int8
            first = shared[key]
            new = QuantisedLinear(first.quantised, module.bias, form=first.form, activations=rows, dtype=weight.dtype)
        for hooks in _HOOKS:
            setattr(new, hooks, getattr(module, hooks))
        for place in places:
            put(place.parent, place.attribute, new.train(module.training))
            if isinstance(place.parent, nn.TransformerEncoderLayer):
                place.parent.activation_relu_or_gelu = 0  # its fast path reads weights past the modules that hold them
        module.weight = None  # freed here, if nothing else holds it
        del weight
    if others:
        warnings.warn(f"dsi: stay as they are: {'; '.join(f'{name} ({why})' for name, why in others.items())}", stacklevel=2)
    if coarse:
        warnings.warn(f"dsi: a scale a row instead of flat groups, which would cut rows irregularly: {', '.join(coarse)}", stacklevel=2)
    refuse_save_pretrained(model)
    return given


def _check(wanted: dict[Any, list[Place]], tables: dict[int, list[tuple[nn.Embedding, Place]]], tied: Tied) -> None:
    """What cannot be done is said before anything is replaced."""
    for module, places in wanted.items():
        if module.weight.is_meta:
            raise DsiError(f"{places[0].name}.weight is on the meta device, which holds no numbers: load the model's weights first")
        if not bool(torch.stack(torch.aminmax(module.weight.detach())).float().isfinite().all()):
            raise DsiError(f"{places[0].name}.weight holds nan or infinite entries, which int8 cannot stand for: skip it, or repair it")
        for table, place in tables.get(id(module.weight), ()) if tied == "both" else ():
            if type(table) is not nn.Embedding or table.max_norm is not None or is_conv1d(module):
                raise DsiError(f"{place.name} is a {type(table).__name__} that does more than look up rows: tied='head' leaves it as it is")


def _why_left(module: Any) -> str | None:
    """Why a linear is not replaced although nobody skipped it: it is more than the product of x and a weight that lies there."""
    if type(module) is not nn.Linear and not is_conv1d(module) and not is_plain(module):
        return f"a {type(module).__name__}, which does more than a linear"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, no parameter of its own"
    if nn.parameter.is_lazy(weight):
        return "its weight has no sizes yet"
    if "forward" in vars(module):
        return "its forward was replaced"
    if not weight.is_floating_point() or weight.itemsize == 1:
        return f"its dtype is {short(weight.dtype)}"
    return None if weight.numel() else "it has no entries"


def _patterns(skip: Sequence[str]) -> Sequence[str]:
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    for pattern in skip:
        if not isinstance(pattern, str):
            raise DsiError(f"skip: {pattern!r} is no name of a weight or module, nor a pattern of such")
    return skip


def _form(form: Format, groups: int | None, mlp_extra_grouping: bool) -> Format:
    if not isinstance(form, Format):
        raise DsiError(f"format is a dsi.quantize.Format, such as Format(Grouping('inner', 128)), not {form!r}")
    if groups is not None and form.grouping not in (ROW, Grouping("flat", groups)):
        raise DsiError(f"groups = {groups} and the format's {form.grouping} are two ways to group a weight; give one of them")
    form = Format(Grouping("flat", groups), form.scales) if groups is not None else form
    if mlp_extra_grouping and form.grouping.kind != "flat":
        raise DsiError("mlp_extra_grouping doubles the number of flat groups, which is not given (groups=...)")
    return form


def _linears(model: nn.Module) -> dict[Any, list[Place]]:
    """Every linear, with each place where it hangs."""
    found: dict[Any, list[Place]] = {}
    for place, child in _children(model, remove_duplicate=False):
        if (isinstance(child, nn.Linear) and type(child) is not nn.modules.linear.NonDynamicallyQuantizableLinear) or is_conv1d(child):
            found.setdefault(child, []).append(place)
    if not found and type(model) is nn.Linear:
        raise DsiError("quantise_model replaces the linears inside a model; this model is a linear itself: use QuantisedLinear.of(...)")
    return found


def _tables(model: nn.Module) -> dict[int, list[tuple[nn.Embedding, Place]]]:
    """Weight of an embedding -> the embeddings that have it, with their places."""
    found: dict[int, list[tuple[nn.Embedding, Place]]] = {}
    for place, child in _children(model, remove_duplicate=True):
        if isinstance(child, nn.Embedding):
            found.setdefault(id(child.weight), []).append((child, place))
    return found


def _children(model: nn.Module, *, remove_duplicate: bool) -> Iterator[tuple[Place, Any]]:
    """Every place of a module in another, with the module there, without what compiles it."""
    for name, parent in model.named_modules(remove_duplicate=remove_duplicate):
        if bare(parent) is parent:
            for attribute, child in parent._modules.items():
                yield Place(parent, attribute, own_name(f"{name}.{attribute}" if name else attribute)), bare(child)


def _matches(places: list[Place], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for place in places for name in (place.name, f"{place.name}.weight"))


def _fitting(grouping: Grouping, module: Any, name: str, coarse: list[str]) -> Grouping:
    k, n = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
    try:
        grouping.inner_group(n, k, kn=is_conv1d(module))
    except DsiError:
        coarse.append(name)
        return ROW
    return grouping


def _replace_tables(tables: list[tuple[nn.Embedding, Place]], head: QuantisedLinear, dtype: torch.dtype) -> None:
    for table, place in tables:
        new = QuantisedEmbedding(head, dtype, padding_idx=table.padding_idx)
        put(place.parent, place.attribute, new.train(table.training))
        table.weight = None  # type: ignore[assignment]
