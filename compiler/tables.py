"""An explanation as tables on a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsi.ir.region import Region
from rich.table import Table
from rich.text import Text

from .figures import Figures, figures_of, microseconds, percent, quantity, this_device

if TYPE_CHECKING:
    from .explain import Explanation

COLOURS = {"linear": "blue", "attention": "dark_orange", "embedding": "green", "row": "magenta", "custom": "deep_pink2"}


def tables(explanation: Explanation) -> Iterator[Table | Text]:
    """What `str(explanation)` says, with what each region should cost."""
    count = len(explanation.graphs)
    yield Text(f"dsi: {count} graph{'' if count == 1 else 's'}, {len(explanation.regions)} regions", style="bold")
    if explanation.hits:
        table = Table("times", "rule", title="Rules that fired", title_justify="left", box=None)
        for name, times in sorted(explanation.hits.items(), key=lambda item: (-item[1], item[0])):
            table.add_row(str(times), name)
        table.columns[0].justify = "right"
        yield table
    if explanation.regions:
        yield _regions(explanation.regions)
    for title, lines in (
        ("Weights in int8", explanation.quantised_counted()),
        ("Operators of your own", explanation.custom_counted()),
        ("Left as they were", explanation.unfused_counted()),
        ("Rules that did not fire, and the nearest miss", _misses(explanation)),
        ("Notes", explanation.notes),
    ):
        if lines:
            yield Text("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))


def _misses(explanation: Explanation) -> list[str]:
    """The misses that have a place. Where the graph holds none of a rule's operators there is nothing to look at."""
    near = [f"{name}: {miss}" for name, miss in sorted(explanation.misses.items()) if miss.node]
    far = [name for name, miss in sorted(explanation.misses.items()) if not miss.node]
    return [*near, f"no operator to begin with: {', '.join(far)}"] if far else near


def _regions(regions: list[Region]) -> Table:
    device = this_device()
    groups: dict[tuple[str, str, str], list[Region]] = defaultdict(list)
    for region in regions:
        groups[region.kind, region.label, region.key or region.name].append(region)
    kinds = Counter(region.kind for region in regions)
    table = Table(
        "times",
        "kind",
        "region",
        "kernel",
        "bytes",
        "operations",
        "predicted",
        "of roofline",
        title=f"Regions: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}; a kernel each, predicted for {device.name}",
        title_justify="left",
        box=None,
    )
    for number in (0, 4, 5, 6, 7):
        table.columns[number].justify = "right"
    total = 0.0
    for (kind, label, _), group in groups.items():
        found = figures_of(group[0], device)
        total += found.seconds * len(group) if found else 0.0
        table.add_row(str(len(group)), Text(kind, style=COLOURS.get(kind, "")), label, _kernel(group[0], found), *_cells(found))
    table.add_section()
    table.add_row(str(len(regions)), "", "together", "", "", "", microseconds(total), "")
    return table


def _kernel(region: Region, found: Figures | None) -> str:
    """What runs a region, and where a library's kernels were weighed against ours, the other's predicted time over its own."""
    if found is None:
        return ""
    made = region.kernels[-1].schedule if region.kernels else found.schedule
    if not found.rival or made not in (found.schedule, found.rival):
        return made
    own, other = (found.seconds, found.rival_seconds) if made == found.schedule else (found.rival_seconds, found.seconds)
    return f"{made} ({other / own:.2f}x {found.rival if made == found.schedule else found.schedule})"


def _cells(found: Figures | None) -> tuple[str, str, str, str]:
    if found is None:
        return ("", "", "no kernel", "")
    return (
        quantity(found.bytes, "B"),
        quantity(found.flops, "FLOP") if found.flops else "",
        microseconds(found.seconds),
        f"{percent(found.share)} ({found.limit})",
    )
