"""What happens to a module before it is compiled: it is looked at, unwrapped, cast and put on its device."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch import nn

from .config import InferenceConfig
from .dtypes import cast, check_castable
from .errors import ConfigError, warn
from .layout import lay_out
from .policy import check_policy
from .quantised import quantise, quantiser


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, of one that `torch.compile` has wrapped. Raises `ConfigError` for what is no module."""
    if not isinstance(model, nn.Module):
        inner = getattr(model, "model", None)
        hint = f"; give its module, e.g. init_inference({_variable(model)}.model, ...)" if isinstance(inner, nn.Module) else ""
        raise ConfigError(f"dsi: init_inference takes a torch.nn.Module, and was given a {type(model).__name__}{hint}")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        warn("dsi: the module was wrapped by torch.compile; the engine takes the module inside, and compiles that itself")
        return unwrapped(model._orig_mod)
    return model


def check(module: nn.Module, config: InferenceConfig) -> torch.device:
    """The device on which the engine will run. Raises where `module` cannot be taken; changes nothing."""
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ConfigError(
                f"dsi: {name!r} of {type(module).__name__} is on the meta device, which holds no numbers: load its weights first "
                "(from_pretrained without offloading, or to_empty and load_state_dict)"
            )
    if config.injection_policy:
        check_policy(module, config.injection_policy)
    if config.dtype is not None:
        check_castable(module, config.dtype)
    if config.dtype == torch.int8:
        quantiser()
    devices = sorted({str(p.device) for p in module.parameters()} or {str(b.device) for b in module.buffers()})
    if len(devices) > 1:
        raise ConfigError(
            f"dsi: the weights of {type(module).__name__} are spread over {', '.join(devices)}; an engine runs on one device: "
            "load the model without a device map that splits it"
        )
    device = torch.device(devices[0] if devices else "cpu")
    goes = device.type == "cpu" and torch.cuda.is_available()
    if config.keep_module_on_host and not goes:
        warn(f"dsi: 'keep_module_on_host' has no effect here: the module would stay on {device} anyway")
    return _gpu() if goes and not config.keep_module_on_host else device


def prepare(module: nn.Module, config: InferenceConfig, device: torch.device) -> None:
    """Bring `module` into the state that `config` asks for, in place: in eval mode, uncompiled, cast, on `device`."""
    _uncompile(module)
    module.eval()
    with torch.inference_mode(False):
        _out_of_inference_mode(module)
        if config.dtype is not None and config.dtype != torch.int8:
            cast(module, config.dtype)
        if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
            module.to(device)
        if config.dtype == torch.int8:
            quantise(module, config)
        if device.type == "cuda" and config.replace_with_kernel_inject:
            lay_out(module)


def _gpu() -> torch.device:
    """The GPU of this process: LOCAL_RANK's, as launchers set it, else the current one."""
    rank = os.environ.get("LOCAL_RANK", "")
    index = int(rank) if rank.isdigit() and int(rank) < torch.cuda.device_count() else torch.cuda.current_device()
    return torch.device("cuda", index)


def _uncompile(module: nn.Module) -> None:
    """Take back `module.compile()`, `module.forward = torch.compile(module.forward)`, `torch.compile(part)` and a class's compiled forward:
    one compiler at a time."""
    found = False
    for part in module.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            part._compiled_call_impl, found = None, True
        if (original := _compiled_from(part.__dict__.get("forward"))) is not None:
            part.forward, found = original, True
        if "forward" not in part.__dict__ and (original := _compiled_from(getattr(type(part), "forward", None))) is not None:
            part.forward, found = types.MethodType(original, part), True
        for name, child in part._modules.items():
            while isinstance(child, torch._dynamo.eval_frame.OptimizedModule):
                part._modules[name] = child = child._orig_mod
                found = True
    if found:
        warn("dsi: the module was compiled in place before; the engine takes that back, and compiles the module itself")


def _compiled_from(function: Any) -> Any:
    """What `torch.compile` made `function` from; None where it did not, or `torch.compiler.disable` did, which is meant to last."""
    if getattr(function, "_torchdynamo_disable", False):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


def _out_of_inference_mode(module: nn.Module) -> None:
    """Copies take the place of tensors that were made in inference mode: those count no writes, and cannot be cast in place."""
    copies: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_inference():
                    continue
                if id(tensor) not in copies:  # tied weights stay tied
                    copy = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
                tensors[name] = copies[id(tensor)]  # type: ignore[assignment]


def _variable(model: object) -> str:
    return "pipe" if "Pipeline" in type(model).__name__ else type(model).__name__.lower()
