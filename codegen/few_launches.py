"""Choices for a program whose kernels take the device less than a call costs the host: one launch a region, where that is near the best.

While the device waits for the host, a launch saved is time saved, and a microsecond of a kernel's is none. Whether it waits is a property
of the whole program: one of many layers keeps the choices that are fastest on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsi.ir import tile as t
from dsi.ir.errors import Refused

from . import cost, emit
from .devices import Device
from .kernel import Choice
from .roofline import rows_of, traffic

# Seconds that a call costs the host before its first kernel is under way: on an H200's host Dynamo's guards and wrappers alone took 16 to
# 24 us, and a launch 7 (2026-11-30, the four regions of `python -m bench regions`). A shorter program never keeps the device busy.
HOST_CALL = 20e-6
# Seconds that one launch may take longer than two: well below the 12 to 16 us that a kernel's step cost the same host.
DEARER = 2e-6


def host_bound(specs: Sequence[t.KernelSpec | None], device: Device) -> bool:
    """Whether the kernels of a program's regions together should take the device less than a call costs the host. False where a region has
    no kernel, or a size that is not known."""
    seconds = 0.0
    for spec in specs:
        if spec is None or not rows_of(spec.plan).is_Integer or traffic(spec).free_symbols:
            return False
        try:
            seconds += sum(cost.predict(spec, choice, device) for choice in cost.choices(spec, device))
        except (Refused, NotImplementedError):
            return False
        if seconds > HOST_CALL:
            return False
    return bool(specs)


def in_one_launch(spec: t.KernelSpec, choice: Choice, device: Device) -> Choice | None:
    """The choice that should be fastest of those that need one launch; None where none is near `choice`, which needs several, in time."""
    most = cost.predict(spec, choice, device) + DEARER
    within = dataclasses.replace(choice, apart=False)
    others = [other for other in (within, *cost.candidates(spec, choice.max_rows, device)) if not other.apart and other != choice]
    timed = sorted(((cost.predict(spec, other, device), number) for number, other in enumerate(others)))
    near = (others[number] for seconds, number in timed if seconds <= most)
    return next((other for other in near if _launches(spec, other, device) == 1), None)


def launches_spared(specs: Sequence[t.KernelSpec | None], device: Device) -> int:
    """How many launches of a program of these regions are spared by choices of one launch, as an untuned start has them."""
    if not host_bound(specs, device):
        return 0
    spared = 0
    for spec in specs:
        assert spec is not None
        for choice in cost.choices(spec, device):
            launches = _launches(spec, choice, device)
            spared += launches - 1 if launches > 1 and in_one_launch(spec, choice, device) is not None else 0
    return spared


def note(spared: int) -> str:
    """What a report says of it."""
    return (
        "the kernels of a call should take a GPU less than launching them takes the host; launches spared by kernels that alone are not "
        f"the fastest, where a call is not recorded: {spared}"
    )


def _launches(spec: t.KernelSpec, choice: Choice, device: Device) -> int:
    (kernel,) = emit.generate(spec, choice, device)
    return len(kernel.launches)
