"""Files of what was measured: entries by the name of the device, one a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

FORMAT = 1
Kind = TypeVar("Kind", bound=BaseModel)


def read_entries(path: Path, kind: type[Kind]) -> dict[str, tuple[Kind, ...]]:
    """The entries of a file by device. Raises ValueError where it is of another format."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("devices"), dict):
        found = stored.get("format") if isinstance(stored, dict) else type(stored).__name__
        raise ValueError(f"{path.name} has format {found}, and {FORMAT} with devices is read")
    return {device: tuple(kind(**value) for value in values) for device, values in stored["devices"].items()}


def write_entries(path: Path, entries: Mapping[str, Sequence[BaseModel]]) -> None:
    """Write the entries of all devices. The file is whole at any time."""
    lines = []
    for device, values in sorted(entries.items()):
        each = ",\n".join("   " + json.dumps(value.model_dump(exclude_defaults=True)) for value in values)
        lines.append(f'  "{device}": [\n{each}\n  ]' if values else f'  "{device}": []')
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")  # a run that is ended while it writes must not leave half a table
    new.write_text(f'{{"format": {FORMAT}, "devices": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    new.replace(path)
