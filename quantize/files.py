"""Quantised models on disk: one safetensors file with the tensors and, as metadata, what the int8 modules are.

The file holds every parameter and buffer once, those that a state dict leaves out too (rotary tables), so that a model whose structure
was made on the meta device becomes whole. Reading executes nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dsi.ir.errors import DsiError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .formats import Format, Grouping
from .int8 import Quantised
from .modules import QuantisedEmbedding, QuantisedLinear

FORMAT = "dsi quantised model"
VERSION = 1
_KEY = "dsi"  # one entry, as the order of several is not kept


def save_quantised(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write `model`, in which `quantise_model` has put int8 weights, to the file `path`.

    The file appears whole or not at all. Equal models give equal bytes.
    """
    modules = dict(model.named_modules())
    names = {module: name for name, module in reversed(modules.items())}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in _tensors(model).items():
        if tensor.is_meta:
            raise DsiError(f"{name} is on the meta device, which holds no numbers: there is nothing to save")
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor.detach().contiguous()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "linears": {name: _describe(m) for name, m in modules.items() if isinstance(m, QuantisedLinear)},
        "tables": {
            name: {"head": names[m.head], "dtype": _short(m.dtype), "padding_idx": m.padding_idx}
            for name, m in modules.items()
            if isinstance(m, QuantisedEmbedding)
        },
        "aliases": aliases,
    }
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(_apart(tensors), temporary, metadata={_KEY: json.dumps(header, sort_keys=True)})
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_quantised(
    model: nn.Module | Callable[[], nn.Module], path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> nn.Module:
    """The model that `save_quantised` wrote to `path`, on `device`, in eval mode.

    `model`: the structure that was quantised, or a function that makes it, which is called on the meta device: no floating-point weight is
    ever made. The int8 modules take their places as `quantise_model` would put them; nothing is rounded again. A module given is changed in
    place, once everything has been found to fit.

    Raises `DsiError` for a file that is none of these, of another version of the format, or of another model.
    """
    header = _header(path)
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    with safe_open(str(path), framework="pt", device=str(device)) as file:
        stored = set(file.keys())
        _check(model, header, stored, file, path)
        for name, described in header["linears"].items():
            _replace(model, name, _linear(described))
        for name, described in header["tables"].items():
            head = model.get_submodule(described["head"])
            assert isinstance(head, QuantisedLinear)
            _replace(model, name, QuantisedEmbedding(head, getattr(torch, described["dtype"]), padding_idx=described["padding_idx"]))
        made = {name: _assign(model, name, file.get_tensor(name)) for name in sorted(stored)}
        for name, of in header["aliases"].items():
            _assign(model, name, made[of])
    left = [name for name, tensor in _everything(model) if tensor.is_meta]
    if left:
        raise DsiError(f"{path} has no numbers for {', '.join(left[:5])}: give load_quantised a model that is not on the meta device")
    return model.eval()


# ----------------------------------------------------------------------------------------------------------------------- writing


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name, sorted."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return dict(sorted(found.items()))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that lie in one memory; views of one (two halves, say) become tensors of their own."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _describe(module: QuantisedLinear) -> dict[str, Any]:
    return {
        "shape": [module.out_features, module.in_features],
        "scales": [*module.scales.shape],
        "group": module.group,
        "grouping": module.form.grouping.kind,
        "size": module.form.grouping.size,
        "scale dtype": _short(module.form.scales),
        "stored scale dtype": _short(module.scales.dtype),
        "bias": None if module.bias is None else _short(module.bias.dtype),
        "activations": module.activations,
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ----------------------------------------------------------------------------------------------------------------------- reading


def _header(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise DsiError(f"{path} does not exist") from None
    except Exception as error:
        raise DsiError(f"{path} is no safetensors file: {error}") from None
    try:
        header = json.loads(metadata.get(_KEY, "null"))
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DsiError(f"{path} holds no quantised model: it was not written by save_quantised")
    if header.get("version") != VERSION:
        raise DsiError(
            f"{path} has version {header.get('version')} of the format, and this dsi reads version {VERSION}: quantise the model again "
            "and save it with this version"
        )
    return header


def _linear(described: dict[str, Any]) -> QuantisedLinear:
    n, k = described["shape"]
    with torch.device("meta"):
        empty = Quantised(
            torch.empty(n, k, dtype=torch.int8),
            torch.empty(described["scales"], dtype=getattr(torch, described["stored scale dtype"])),
            described["group"],
        )
        bias = None if described["bias"] is None else torch.empty(n, dtype=getattr(torch, described["bias"]))
    form = Format(Grouping(described["grouping"], described["size"]), getattr(torch, described["scale dtype"]))
    return QuantisedLinear(empty, bias, form=form, activations=described["activations"])


def _check(model: nn.Module, header: dict[str, Any], stored: set[str], file: Any, path: Any) -> None:
    """Everything that could go wrong, before the model is touched."""
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in (*header["linears"], *header["tables"]) if name not in modules]
    if missing:
        raise DsiError(f"{path} holds another model: {type(model).__name__} has no module {', '.join(missing[:5])}")
    replaced = {f"{name}.{part}" for name in header["linears"] for part in ("weight", "scales", "bias")}
    replaced |= {f"{name}.weight" for name in header["tables"]}
    wanted = {name: [*tensor.shape] for name, tensor in _tensors(model).items() if name not in replaced}
    for name, described in header["linears"].items():
        shape = getattr(modules[name], "weight", torch.empty(0)).shape
        if sorted(shape) != sorted(described["shape"]):
            raise DsiError(f"{path} holds another model: {name}.weight is {described['shape']} there and {list(shape)} in the model")
        wanted |= {f"{name}.{part}": [*tensor.shape] for part, tensor in _tensors(_linear(described)).items()}
    there = {name: name for name in stored} | header["aliases"]
    if gone := sorted(wanted.keys() - there.keys()):
        raise DsiError(f"{path} holds another model: it has no {', '.join(gone[:5])}")
    if extra := sorted(there.keys() - wanted.keys()):
        raise DsiError(f"{path} holds another model: {type(model).__name__} has no {', '.join(extra[:5])}")
    for name, size in wanted.items():
        shape = file.get_slice(there[name]).get_shape()
        if size != [*shape]:
            raise DsiError(f"{path} holds another model: {name} is {[*shape]} there and {size} in the model")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = getattr(owner, attribute)
    setattr(owner, attribute, module.train(old.training))
    if isinstance(owner, nn.TransformerEncoderLayer):
        owner.activation_relu_or_gelu = 0


def _assign(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Put `value` where the model has the parameter or buffer `name`; returns what is there now."""
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    if attribute in owner._parameters:
        old = owner._parameters[attribute]
        made = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        owner._parameters[attribute] = made if old is not None or made is not None else None
        return made
    owner._buffers[attribute] = value
    return value


def _everything(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    found = list(_tensors(model).items())
    for name, module in model.named_modules():
        found += [(f"{name}.{key}", value) for key, value in vars(module).items() if isinstance(value, Tensor)]
    return found
