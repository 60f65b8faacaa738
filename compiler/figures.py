"""What a region should cost on a device: bytes, operations and time by the cost model, beside the least that the device allows."""

from __future__ import annotations

from dataclasses import dataclass

from dsi.codegen import cost
from dsi.codegen.devices import H200, Device
from dsi.codegen.few_launches import launches_spared, note
from dsi.ir.context import Report
from dsi.ir.errors import Refused
from dsi.ir.region import Region
from dsi.ir.tile import KernelSpec


@dataclass(frozen=True)
class Figures:
    """Predictions for one region and one row count.

    `bytes` moved from and to memory, `flops` of the contractions (a multiply-add is two), `seconds` predicted. `floor` is the roofline's
    bound: the longer of moving the bytes and doing the operations at the device's full rates. `assumed` says what symbolic sizes were
    taken to be.
    """

    schedule: str
    bytes: float
    flops: float
    seconds: float
    floor: float
    limit: str  # "memory" or "compute": which of the two the floor is
    device: str
    assumed: str = ""
    rival: str = ""  # the schedule of the best choice of the other kind, a library's kernels or ours, where both may be used
    rival_seconds: float = 0.0

    @property
    def share(self) -> float:
        """The part of the roofline that the prediction reaches, launching included: floor / seconds."""
        return self.floor / self.seconds

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def this_device() -> Device:
    """The device that figures are for: the one that is there if the table knows it, else the H200."""
    import torch
    from dsi.codegen.devices import find_device

    return find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else H200


def variants(region: Region, device: Device) -> list[Figures]:
    """Figures of every variant of a region's kernel, smallest row bucket first; [] for a region that no kernel is printed for."""
    if region.spec is None:
        return []
    try:
        choices = cost.choices(region.spec, device)
    except Refused:
        return []
    return [_figures(region, choice, device) for choice in choices]


def figures_of(region: Region, device: Device) -> Figures | None:
    """Figures of the variant that takes any number of rows (or the region's very number)."""
    found = variants(region, device)
    return found[-1] if found else None


def launches_noted(report: Report) -> list[str]:
    """What a user should know of launches that a graph is spared on a GPU; [] where none are."""
    if report.unfused or report.custom:
        return []  # who knows how long the device needs for these
    spared = launches_spared([region.spec for region in report.regions], this_device())
    return [note(spared)] if spared else []


def _figures(region: Region, choice: cost.Choice, device: Device) -> Figures:
    spec = region.spec
    assert spec is not None
    assumed = cost.assumptions(spec.plan, choice)
    moved = cost.evaluate(cost.traffic(spec), assumed)
    flops = cost.evaluate(cost.work(spec.plan), assumed)
    itemsize = min((t.dtype.itemsize for t in spec.inputs if t is not None and t.dtype.is_floating_point), default=4)
    rival = _rival(spec, choice, device)
    memory, compute = moved / device.bandwidth, flops / device.matrix.get(itemsize, device.vector)
    return Figures(
        choice.schedule,
        moved,
        flops,
        cost.predict(spec, choice, device),
        max(memory, compute),
        "memory" if memory >= compute else "compute",
        device.name,
        ", ".join(f"{symbol} = {number}" for symbol, number in assumed.items()),
        "" if rival is None else rival.schedule,
        0.0 if rival is None else cost.predict(spec, rival, device),
    )


def _rival(spec: KernelSpec, choice: cost.Choice, device: Device) -> cost.Choice | None:
    """The best choice of the other kind."""
    if not spec.library:
        return None
    ours = choice.schedule != "library"
    return next((other for other in cost.candidates(spec, choice.max_rows, device) if (other.schedule == "library") == ours), None)


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix: "1.18 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def microseconds(seconds: float) -> str:
    """ "3.4 µs"; from a millisecond on "1.2 ms"."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """A share as "64%", "3.2%" or "0.31%"."""
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
