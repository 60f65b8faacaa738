"""Choices that were measured to be the fastest: what a linear starts with where nothing has been tuned on the device at hand.

`defaults.json` has, for each device, what won in sweeps (`python -m bench linear --sweep --defaults FILE`), by what a choice depends on:
rows, columns and contracted elements, how many sums stand side by side, how the weights lie, and what they are. A linear that was not
measured takes the choice of the nearest one that was, if that is near: its time depends on how many bytes a program reads and on how many
programs there are, and both change little from one such shape to the next. Where nothing is near, the cost model decides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsi.ir import tile as t
from pydantic import BaseModel, ConfigDict, Field

from . import attention_defaults
from .devices import Device, find_device
from .entries import read_entries, write_entries
from .kernel import Choice
from .library import library_seconds, possible
from .linear_choices import GEMV_ROWS, SKINNY_ROWS, admissible, statistics_block
from .linear_cost import LinearWork, linear_seconds, linear_work
from .roofline import assumed_rows, assumptions, rows_of

FILE = Path(__file__).with_name("defaults.json")
NEAR = 1.0  # of `distance`: columns and contracted elements within a factor of two together
OTHER_NORM = 0.25  # what another norm before the product counts


class Entry(BaseModel):
    """One measured linear: `us` microseconds with `choice` (fields of `Choice` that are not their defaults), and what it was chosen for.
    Without `us` the choice made a whole step faster, and was not timed alone.

    `columns` of all windows together, `inner` contracted elements, `sums` side by side in a program at most, `held` lanes of a group,
    `across` for weights stored [K, N], bytes of an element of the rows and of a weight, `norm` the kind of row statistics before the
    product.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(ge=1)
    columns: int = Field(ge=1)
    inner: int = Field(ge=1)
    sums: int = 1
    held: int = 1
    across: bool = False
    row_bytes: int = 2
    weight_bytes: int = 2
    norm: str = ""
    choice: dict[str, Any]
    us: float | None = Field(None, gt=0)
    library: float | None = None  # microseconds by a library's kernels; None where they were not tried

    @property
    def key(self) -> tuple[Any, ...]:
        """What no two entries of a device share."""
        return (*self.kind, self.rows, self.columns, self.inner, self.norm)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for a choice to be of use."""
        return (self.sums, self.held, self.across, self.row_bytes, self.weight_bytes)

    def distance(self, other: Entry) -> float | None:
        """How far the shape of another linear is, in doublings; None where a choice for this one is no choice for that."""
        if self.kind != other.kind:
            return None
        if other.rows <= SKINNY_ROWS and not other.rows <= self.rows <= max(4 * other.rows, 8):
            return None  # one block holds all rows
        if other.weight_bytes == 1 and other.rows <= GEMV_ROWS < self.rows:
            return None  # so few rows meet int8 without the matrix units
        if other.rows > SKINNY_ROWS and not other.rows <= 2 * self.rows <= 4 * other.rows:
            return None
        sizes = ((self.columns, other.columns), (self.inner, other.inner))
        apart = sum(abs(math.log2(one / two)) for one, two in sizes) + abs(math.log2(self.rows / other.rows)) / 4
        return apart + (OTHER_NORM if self.norm != other.norm else 0.0)


def entry(spec: t.KernelSpec, choice: Choice, us: float | None, rows: int | None = None, library: float | None = None) -> Entry:
    """What is kept of a measurement of a linear region: at `rows` rows, or the number that its plan has."""
    return _entry(_work(spec, rows), choice, us, library)


def lookup(spec: t.KernelSpec, max_rows: int | None, device_name: str) -> Choice | None:
    """The choice for a region of at most `max_rows` rows (None: any number, or the number that its plan has) on a device, by its CUDA name;
    None where nothing near was measured on such a device."""
    if not isinstance(spec.plan, t.LinearPlan):
        return attention_defaults.lookup(spec, max_rows, device_name)
    device = find_device(device_name)
    known = rows_of(spec.plan).is_Integer
    work = _work(spec, max_rows)
    entries = [entry for entry in table().get(device.name, ()) if spec.library or entry.choice.get("schedule") != "library"]
    found = _nearest(spec, work, max_rows if not known else work.rows, entries, device)
    return None if found is None else dataclasses.replace(found, max_rows=None if known else max_rows)


def _nearest(spec: t.KernelSpec, work: LinearWork, rows: int | None, entries: Sequence[Entry], device: Device) -> Choice | None:
    wanted = _entry(work, None, None)
    measured = [(apart, number) for number, other in enumerate(entries) if (apart := other.distance(wanted)) is not None and apart <= NEAR]
    for apart, number in sorted(measured):
        choice = Choice(**{"max_rows": None, **entries[number].choice})
        if choice.schedule == "library":
            if (rows is None or rows > SKINNY_ROWS) and possible(spec, choice):
                return choice
            continue
        if spec.library and not _ahead(entries[number], spec, work, device):
            return None
        ways = [choice]
        if entries[number].norm != wanted.norm and not work.bare:
            # What every program of the measured one repeated was other rows: whether they are better computed once is asked anew.
            ways = [dataclasses.replace(choice, apart=apart) for apart in (True, False)]
            ways.sort(key=lambda way: linear_seconds(work, way, device))
        for way in ways:
            found = dataclasses.replace(way, block_s=statistics_block(work, way.block_m, way.num_warps))
            # Measured were scales of rows: what those of groups need besides is another kernel's.
            if admissible(work, found, rows, device, same=apart == 0.0 and not work.group):
                return found
    return None


def _ahead(measured: Entry, spec: t.KernelSpec, work: LinearWork, device: Device) -> bool:
    """Whether a kernel of ours that was measured beats a library's: where that was not tried, its prediction. One that was timed in a step
    only beat what was tried there."""
    if measured.us is None or measured.library is not None or work.rows <= SKINNY_ROWS:
        return True
    grown = work.rows * work.columns * work.inner / (measured.rows * measured.columns * measured.inner)
    by_library = Choice("library", None, 1, 1)
    seconds = library_seconds(spec, work.rows, assumptions(spec.plan, by_library), device)
    return measured.us * 1e-6 * grown <= seconds or not possible(spec, by_library)


def _work(spec: t.KernelSpec, rows: int | None) -> LinearWork:
    judged = Choice("", rows, 1, 1)
    return linear_work(spec, assumed_rows(spec.plan, judged), assumptions(spec.plan, judged))


def _entry(work: LinearWork, choice: Choice | None, us: float | None, library: float | None = None) -> Entry:
    fields = {} if choice is None else {f.name: getattr(choice, f.name) for f in dataclasses.fields(choice)}
    kept = {f.name: f.default for f in dataclasses.fields(Choice)}
    return Entry(
        rows=work.rows,
        columns=work.columns,
        inner=work.inner,
        sums=work.accumulators,
        held=work.held,
        across=work.across,
        row_bytes=work.x_bytes,
        weight_bytes=max(round(work.weight_bytes / (work.inner * work.columns)), 1),
        norm=" ".join(work.reductions),
        choice={name: value for name, value in fields.items() if name not in ("max_rows", "block_s") and value != kept[name]},
        us=None if us is None else round(us, 2),
        library=None if library is None else round(library, 2),
    )


# -------------------------------------------------------------------------------------------------------------------------- file


@functools.cache
def table() -> dict[str, tuple[Entry, ...]]:
    """The entries that ship, by the name of the device."""
    return read(FILE)


def read(path: Path) -> dict[str, tuple[Entry, ...]]:
    """The entries of a file by device. Raises ValueError where it is of another format."""
    return read_entries(path, Entry)


def write(path: Path, device_name: str, entries: Sequence[Entry]) -> None:
    """Adds entries for a device, by its CUDA name, to a file that may not exist yet; one with the same key is replaced. The file is
    whole at any time."""
    found = read(path) if path.exists() else {}
    name = find_device(device_name).name
    merged = {other.key: other for other in (*found.get(name, ()), *entries)}
    found[name] = tuple(sorted(merged.values(), key=lambda other: (other.rows, other.columns, other.inner, str(other.key))))
    write_entries(path, found)
