"""The table of contents: every stage between Dynamo's graph and the executor, in order.

`compiler.backend` runs the "dynamo" stages on the graph that Dynamo hands over, AOTAutograd in between, and the others on the functional
ATen graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dsi.ir.context import Context
from torch import fx

from .fuse import fuse
from .lift import lift
from .lower import lower
from .normalise import normalise
from .quantise import quantise
from .recognise import recognise


@dataclass(frozen=True)
class Stage:
    """One named step.

    `level` is the kind of graph that it is given: "dynamo" (torch functions), "aten" (functional ATen and semantic operators) or "regions"
    (region calls and leftovers). `leaves` is the level of `ir.spec` that the graph satisfies after it; None at Dynamo's level, which has
    no specification.
    """

    name: str
    level: Literal["dynamo", "aten", "regions"]
    run: Callable[[fx.GraphModule, Context], None]
    leaves: Literal["aten", "regions", "lowered"] | None = None


def shard(gm: fx.GraphModule, context: Context) -> None:
    """Tensor parallelism's place in the pipeline: at one rank there is nothing to cut."""


PIPELINE: tuple[Stage, ...] = (
    Stage("lift", "dynamo", lift),
    Stage("shard", "dynamo", shard),
    Stage("normalise", "aten", normalise, "aten"),
    Stage("recognise", "aten", recognise, "aten"),
    Stage("quantise", "aten", quantise, "aten"),
    Stage("fuse", "aten", fuse, "regions"),
    Stage("lower", "regions", lower, "lowered"),
)
