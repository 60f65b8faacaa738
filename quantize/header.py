"""What the file of a quantised model says about its modules, and whether it can be meant: the metadata beside the tensors."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import torch
from dsi.ir.errors import DsiError
from dsi.ir.quantised_ops import ACTIVATIONS
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from . import checksums
from .formats import Format, Grouping
from .int8 import Quantised, short
from .modules import QuantisedEmbedding, QuantisedLinear

FORMAT: Final = "dsi quantised model"
VERSION: Final = 2
UNCHECKED: Final = 1  # the version before files had checksums, which is read, too

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
Count = Annotated[int, Field(ge=0)]
Scales = Literal["float32", "float16"]
Float = Literal["float32", "float16", "bfloat16", "float64"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Linear(_Part):
    """A `QuantisedLinear`: its sizes, its number format, and the dtypes of its tensors."""

    shape: list[Count] = Field(min_length=2, max_length=2)
    scales: list[Count]
    group: Count
    grouping: Literal["row", "inner", "flat"]
    size: Count
    scale_dtype: Scales = Field(alias="scale dtype")
    stored_scale_dtype: Scales = Field(alias="stored scale dtype")
    bias: Float | None
    activations: str
    dtype: Float | None = None  # of the floating-point weight

    @field_validator("activations")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ACTIVATIONS:
            raise ValueError(f"known are {', '.join(map(repr, ACTIVATIONS))}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Linear:
        n, k = self.shape
        if self.scales != ([n, -(-k // self.group)] if self.group else [n]):
            raise ValueError(
                f"{self.scales} scales are not those of a weight {self.shape} with {self.group or 'all'} entries along K a scale"
            )
        try:
            Grouping(self.grouping, self.size)
        except DsiError as error:
            raise ValueError(str(error)) from None
        return self

    @classmethod
    def of(cls, module: QuantisedLinear) -> Linear:
        """What the file says of `module`."""
        said = {
            "shape": [module.out_features, module.in_features],
            "scales": [*module.scales.shape],
            "group": module.group,
            "grouping": module.form.grouping.kind,
            "size": module.form.grouping.size,
            "scale dtype": short(module.form.scales),
            "stored scale dtype": short(module.scales.dtype),
            "bias": None if module.bias is None else short(module.bias.dtype),
            "activations": module.activations,
            "dtype": None if module.dtype is None else short(module.dtype),
        }
        return cls.model_validate(said)

    def made(self) -> QuantisedLinear:
        """The module, on the meta device."""
        n, k = self.shape
        with torch.device("meta"):
            scales = torch.empty(self.scales, dtype=_FLOATS[self.stored_scale_dtype])
            empty = Quantised(torch.empty(n, k, dtype=torch.int8), scales, self.group)
            bias = None if self.bias is None else torch.empty(n, dtype=_FLOATS[self.bias])
        form = Format(Grouping(self.grouping, self.size), _FLOATS[self.scale_dtype])
        dtype = None if self.dtype is None else _FLOATS[self.dtype]
        return QuantisedLinear(empty, bias, form=form, activations=self.activations, dtype=dtype)


class Table(_Part):
    """A `QuantisedEmbedding`: the head whose int8 it reads, and the dtype of its rows."""

    head: str
    dtype: Float
    padding_idx: int | None

    @classmethod
    def of(cls, module: QuantisedEmbedding, head: str) -> Table:
        """What the file says of `module`, the name of whose head is `head`."""
        return cls.model_validate({"head": head, "dtype": short(module.dtype), "padding_idx": module.padding_idx})

    def made(self, head: QuantisedLinear) -> QuantisedEmbedding:
        """The module."""
        return QuantisedEmbedding(head, _FLOATS[self.dtype], padding_idx=self.padding_idx)


class Header(_Part):
    """`linears` and `tables` by the names of their modules; `aliases`: tensors that are others, name -> name; `checksums` of the tensors
    that are stored, by name, and `checksum`, that of all the rest here."""

    format: Literal["dsi quantised model"] = FORMAT
    version: Literal[1, 2] = VERSION
    linears: dict[str, Linear]
    tables: dict[str, Table]
    aliases: dict[str, str]
    checksums: dict[str, Count] = {}
    checksum: Count = 0

    @model_validator(mode="after")
    def _heads(self) -> Header:
        for name, table in self.tables.items():
            if table.head not in self.linears:
                raise ValueError(f"the table {name} reads the int8 of {table.head}, which is none of the linears")
        return self

    def written(self) -> dict[str, Any]:
        """What the file says, with the checksum of that."""
        said = self.model_dump(by_alias=True)
        return {**said, "checksum": checksums.of_metadata(said)}

    @classmethod
    def read(cls, header: Any, path: Any) -> Header:
        """The metadata of `path`. Raises `DsiError` for that of no such file, of another version, and for what cannot be meant."""
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise DsiError(f"{path} holds no quantised model: it was not written by save_quantised")
        if (version := header.get("version")) not in (UNCHECKED, VERSION) or type(version) is not int:
            raise DsiError(
                f"{path} has version {version!r} of the format, and this dsi reads versions {UNCHECKED} and {VERSION}: quantise the model "
                "again and save it with this version"
            )
        if version != UNCHECKED and header.get("checksum") != checksums.of_metadata(header):
            raise DsiError(f"{path} is damaged: its metadata is not what was written. Copy or fetch the file again, or write it anew")
        try:
            return cls.model_validate(header)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            text = first["msg"].removeprefix("Value error, ")
            raise DsiError(f"{path} is damaged: in its metadata, {place + ': ' if place else ''}{text[:1].lower()}{text[1:]}") from None
