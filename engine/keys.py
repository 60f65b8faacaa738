"""Keys of a configuration: aliases, keys without effect, and keys that nobody knows, told apart before pydantic looks at the values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from .errors import warn


class Section(BaseModel):
    """A part of the configuration. A field is given by its name or its alias; `without_effect` maps further keys that DeepSpeed has to the
    reason why they change nothing here: they are accepted with a warning.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, populate_by_name=True)
    without_effect: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is int:
            raise ValueError("give a number")
        return value

    @classmethod
    def names(cls) -> dict[str, str]:
        """Every key that means something -> the field's name."""
        fields = cls.model_fields.items()
        return {name: name for name, _ in fields} | {field.alias: name for name, field in fields if field.alias}

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, given: Any) -> Any:
        """`given` under the fields' own names. Raises ValueError naming unknown keys and pairs of keys that contradict each other."""
        if not isinstance(given, Mapping):
            return given
        values = cls._redirected({key: value for key, value in given.items() if not (isinstance(value, str) and value == "auto")})
        known, unknown = cls.names(), []
        kept: dict[str, Any] = {}
        spelling: dict[str, str] = {}
        for key, value in values.items():
            if key in cls.without_effect:
                warn(f"dsi: {key!r} has no effect here: {cls.without_effect[key]}")
            elif key not in known:
                unknown.append(cls._unknown(key))
            else:
                name = known[key]
                if name in kept and not same(name, kept[name], value):
                    raise ValueError(f"{spelling[name]!r} = {kept[name]!r} and {key!r} = {value!r} name the same thing: give one of them")
                kept[name], spelling[name] = value, key
        if unknown:
            raise ValueError("; ".join(unknown))
        return kept

    @classmethod
    def _redirected(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`given` with deprecated keys moved to where they belong now."""
        return given

    @classmethod
    def _sections(cls) -> dict[str, type[Section]]:
        """Fields that are sections of their own."""
        return {}

    @classmethod
    def _unknown(cls, key: Any) -> str:
        """The sentence for a key that nobody knows, with the nearest one, here or in a section."""
        own = [*cls.names(), *cls.without_effect]
        inside = {name: section for section, kind in cls._sections().items() for name in (*kind.names(), *kind.without_effect)}
        if key in inside:
            return f"unknown key {key!r}; it belongs into a section: {inside[key]}={{{key!r}: ...}}"
        near = difflib.get_close_matches(str(key), [*own, *inside], 1, 0.5)
        hint = ""
        if near:
            meant = repr(near[0]) if near[0] in own else f"{inside[near[0]]}={{{near[0]!r}: ...}}"
            hint = f"; did you mean {meant}?"
        return f"unknown key {key!r}{hint} (known: {', '.join(cls.names())})"


def same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of the field `name` mean the same."""
    if name == "dtype":
        from .dtypes import dtype_of

        try:
            return dtype_of(one) == dtype_of(other)
        except ValueError:
            return False
    return type(one) is type(other) and one == other
