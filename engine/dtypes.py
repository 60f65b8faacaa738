"""The dtype of an engine: its spellings, and how a module is cast to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.quantize.modules import QuantisedEmbedding, QuantisedLinear
from torch import Tensor, nn

from .errors import ConfigError

DTYPES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}


def dtype_of(value: Any) -> torch.dtype | None:
    """The torch dtype that `value` (a dtype, one of its names, or None) means. Raises ValueError with the known names."""
    if value is None or (isinstance(value, torch.dtype) and value in DTYPES):
        return value
    if isinstance(value, str):
        for dtype, names in DTYPES.items():
            if value.removeprefix("torch.") in names:
                return dtype
    known = ", ".join(name for names in DTYPES.values() for name in names)
    raise ValueError(f"not a dtype of an engine (known: {known}, as strings or torch dtypes; None keeps the module's own)")


def check_castable(module: nn.Module, dtype: torch.dtype) -> None:
    """Raise `ConfigError` for a module that another library has quantised: its weights are no numbers that a cast understands."""
    for name, part in module.named_modules():
        if getattr(part, "is_quantized", False):
            raise ConfigError(
                f"dsi: {name or type(module).__name__!r} was quantised by another library and cannot become {dtype}: give dtype=None, "
                "which keeps a module as it is"
            )


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point tensors of `module` to `dtype` in place, one at a time; Parameters stay the objects that they are.

    A transformers model ends as `from_pretrained(..., dtype=dtype)` would have made it: what a checkpoint holds is cast, except the parts
    that the model's class keeps in float32 (T5's `wo` under float16). Non-persistent buffers, which are computed from the configuration,
    stay as they are, and with them the frequencies of rotary embeddings: bfloat16 would turn the thousandth token by a radian. Any other
    module is cast whole, as `module.to(dtype)` does.
    """
    _Cast(dtype).walk(module, "", None)


@dataclass
class _Rules:
    """What a transformers model says about its own dtypes: the names of parameters that stay in float32."""

    wide: re.Pattern[str] | None

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> _Rules | None:
        if not hasattr(module, "_keep_in_fp32_modules"):
            return None
        patterns: set[str] = set()
        if dtype == torch.float16:
            patterns |= set(module._keep_in_fp32_modules or ())  # type: ignore[arg-type]
        if dtype in (torch.float16, torch.bfloat16):
            patterns |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        text = "|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))
        return cls(re.compile(text) if text else None)


@dataclass
class _Cast:
    dtype: torch.dtype
    # By id, with the tensor itself, so that its id is not given to another one meanwhile.
    done: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def walk(self, part: nn.Module, prefix: str, rules: _Rules | None) -> None:
        if rules is None and (rules := _Rules.of(part, self.dtype)) is not None:
            prefix = ""  # the names that a model speaks of are its own
        for name, parameter in part._parameters.items():
            if parameter is not None:
                self.parameter(parameter, prefix + name, rules)
        for name, buffer in part._buffers.items():
            scales = isinstance(part, QuantisedLinear) and name == "scales"  # in their own dtype, whatever the model's is
            if buffer is not None and not scales and (rules is None or name not in part._non_persistent_buffers_set):
                part._buffers[name] = self.buffer(buffer, prefix + name, rules)
        if isinstance(part, (QuantisedLinear, QuantisedEmbedding)) and part.dtype is not None:
            part.dtype = self.target(f"{prefix}weight", rules)
        for name, child in part.named_children():
            self.walk(child, f"{prefix}{name}.", rules)

    def parameter(self, parameter: nn.Parameter, name: str, rules: _Rules | None) -> None:
        if parameter.is_floating_point() and id(parameter) not in self.done:
            self.done[id(parameter)] = (parameter, parameter)
            parameter.data = parameter.data.to(self.target(name, rules))

    def buffer(self, buffer: Tensor, name: str, rules: _Rules | None) -> Tensor:
        if not buffer.is_floating_point():
            return buffer
        if id(buffer) not in self.done:
            self.done[id(buffer)] = (buffer, buffer.to(self.target(name, rules)))
        return self.done[id(buffer)][1]

    def target(self, name: str, rules: _Rules | None) -> torch.dtype:
        return torch.float32 if rules is not None and rules.wide is not None and rules.wide.search(name) else self.dtype
