"""`dsi.explain`: what was recognised, fused and left in a model, as a value and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dsi.ir.context import Report
from dsi.ir.errors import Refusal
from dsi.ir.region import Region

from .figures import launches_noted

if TYPE_CHECKING:
    from .record import GraphRecord


@dataclass
class Explanation:
    """What happened to the graphs of one call of a model, in the order in which they were compiled.

    `hits` counts each rule over all graphs; `misses` has the nearest miss of rules that fired in none; `unfused` are operators left as
    they were. `str()` is made for reading; `html(path)` writes a page with pictures of the graphs.
    """

    graphs: list[Report] = field(default_factory=list)
    records: list[GraphRecord] = field(default_factory=list, repr=False)  # what the page draws, a graph each; [] if nothing was taken down
    breaks: list[str] = field(default_factory=list)  # what is in no graph, and why

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
        """What a user should know: what is in no graph, graphs stepped aside from, copies of whole caches, fallbacks, weights to be laid
        out."""
        notes = list(dict.fromkeys([*self.breaks, *(n for g in self.graphs for n in (*g.notes, *launches_noted(g)))]))
        if across := self.across:
            count = f"{len(across)} weights ({across[0]}, …) are" if len(across) > 1 else f"the weight {across[0]} is"
            notes.append(
                f"{count} stored such that what one output reads is far apart: on a GPU, products of a few rows take up to twice as long; "
                "dsi.lay_out(model, <inputs>) stores them by output, in place"
            )
        return notes

    @property
    def across(self) -> list[str]:
        """Names of the weights that every graph which contracts them reads across: `dsi.lay_out` stores them by output."""
        return list(dict.fromkeys(name for g in self.graphs for name in g.across))

    def unfused_counted(self) -> list[str]:
        """One line for each reason why an operator was left, with how often it occurs: models repeat their layers."""
        return _counted(self.unfused)

    def quantised_counted(self) -> list[str]:
        """The weights that are read as int8, counted by shape and number format, bytes before and after; then those that were kept."""
        weights = list(dict.fromkeys(w for g in self.graphs for w in g.quantised))  # graphs of one model share them
        groups = Counter((w.shape, w.format, w.before, w.after) for w in weights)
        lines = [
            f"{n:4d}  {list(shape)}: {form}, {n * before:,} bytes become {n * after:,}"
            for (shape, form, before, after), n in groups.items()
        ]
        if len(groups) > 1:
            lines.append(f"{len(weights):4d}  together: {sum(w.before for w in weights):,} bytes become {sum(w.after for w in weights):,}")
        return lines + [f"kept as it is: {line}" for line in _counted(list(dict.fromkeys(k for g in self.graphs for k in g.kept)))]

    def custom_counted(self) -> list[str]:
        """One line for each operator of a user's own, with how often graphs call it."""
        return [f"{n:4d}  {name}" for name, n in sum((g.custom for g in self.graphs), Counter()).items()]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from .tables import tables

        yield from tables(self)

    def html(self, path: str | Path | None = None, title: str = "model") -> str:
        """The page: one HTML file that needs nothing else. Written to `path` if that is given; returned as text."""
        from .page.render import render

        text = render(self, title)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        count = len(self.graphs)
        lines = [f"dsi: {count} graph{'' if count == 1 else 's'}, {len(self.regions)} regions"]
        lines += _section("Rules that fired", [f"{n:6d}  {name}" for name, n in sorted(self.hits.items(), key=lambda i: (-i[1], i[0]))])
        lines += _section("Regions", _region_lines(self.regions))
        lines += _section("Weights in int8", self.quantised_counted())
        lines += _section("Operators of your own", self.custom_counted())
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
    groups: dict[tuple[str, str], list[Refusal]] = defaultdict(list)
    for refusal in refusals:
        groups[(refusal.rule, refusal.reason)].append(refusal)
    return [str(group[0]) + (f", and {len(group) - 1} more like it" if len(group) > 1 else "") for group in groups.values()]


UNLIMITED = 1 << 20  # compilations of one function


def explain(model: Callable[..., Any], /, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Compile `model` for one call with `args` and `kwargs`, without gradients, and say what dsi did.

    The call is really made, so a cache among the arguments is written to; it runs by the reference functions, since what is wanted is the
    explanation. On the meta device nothing is computed, so that a model of any size can be looked at. `options` are those of
    `torch.compile(..., backend="dsi")`; every other keyword goes to the model. What was compiled before stays valid.
    """
    from dsi.runtime.kernels import print_kernels

    from .backend import dsi
    from .breaks import Breaks
    from .observe import collecting, recording
    from .record import GraphRecord

    given = dict(options or {})
    if "dump" not in given:  # a dump holds what is compiled for this device
        given.setdefault("executor", "reference")

    breaks = Breaks()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        breaks.seen(gm)
        return dsi(gm, example_inputs, options=given)

    # A backend of its own makes Dynamo compile again, whatever it has compiled with another.
    compiled = torch.compile(model, backend=backend)
    # Dynamo counts compilations a function, whatever the model: past its limit it would run eager, and there would be nothing to explain.
    unlimited = torch._dynamo.config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED)
    with unlimited, torch.no_grad(), collecting() as contexts, recording() as records:
        compiled(*args, **kwargs)
    for context in contexts:
        print_kernels(context)
    return Explanation(
        [context.report for context in contexts],
        [records.get(id(context), GraphRecord()) for context in contexts],
        breaks.sentences(len(contexts)),
    )
