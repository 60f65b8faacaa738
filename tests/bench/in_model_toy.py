"""Run as a script with TRITON_INTERPRET=1: choices tried in a toy's step, with times made up and one choice's kernel spoiled.

    python in_model_toy.py FOLDER

Eight warps make a step faster, two slower, and every other number is as fast. Of the kernels with 16 warps only the first program runs.
Writes FOLDER/rows.json and tables of defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

torch.set_num_threads(1)

from bench import in_model  # noqa: E402
from bench.model_step import ModelStep  # noqa: E402
from bench.report import Settings  # noqa: E402

US = {8: -5.0, 2: 5.0}
made = in_model.generated


def spoiled(spec, choice, device_name):
    found = made(spec, choice, device_name)
    if choice.num_warps == 16:
        kernels = [
            dataclasses.replace(kernel, launches=tuple(dataclasses.replace(launch, grid=(1, 1, 1)) for launch in kernel.launches))
            for kernel in found.kernels
        ]
        found.kernels = tuple(kernels)
    return found


class Timed(ModelStep):
    """Steps whose time is made up of the warps of the kernels that were in place when it was "captured"."""

    timed = True

    def capture(self):
        return [self.warps(place) for _, place in self.program.regions]

    def warps(self, place):
        kernel = place._instead if hasattr(place._instead, "chosen") else None
        if kernel is None:  # by references here: the best one so far
            group = next(group for group in self.groups if any(place is other for _, other in group.places))
            kernel = group.kernels[0]
        return kernel.chosen(()).launches[0].num_warps

    def time(self, captured):
        return 100.0 + sum(US.get(warps, 0.0) for warps in captured)

    def measure_groups(self, captured):
        for group in self.groups:
            group.us = 0.5 * len(group.places)


def main(folder: Path) -> None:
    in_model.generated, in_model.ModelStep = spoiled, Timed
    plan = in_model.Plan(
        [("", {"num_warps": warps}) for warps in (16, 2, 8)], 0, ["linear + add 64x96", "attention"], 2, folder / "table.json"
    )
    in_model.run(Settings(("dsi",), 3, small=True, json=folder / "rows.json"), ["llama-3-8b"], [1], 2, 32, 20, plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
