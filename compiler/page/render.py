"""An explanation as one HTML file that needs nothing else: style, script and pictures are inside."""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
from dsi.codegen.devices import Device
from dsi.ir.custom import CUSTOM
from markupsafe import Markup

from ..figures import microseconds, quantity, this_device
from .details import details
from .model import INPUT, OUTPUT, GraphModel, build
from .svg import draw

if TYPE_CHECKING:
    from ..explain import Explanation


def render(explanation: Explanation, title: str = "model") -> str:
    """The page as text. Graphs that were compiled without being recorded are listed without pictures."""
    device = this_device()
    graphs = []
    for number, report in enumerate(explanation.graphs):
        record = explanation.records[number] if number < len(explanation.records) else None
        if record is None or not record.lowered:
            graphs.append({"number": number, "report": report, "drawn": False})
            continue
        graphs.append(_graph(number, build(record, report, device, CUSTOM), device))
    kinds = Counter(region.kind for region in explanation.regions)
    return _template().render(
        title=title,
        explanation=explanation,
        kinds=kinds,
        graphs=graphs,
        device=device,
        left=explanation.unfused_counted(),
        style=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
    )


def _graph(number: int, model: GraphModel, device: Device) -> dict[str, Any]:
    prefix = f"g{number}-"
    everything = list(model.figures.values())
    counted = Counter(item.kind for item in model.after.items.values() if item.kind not in (INPUT, OUTPUT))
    return {
        "number": number,
        "drawn": True,
        "report": model.report,
        "before": Markup(draw(model.before, prefix, "Before: operators as recognised", narrow=True)),
        "after": Markup(draw(model.after, prefix, "After: regions")),
        "details": [
            {**vars(d), "kernels": _marked(d.kernels), "sources": _marked(d.sources)} for d in details(model, prefix, device, CUSTOM)
        ],
        "kinds": [kind for kind in counted if kind],
        "operators": len([n for n in model.record.recognised if n.op == "call_function"]),
        "totals": [
            ("regions", str(len(model.report.regions))),
            ("bytes", quantity(sum(f.bytes for f in everything), "B")),
            ("operations", quantity(sum(f.flops for f in everything), "FLOP")),
            ("predicted", microseconds(sum(f.seconds for f in everything))),
            ("roofline", microseconds(sum(f.floor for f in everything))),
        ],
    }


def _marked(rows: list[Any]) -> list[Any]:
    """Rows whose second entry is HTML already."""
    return [(row[0], Markup(row[1]), *row[2:]) for row in rows]


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_file("page.html.j2"))
