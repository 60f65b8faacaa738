"""The options of one compilation, validated before anything is changed."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    rules: tuple[Any, ...] = Field((), description="Further rules (dsi.Rule classes) for this compilation.")
    cache: bool = Field(True, description="Whether kernels and choices are cached on disk (environment: DSI_CACHE=0).")
    executor: Literal["auto", "reference"] = Field(
        "auto", description="'auto': by device. 'reference': every operator runs as its reference, for checking; never fast."
    )

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
        else:
            parts.append(f"option {key!r} = {item.get('input')!r}: {item['msg'].lower()}")
    return "dsi: " + "; ".join(parts)
