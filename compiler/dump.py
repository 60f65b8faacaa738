"""The debug dump: a folder a graph, in it each stage as readable Python with its diff, the rules, the regions and the kernels."""

from __future__ import annotations

import difflib
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from dsi.ir.context import Context
from dsi.ir.errors import DsiError
from dsi.ir.region import Region
from dsi.ir.source import source_line
from torch import fx

from .explain import Explanation
from .printing import target_text, value_text


class Dump:
    """Writes what happens to one graph below `folder`/graph_NNN, where NNN is the next free number.

    Raises `DsiError` if no folder can be made there. Where a file cannot be written later on (a full disk), the
    dump ends with a warning: what is compiled and called meanwhile has no part in it.
    """

    def __init__(self, folder: Path, context: Context):
        self.context = context
        try:
            self.folder = _next_folder(folder)
        except OSError as error:
            raise DsiError(f"dsi: the debug dump cannot be written into {str(folder)!r} (option dump or DSI_DUMP): {error}") from error
        self._before = ""
        self._ended = False

    def graph(self, name: str, text: str) -> None:
        """A stage's result, as "<name>.py", and "<name>.diff" against the stage before where it changed anything."""
        self.write(f"{name}.py", text)
        if self._before and text != self._before:
            lines = difflib.unified_diff(self._before.splitlines(True), text.splitlines(True), "before", f"{name}.py", n=2)
            self.write(f"{name}.diff", "".join(lines))
        self._before = text

    def captured(self, name: str, text: str) -> None:
        """A graph that another tool made (Dynamo, AOTAutograd): nothing to compare it with."""
        self._before = ""
        self.graph(name, text)

    def finish(self) -> None:
        """What is known once the graph is compiled."""
        self.write("rules.txt", rules_text(self.context))
        self.write("report.txt", f"{Explanation([self.context.report])}\n")
        self.write("regions.json", json.dumps([region_record(r, self.context) for r in self.context.report.regions], indent=1))

    def write(self, path: str, text: str) -> None:
        """A file of the dump."""
        if self._ended:
            return
        place = self.folder / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        except OSError as error:
            self._ended = True
            warnings.warn(f"dsi: the debug dump in {self.folder} ends here: {error}", stacklevel=2)


def _next_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        place = folder / f"graph_{number:03d}"
        try:
            place.mkdir()  # fails if it is there, so that two threads or processes never share one
            return place
        except FileExistsError:
            number += 1


def rules_text(context: Context) -> str:
    """Hits, nearest misses, and every rewrite in order, numbered as DSI_FUEL counts them."""
    report = context.report
    lines = ["hits"]
    lines += [f"  {n:5d}  {name}" for name, n in sorted(report.hits.items())]
    lines += ["", "nearest misses of rules that did not fire"]
    lines += [f"  {name}: {miss}" for name, miss in sorted(report.misses.items())]
    lines += ["", "rewrites (DSI_FUEL=n stops after number n)"]
    lines += [f"  {i:5d}  {what}" for i, what in enumerate(context.fuel.log, 1)]
    return "\n".join(lines) + "\n"


def region_record(region: Region, context: Context) -> dict[str, Any]:
    """A region as JSON; `kernels` maps its kernels' files to the SHA-256 of the very text that is compiled."""
    names = (region.name, region.key)
    kernels = {p: t for p, t in context.artifacts.items() if p.startswith("kernels/") and Path(p).name.split(".")[0] in names}
    return {
        "name": region.name,
        "kind": region.kind,
        "label": region.label,
        "key": region.key,
        "inputs": {n.name: value_text(n.meta.get("val")) for n in region.inputs},
        "outputs": [
            {"name": n.name, "value": value_text(n.meta.get("val"))} if isinstance(n, fx.Node) else repr(n) for n in region.outputs
        ],
        "members": [
            {"name": n.name, "target": target_text(n.target), "role": region.roles.get(n.name, ""), "source": source_line(n)}
            for n in region.members
        ],
        "in_place": {str(k): v for k, v in region.in_place.items()},
        "kernels": {p: hashlib.sha256(t.encode()).hexdigest() for p, t in kernels.items()},
    }
