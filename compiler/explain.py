"""`dsi.explain`: what was recognised, fused and left in a model, as a value and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.ir.context import Report
from dsi.ir.errors import Refusal
from dsi.ir.region import Region


@dataclass
class Explanation:
    """What happened to the graphs of one call of a model, in the order in which they were compiled.

    `hits` counts each rule over all graphs; `misses` has the nearest miss of rules that fired in none; `unfused` are operators left as
    they were. `str()` is made for reading.
    """

    graphs: list[Report] = field(default_factory=list)

    @property
    def hits(self) -> Counter[str]:
        """Rule name -> times it fired."""
        return sum((g.hits for g in self.graphs), Counter())

    @property
    def regions(self) -> list[Region]:
        """Every region, in order."""
        return [r for g in self.graphs for r in g.regions]

    @property
    def unfused(self) -> list[Refusal]:
        """Operators left to ATen or outside regions, and why."""
        return [u for g in self.graphs for u in g.unfused]

    @property
    def misses(self) -> dict[str, Refusal]:
        """Rule name -> nearest miss, for rules that fired in no graph."""
        hits = self.hits
        return {name: miss for g in self.graphs for name, miss in g.misses.items() if not hits[name]}

    @property
    def notes(self) -> list[str]:
        """What a user should know: graphs stepped aside from, copies of whole caches, fallbacks."""
        return list(dict.fromkeys(n for g in self.graphs for n in g.notes))

    def __str__(self) -> str:
        count = len(self.graphs)
        lines = [f"dsi: {count} graph{'' if count == 1 else 's'}, {len(self.regions)} regions"]
        lines += _section("Rules that fired", [f"{n:6d}  {name}" for name, n in sorted(self.hits.items(), key=lambda i: (-i[1], i[0]))])
        lines += _section("Regions", _region_lines(self.regions))
        lines += _section("Left as they were", _counted(self.unfused))
        lines += _section(
            "Rules that did not fire, and the nearest miss", [f"{name}: {miss}" for name, miss in sorted(self.misses.items())]
        )
        lines += _section("Notes", self.notes)
        return "\n".join(lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _region_lines(regions: list[Region]) -> list[str]:
    """Regions counted by kind, and below each kind by label."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for region in regions:
        kinds[region.kind][region.label] += 1
    lines = []
    for kind, labels in kinds.items():
        lines.append(f"{labels.total():4d}  {kind}")
        lines += [f"        {n:4d}  {label}" for label, n in labels.items() if label]
    return lines


def _counted(refusals: list[Refusal]) -> list[str]:
    """One line a reason: models repeat their layers, so reasons repeat with other nodes."""
    groups: dict[tuple[str, str], list[Refusal]] = defaultdict(list)
    for refusal in refusals:
        groups[(refusal.rule, refusal.reason)].append(refusal)
    return [str(group[0]) + (f", and {len(group) - 1} more like it" if len(group) > 1 else "") for group in groups.values()]


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Compile `model` for one call with `args` and `kwargs`, without gradients, and say what dsi did.

    The call is really made, so a cache among the arguments is written to. `options` are those of `torch.compile(..., backend="dsi")`;
    every other keyword goes to the model. What was compiled before stays valid.
    """
    from .backend import dsi
    from .observe import collecting

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return dsi(gm, example_inputs, options=options)

    # A backend of its own makes Dynamo compile again, whatever it has compiled with another.
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad(), collecting() as contexts:
        compiled(*args, **kwargs)
    return Explanation([context.report for context in contexts])
