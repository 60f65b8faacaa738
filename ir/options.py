"""The options of one compilation, validated before anything is changed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import DsiError

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Options(BaseModel):
    """`torch.compile(model, backend="dsi", options={...})` or `mode="..."`; environment variables fill what is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    mode: Mode = Field("default", description="As torch.compile's modes.")
    dump: Path | None = Field(None, description="Folder for the debug dump (environment: DSI_DUMP).")
    check: bool = Field(
        False, description="Check the IR between stages and compare each graph with its reference (environment: DSI_CHECK=1)."
    )
    fuel: int | None = Field(None, ge=0, description="Stop after this many rewrites, to bisect a miscompile (environment: DSI_FUEL).")
    library: bool = Field(True, description="Whether a library kernel (cuBLAS, SDPA) may be used for a region where it is a candidate.")
    cuda_graphs: bool = Field(
        True, description='Whether the modes "reduce-overhead" and "max-autotune" record CUDA graphs, so that a call is one launch.'
    )
    tuning: float = Field(
        60.0, ge=0, description='Seconds that the "max-autotune" modes may spend on trying kernels on the device, in one compilation.'
    )
    dtype: Literal["int8"] | None = Field(None, description="'int8': linears read their weights as int8 with scales (docs/int8.md).")
    activations: Literal["int8"] | None = Field(
        None, description="'int8': linears of int8 weights round each row of their input to int8, too (W8A8)."
    )
    group_size: Literal[0, 32, 64, 128, 256] = Field(0, description="With dtype='int8': entries along K with one scale; 0: a scale a row.")
    quantize_groups: int | None = Field(
        None, ge=1, description="With dtype='int8': flat row-major groups of a weight, as DeepSpeed counts them, instead of group_size."
    )
    mlp_extra_grouping: bool = Field(False, description="Twice the quantize_groups where a linear feeds an activation or is fed by one.")
    quantize_skip: tuple[str, ...] = Field(
        (), description="With dtype='int8': weights or modules that stay as they are, by name ('*.lm_head')."
    )
    tied_head: Literal["int8", "keep"] = Field(
        "int8", description="With dtype='int8': whether a head that shares its weight with the embedding reads an int8 copy of it."
    )
    rules: tuple[Any, ...] = Field((), description="Further rules (dsi.Rule classes) for this compilation.")
    cache: bool = Field(True, description="Whether kernels and choices are cached on disk (environment: DSI_CACHE=0).")
    tracer: Literal["auto", "aot"] = Field(
        "auto", description="'aot': AOTAutograd traces every graph, plain ones too, which takes longer (environment: DSI_TRACER=aot)."
    )
    executor: Literal["auto", "reference"] = Field(
        "auto", description="'auto': by device. 'reference': every operator runs as its reference, for checking; never fast."
    )

    @field_validator("dump", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("name a folder ('.' is the current one), or leave it out")
        return value

    @field_validator("fuel", "tuning", "group_size", "quantize_groups", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("give a number")
        return value

    @field_validator("dtype", "activations", mode="before")
    @classmethod
    def _int8(cls, value: Any) -> Any:
        return "int8" if value == torch.int8 else value

    @field_validator("rules", mode="before")
    @classmethod
    def _list_of_rules(cls, value: Any) -> Any:
        if isinstance(value, type) or not isinstance(value, Iterable):
            raise ValueError("it is a list of classes derived from dsi.Rule")
        return tuple(value)

    @field_validator("quantize_skip", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _number_format(self) -> Options:
        if self.quantize_groups is not None and self.group_size:
            raise ValueError("quantize_groups and group_size are two ways to group a weight; give one of them")
        if self.mlp_extra_grouping and self.quantize_groups is None:
            raise ValueError("mlp_extra_grouping doubles quantize_groups, which is not given")
        needs = [key for key in ("group_size", "quantize_groups", "quantize_skip") if getattr(self, key)]
        if needs and self.dtype != "int8":
            raise ValueError(f"{', '.join(needs)} say{'s' if len(needs) == 1 else ''} how weights become int8, which dtype='int8' asks for")
        return self

    @classmethod
    def parse(cls, options: dict[str, Any] | None = None, mode: str | None = None) -> Options:
        """Options from what torch.compile hands a backend. Raises `DsiError` naming the key and the nearest known one."""
        given = dict(options or {})
        if mode is not None:
            given.setdefault("mode", mode)
        for key, variable, read in (
            ("dump", "DSI_DUMP", str),
            ("check", "DSI_CHECK", _flag),
            ("fuel", "DSI_FUEL", str),
            ("cache", "DSI_CACHE", _flag),
            ("tracer", "DSI_TRACER", str),
        ):
            if key not in given and os.environ.get(variable):
                given[key] = read(os.environ[variable])
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise DsiError(_sentence(error)) from None


def _flag(text: str) -> bool:
    return text not in ("0", "false", "no", "")


def _sentence(error: ValidationError) -> str:
    known = list(Options.model_fields)
    parts = []
    for item in error.errors():
        key = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, known, 1, 0.4)
            parts.append(f"unknown option {key!r}{f'; did you mean {near[0]!r}?' if near else ''} (known: {', '.join(known)})")
        elif not key:
            parts.append(item["msg"].removeprefix("Value error, "))
        else:
            text = item["msg"].removeprefix("Value error, ")
            parts.append(f"option {key!r} = {item.get('input')!r}: {text[:1].lower()}{text[1:]}")
    return "dsi: " + "; ".join(parts)
