"""The configuration of `dsi.init_inference`: DeepSpeed's names, aliases and defaults, validated before a model is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from dsi.ir.errors import DsiError
from dsi.ir.options import Options
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from torch import nn

from .dtypes import dtype_of
from .errors import ConfigError, warn
from .keys import Section, same

_EXPERTS = "experts run as the model has them"


class QuantizationSetting(NamedTuple):
    """How int8 weights are grouped: `groups` of a weight, flat and row-major (None: one scale a row), twice as many in an MLP with
    `mlp_extra_grouping`."""

    groups: int | None = None
    mlp_extra_grouping: bool = False


class TensorParallelConfig(Section):
    """Over how many GPUs a model is split."""

    without_effect = {
        "enabled": "tp_size alone says whether a model is split",
        "tp_grain_size": "a model on one GPU is not cut into grains",
    }

    tp_size: int = Field(default=1, ge=1, description="GPUs that share one model.")
    mpu: Any = Field(default=None, description="An object that knows the process groups, as Megatron's.")
    tp_group: Any = Field(default=None, description="The process group of the GPUs that share one model.")


class CheckpointConfig(Section):
    """The three keys of checkpoints as one section; each means what the key of that name outside means."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


class InferenceConfig(Section):
    """What `dsi.init_inference` is told. Field names, aliases and defaults are DeepSpeed's; `options` is dsi's own.

    `InferenceConfig.parse` reads it from a dict, a JSON file and keyword arguments. Keys that DeepSpeed has and that change nothing here
    are accepted with a warning (`InferenceConfig.without_effect` maps each to the reason).
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        "use_triton": "on a CUDA GPU every region of every model is a Triton kernel",
        "triton_autotune": 'how kernels are chosen is said by options={"mode": "max-autotune"}',
        "zero": "an engine holds its weights where the module has them, in one piece",
        "triangular_masking": "which tokens a token sees is read off the model",
        "tm": "which tokens a token sees is read off the model",
        "moe": _EXPERTS,
        "ep_size": _EXPERTS,
        "ep_group": _EXPERTS,
        "expert_group": _EXPERTS,
        "ep_mp_group": _EXPERTS,
        "expert_mp_group": _EXPERTS,
        "moe_experts": _EXPERTS,
        "moe_type": _EXPERTS,
        "quant": "int8 weights are dtype=torch.int8, and their groups quantization_setting",
        "set_empty_params": "no layer is replaced by another, so none is made empty",
        "training_mp_size": "the module is taken as it is, however it was trained",
        "replace_method": "no layer is replaced, the graph is compiled",
        "injection_policy_tuple": "DeepSpeed itself fills it",
        "config": "the model's own config is what its forward reads",
        "args": "the model's own config is what its forward reads",
        "transposed_mode": "the layout of a weight is read off the graph",
        "module_key": "weights are not read from a checkpoint by the engine",
    }

    replace_with_kernel_inject: bool = Field(
        False, alias="kernel_inject", description="Compile the model, and generate with the engine's own loop; False only wraps it."
    )
    dtype: torch.dtype | None = Field(torch.float16, description="What weights are cast to, in place. None: as the module is.")
    tensor_parallel: TensorParallelConfig = Field(default_factory=lambda: TensorParallelConfig(), alias="tp")
    injection_policy: dict[type, tuple[str, ...]] | None = Field(
        None, alias="injection_dict", description="Module class -> name endings of its linears whose results are summed over the GPUs."
    )
    checkpoint: str | dict[str, Any] | None = Field(None, description="A checkpoint list, or the JSON file with one.")
    base_dir: str = Field("", description="The folder that the names in `checkpoint` are relative to.")
    checkpoint_config: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig(), alias="ckpt_config")
    save_mp_checkpoint_path: str | None = Field(None, description="The folder to write the split weights to.")
    quantization_setting: QuantizationSetting | None = Field(
        None, description="With dtype=torch.int8: groups, or (groups, mlp_extra_grouping) in either order."
    )
    max_out_tokens: int = Field(1024, ge=1, alias="max_tokens", description="Tokens of a row, prompt and new ones, that the cache holds.")
    min_out_tokens: int = Field(
        1, ge=1, alias="min_tokens", description="As many must fit into the memory that is left, or the engine refuses."
    )
    enable_cuda_graph: bool = Field(False, description="Record CUDA graphs. Where it is not given, generation on a GPU does.")
    return_tuple: bool = Field(True, description="Layers are not replaced: each returns what the model wrote, either way.")
    keep_module_on_host: bool = Field(False, description="Leave a module on the CPU that would go to the GPU.")
    options: dict[str, Any] = Field(
        default_factory=dict, description='Options of torch.compile(backend="dsi"): docs/options.md. (DeepSpeed has no such key.)'
    )

    @classmethod
    def parse(cls, config: InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None, **given: Any) -> InferenceConfig:
        """A configuration from `config` (one already made, a dict, or the path of a JSON file) and keyword arguments.

        Raises `ConfigError`, a ValueError, for an unknown key (with the nearest known one), a value of the wrong kind, or a key that
        `config` and the arguments give different values. Neither is changed.
        """
        if isinstance(config, InferenceConfig):
            config = {name: getattr(config, name) for name in config.model_fields_set}
        elif isinstance(config, (str, os.PathLike)):
            config = _from_json(Path(config))
        elif config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"dsi: config is a {type(config).__name__}; give a dict, the path of a JSON file, or None")
        try:
            return cls.model_validate(_merged(config or {}, given))
        except ValidationError as error:
            raise ConfigError(_sentences(error)) from None

    @classmethod
    def _redirected(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The deprecated `mp_size` and `mpu`, moved into `tensor_parallel`."""
        for old, new in (("mp_size", "tp_size"), ("mpu", "mpu")):
            if old not in given:
                continue
            value = given.pop(old)
            warn(f"dsi: {old!r} is deprecated: give tensor_parallel={{{new!r}: {value!r}}}", FutureWarning)
            key = "tp" if "tp" in given else "tensor_parallel"
            section = given.get(key, {})
            if isinstance(section, TensorParallelConfig):
                section = section.model_dump(exclude_unset=True)
            elif not isinstance(section, Mapping):
                continue  # refused where the section is read
            if new in section and section[new] != value:
                raise ValueError(f"{old!r} = {value!r} and {key}[{new!r}] = {section[new]!r} name the same thing: give the latter alone")
            given[key] = {**section, new: value}
        return given

    @classmethod
    def _sections(cls) -> dict[str, type[Section]]:
        return {"tensor_parallel": TensorParallelConfig, "checkpoint_config": CheckpointConfig}

    @field_validator("tensor_parallel", "checkpoint_config", mode="before")
    @classmethod
    def _section(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, (Mapping, Section)):
            section = TensorParallelConfig if info.field_name == "tensor_parallel" else CheckpointConfig
            raise ValueError(f"give a dict with the keys {', '.join(section.names())}")
        return value

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _checkpoint(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, (str, os.PathLike, Mapping)):
            raise ValueError("give a dict, or the path of a JSON file")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> torch.dtype | None:
        return dtype_of(value)

    @field_validator("quantization_setting", mode="before")
    @classmethod
    def _setting(cls, value: Any) -> QuantizationSetting | None:
        """groups, or groups and mlp_extra_grouping in either order: DeepSpeed's code and its tutorial disagree, and the types tell."""
        if value is None or isinstance(value, QuantizationSetting):
            return value
        parts = list(value) if isinstance(value, (tuple, list)) else [value]
        flags = [part for part in parts if isinstance(part, bool)]
        groups = [part for part in parts if isinstance(part, int) and not isinstance(part, bool)]
        if len(groups) != 1 or len(flags) > 1 or len(flags) + 1 != len(parts) or groups[0] < 1:
            raise ValueError("give the number of groups, or a pair of the number of groups and a bool (mlp_extra_grouping)")
        return QuantizationSetting(groups[0], bool(flags and flags[0]))

    @field_validator("injection_policy", mode="before")
    @classmethod
    def _policy(cls, value: Any) -> dict[type, tuple[str, ...]] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError("give a dict from a module class to the name endings of its linears whose results are summed")
        policy = {}
        for part, names in value.items():
            if not (isinstance(part, type) and issubclass(part, nn.Module)):
                raise ValueError(f"{part!r} is no subclass of torch.nn.Module")
            names = (names,) if isinstance(names, str) else names
            if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{part.__name__}: {names!r} is neither a name ending of a linear nor a tuple of such")
            policy[part] = tuple(names)
        return policy

    @field_validator("options", mode="after")
    @classmethod
    def _options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        try:
            Options.parse(({"dtype": "int8"} if info.data.get("dtype") == torch.int8 else {}) | value)
        except DsiError as error:
            raise ValueError(str(error).removeprefix("dsi: ")) from None
        return value

    @model_validator(mode="after")
    def _groups(self) -> InferenceConfig:
        twins = [key for key in ("group_size", "quantize_groups", "mlp_extra_grouping") if self.options.get(key)]
        if self.quantization_setting is not None and twins:
            raise ValueError(f"quantization_setting and options[{twins[0]!r}] are two ways to group a weight; give one of them")
        return self

    @model_validator(mode="after")
    def _lengths(self) -> InferenceConfig:
        if self.min_out_tokens > self.max_out_tokens:
            raise ValueError(f"min_out_tokens = {self.min_out_tokens} is more than max_out_tokens = {self.max_out_tokens}")
        return self


def _from_json(path: Path) -> Mapping[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once_each)
    except OSError as error:
        raise ConfigError(f"dsi: config {str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"dsi: config {str(path)!r} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"dsi: config {str(path)!r} holds a {type(read).__name__}; it must hold an object of keys and values")
    return read


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises ValueError where JSON would take the last of several values of a key in silence."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} is there twice")
        made[key] = value
    return made


def _merged(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, under the fields' names. Raises `ConfigError` where they contradict each other."""
    names = InferenceConfig.names()
    spelled = {names.get(key, key): key for key in config}
    merged = dict(config)
    for key, value in given.items():
        twin = spelled.get(names.get(key, key))
        if twin is None:
            merged[key] = value
        elif not same(names.get(key, key), config[twin], value):
            raise ConfigError(f"dsi: config has {twin!r} = {config[twin]!r}, and the call {key!r} = {value!r}: give one of them")
    return merged


def _sentences(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        message = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"].lower()
        key = ".".join(str(part) for part in item["loc"])
        parts.append(f"{key} = {item['input']!r}: {message}" if key else message)
    return "dsi: " + "; ".join(parts)
