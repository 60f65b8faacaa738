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

from . import checksums
from .conv1d import is_conv1d
from .header import UNCHECKED, Header, Linear, Table
from .modules import QuantisedEmbedding, QuantisedLinear, refuse_save_pretrained
from .wrappers import bare, named_modules, own_name, put

_CODES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL", torch.uint8: "U8"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_KEY = "dsi"  # one entry, as the order of several is not kept


def save_quantised(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write `model`, in which `quantise_model` has put int8 weights, to the file `path`.

    The file appears whole or not at all, with a checksum of each tensor. Equal models give equal bytes, whether they are compiled, in an
    engine, or neither. Raises `DsiError` where no file can be written at `path`, or the model holds no numbers.
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise DsiError(f"{path} is a folder; name a file in it" if path.is_dir() else f"{path} cannot be written: no folder {path.parent}")
    model = bare(model)
    modules = named_modules(model, remove_duplicate=True)
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
    header = Header(
        linears={name: Linear.of(m) for name, m in modules.items() if isinstance(m, QuantisedLinear)},
        tables={name: Table.of(m, names[m.head]) for name, m in modules.items() if isinstance(m, QuantisedEmbedding)},
        aliases=aliases,
        checksums=checksums.of_tensors(tensors),
    )
    text = json.dumps(header.written(), sort_keys=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(_apart(tensors), temporary, metadata={_KEY: text})
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
    place, once everything has been found to fit and to be what was written.

    Raises `DsiError` for a file that is none of these, of another version of the format, of another model, or with numbers that are not
    those that were written.
    """
    if Path(path).is_dir():
        raise DsiError(f"{path} is a folder: give the file in it that save_quantised wrote")
    header = _header(path)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise DsiError(f"load_quantised takes a module or a function that makes one, and was given a {type(model).__name__}")
        with torch.device("meta"):
            made = model()
        if not isinstance(made, nn.Module):
            raise DsiError(f"the function that was given to load_quantised returned a {type(made).__name__}, no torch.nn.Module")
        model = made
    inside: nn.Module = bare(model)
    with safe_open(str(path), framework="pt", device=str(device)) as file:
        stored = set(file.keys())
        _check(inside, header, stored, file, path)
        _check_numbers(header, stored, path)
        modules = named_modules(inside)
        for name, linear in header.linears.items():
            _replace(modules, name, linear.made())
        for name, table in header.tables.items():
            head = modules[table.head]
            assert isinstance(head, QuantisedLinear)  # `_check` has seen it among the linears
            _replace(modules, name, table.made(head))
        values = {name: _assign(modules, name, file.get_tensor(name)) for name in sorted(stored)}
        for name, of in header.aliases.items():
            _assign(modules, name, values[of])
    left = [name for name, tensor in _everything(inside) if tensor.is_meta]
    if left:
        raise DsiError(f"{path} has no numbers for {', '.join(left[:5])}: give load_quantised a model that is not on the meta device")
    refuse_save_pretrained(inside)
    return model.eval()


# ----------------------------------------------------------------------------------------------------------------------- writing


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name, sorted."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return dict(sorted((own_name(name), tensor) for name, tensor in found.items()))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that lie in one memory; views of one (two halves, say) become tensors of their own."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ----------------------------------------------------------------------------------------------------------------------- reading


def _header(path: str | os.PathLike[str]) -> Header:
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
    return Header.read(header, path)


def _check(model: nn.Module, header: Header, stored: set[str], file: Any, path: Any) -> None:
    """Everything that could go wrong, before the model is touched."""
    other = f"{path} holds another model"
    modules = named_modules(model)
    if missing := [name for name in (*header.linears, *header.tables) if name not in modules]:
        raise DsiError(f"{other}: {type(model).__name__} has no module {', '.join(missing[:5])}")
    twins = _names(modules)
    replaced = {f"{twin}.{part}" for name in header.linears for twin in twins[modules[name]] for part in ("weight", "scales", "bias")}
    replaced |= {f"{twin}.weight" for name in header.tables for twin in twins[modules[name]]}
    # A model may have been cast before it was quantised: of what stays, any floating-point dtype fits any other.
    wanted = {name: ([*tensor.shape], _codes(tensor.dtype)) for name, tensor in _tensors(model).items() if name not in replaced}
    for name, linear in header.linears.items():
        if (shape := _sizes(modules[name])) != linear.shape:
            raise DsiError(f"{other}: {name}.weight is {linear.shape} there and {shape} in the model")
        if (getattr(modules[name], "bias", None) is None) != (linear.bias is None):
            there, here = ("no", "one") if linear.bias is None else ("a", "none")
            raise DsiError(f"{other}: {name} has {there} bias there, and {here} in the model")
        made = _tensors(linear.made())
        for twin in twins[modules[name]]:
            wanted |= {f"{twin}.{part}": ([*tensor.shape], {_CODES[tensor.dtype]}) for part, tensor in made.items()}
    for name, table in header.tables.items():
        if (shape := _sizes(modules[name])) != header.linears[table.head].shape:
            raise DsiError(f"{other}: the table {name} is {header.linears[table.head].shape} there and {shape} in the model")
    place = {name: name for name in stored} | header.aliases
    if lost := sorted(set(header.aliases.values()) - stored):
        raise DsiError(f"{path} is damaged: it has no {', '.join(lost[:5])}, which stands for another tensor, too")
    if gone := sorted(wanted.keys() - place.keys()):
        raise DsiError(f"{other}: it has no {', '.join(gone[:5])}")
    if extra := sorted(place.keys() - wanted.keys()):
        raise DsiError(f"{other}: {type(model).__name__} has no {', '.join(extra[:5])}")
    for name, (size, codes) in wanted.items():
        found = file.get_slice(place[name])
        if size != [*found.get_shape()]:
            raise DsiError(f"{other}: {name} is {[*found.get_shape()]} there and {size} in the model")
        if codes and found.get_dtype() not in codes:
            raise DsiError(f"{other}, or is damaged: {name} is {found.get_dtype()} there, not {' or '.join(sorted(codes))}")


def _check_numbers(header: Header, stored: set[str], path: Any) -> None:
    """Reads the file once more than loading does. What it holds stays where it is: tensors on a CPU show the file itself."""
    if header.version == UNCHECKED:
        return
    with safe_open(str(path), framework="pt") as file:
        found = checksums.of_tensors({name: file.get_tensor(name) for name in sorted(stored)})
    if wrong := [name for name, number in found.items() if number != header.checksums.get(name)]:
        raise DsiError(
            f"{path} is damaged: the numbers of {', '.join(wrong[:5])} are not those that were written. Copy or fetch the file again, or "
            "write it anew"
        )


def _codes(dtype: torch.dtype) -> set[str]:
    """What safetensors may call the dtype of a tensor that takes the place of one of `dtype`; empty: anything."""
    code = _CODES.get(dtype)
    return _FLOATS if code in _FLOATS else {code} if code else set()


def _sizes(module: nn.Module) -> list[int] | None:
    """Entries [N, K] of a linear or a table; None for any other module."""
    if isinstance(module, QuantisedLinear):
        return [module.out_features, module.in_features]
    if isinstance(module, (nn.Embedding, QuantisedEmbedding)):
        return [module.num_embeddings, module.embedding_dim]
    if isinstance(module, nn.Linear):
        return [*module.weight.shape]
    return [*module.weight.shape[::-1]] if is_conv1d(module) else None  # type: ignore[index]


def _names(modules: dict[str, nn.Module]) -> dict[nn.Module, list[str]]:
    """The names of each module: one that is called in several places has several."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        found.setdefault(module, []).append(name)
    return found


def _replace(modules: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    """Put `module` into all places of the one called `name`, in the model and in `modules`."""
    old = modules[name]
    for twin in [twin for twin, other in modules.items() if other is old]:
        parent, _, attribute = twin.rpartition(".")
        put(modules[parent], attribute, module.train(old.training))
        if isinstance(modules[parent], nn.TransformerEncoderLayer):
            modules[parent].activation_relu_or_gelu = 0  # type: ignore[assignment]
        modules[twin] = module


def _assign(modules: dict[str, nn.Module], name: str, value: Tensor) -> Tensor:
    """Put `value` where the model has the parameter or buffer `name`; returns what is there now."""
    parent, _, attribute = name.rpartition(".")
    owner = modules[parent]
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
