"""Choices for attention that were measured to be the fastest, as `defaults` holds them for linears.

`attention_defaults.json` has, for each device, what won in sweeps over caches of which a quarter was live, and over prompts
(`python -m bench.attention_sweep --defaults FILE`). An attention of one query that was not measured takes the choice of the nearest one
that was: programs and the keys of each decide its time, and both change little within a factor of two. Of prompts the tile decides, which
is the best one for lengths farther apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dsi.ir import tile as t
from pydantic import BaseModel, ConfigDict, Field

from .devices import find_device
from .entries import read_entries, write_entries
from .kernel import Choice
from .roofline import assumed_rows, assumptions, evaluate, rows_of

FILE = Path(__file__).with_name("attention_defaults.json")
NEAR = 1.0  # doublings
PROMPT = 16  # queries beyond which a region is a prompt's
PROMPTS_NEAR = 4.0  # doublings, of queries, keys and heads together


class AttentionEntry(BaseModel):
    """One measured attention: `heads` key heads of all sequences together, `group` query heads a key head, `keys` of the cache, `size`
    channels of a head, bytes of an element, whether a bool mask hides keys, `queries` (1: a decode step), and whether a prompt's hide the
    keys behind them without a mask. `us` microseconds alone; None where the choice made a whole step faster, and was not timed alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int = Field(ge=1)
    group: int = Field(ge=1)
    keys: int = Field(ge=1)
    size: int = Field(ge=1)
    itemsize: int = 2
    masked: bool = True
    queries: int = Field(1, ge=1)
    causal: bool = False
    choice: dict[str, Any]
    us: float | None = Field(None, gt=0)

    @property
    def key(self) -> tuple[Any, ...]:
        """What an entry is for: two with the same key are two measurements of one thing."""
        return (*self.kind, self.heads, self.keys, self.queries)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for a choice to be of use."""
        return (self.group, self.size, self.itemsize, self.masked, self.causal)

    def distance(self, other: AttentionEntry) -> float | None:
        """How far another is, in doublings; None where a choice for this one is none for that."""
        if self.kind != other.kind:
            return None
        apart = abs(math.log2(self.heads / other.heads)) + abs(math.log2(self.keys / other.keys))
        if self.queries == other.queries == 1:
            return apart
        if min(self.queries, other.queries) <= PROMPT:
            return None
        return (apart + abs(math.log2(self.queries / other.queries))) * NEAR / PROMPTS_NEAR


def entry(spec: t.KernelSpec, choice: dict[str, Any], us: float | None, max_rows: int | None = None) -> AttentionEntry | None:
    """What an attention region of at most `max_rows` queries (None: any number, or the number that its plan has) is looked up by, with a
    choice and its time; None where nothing is kept for such a one."""
    plan = spec.plan
    if not isinstance(plan, t.AttentionPlan) or plan.bias is not None or plan.window or plan.softcap:
        return None
    if plan.head_size != plan.value_size or (plan.mask is not None and plan.mask.dtype != torch.bool):
        return None
    known = rows_of(plan).is_Integer
    judged = Choice("attention_decode", None if known else max_rows, 1, 1)
    assumed = assumptions(plan, judged)
    queries = assumed_rows(plan, judged)
    batch, keys = int(evaluate(plan.batch, assumed)), max(int(evaluate(plan.keys, assumed)), 1)
    return AttentionEntry(
        heads=max(batch, 1) * plan.kv_heads,
        group=plan.heads // plan.kv_heads,
        keys=keys,
        size=plan.head_size,
        itemsize=plan.dtype.itemsize,
        masked=plan.mask is not None,
        queries=queries,
        causal=plan.causal and queries > 1,
        choice=choice,
        us=us,
    )


def lookup(spec: t.KernelSpec, max_rows: int | None, device_name: str) -> Choice | None:
    """The choice for an attention region of at most `max_rows` queries (None: any number, or the number that its plan has) on a device, by
    its CUDA name; None where nothing near was measured."""
    wanted = entry(spec, {}, None, max_rows)
    if wanted is None:
        return None
    near = [(apart, other) for other in table().get(find_device(device_name).name, ()) if (apart := other.distance(wanted)) is not None]
    near = [(apart, other) for apart, other in near if apart <= NEAR]
    if not near:
        return None
    _, nearest = min(near, key=lambda found: found[0])
    known = rows_of(spec.plan).is_Integer
    return Choice(**{"max_rows": None if known else max_rows, **nearest.choice})


def write(path: Path, device_name: str, entries: Sequence[AttentionEntry]) -> None:
    """Adds entries for a device, by its CUDA name, to a file that may not exist yet; one with the same key is replaced. The file is
    whole at any time."""
    found = read(path) if path.exists() else {}
    name = find_device(device_name).name
    found[name] = tuple({other.key: other for other in (*found.get(name, ()), *entries)}.values())
    write_entries(path, found)


def read(path: Path) -> dict[str, tuple[AttentionEntry, ...]]:
    """The entries of a file, by the name of the device. Raises ValueError where it is of another format."""
    return read_entries(path, AttentionEntry)


@functools.cache
def table() -> dict[str, tuple[AttentionEntry, ...]]:
    """The entries that ship."""
    return read(FILE)
