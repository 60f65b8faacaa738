"""A region whose kernel the device cannot hold runs by references, and the report says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.errors import Refusal
from dsi.ir.region import Region

from .launch import GeneratedKernel
from .program import ReferenceKernel
from .sizes import Environment

log = logging.getLogger("dsi.runtime")


class FallingBack:
    """Runs a region by `kernel`, until that asks for more shared memory or registers than the device has.

    How much a kernel needs is known when Triton has compiled it, which the choice of its blocks could only estimate. Nothing of a region's
    results was stored then that the references do not store anew.
    """

    def __init__(self, kernel: GeneratedKernel, region: Region, context: Context):
        self.allocate = kernel.allocate
        self._kernel, self._region, self._context = kernel, region, context
        self._instead: ReferenceKernel | None = None

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        if self._instead is None:
            from triton.runtime.errors import OutOfResources

            try:
                self._kernel(inputs, outputs, sizes)
                return
            except OutOfResources as error:
                self._give_up(str(error).strip())
        assert self._instead is not None
        self._instead(inputs, outputs, sizes)

    def _give_up(self, reason: str) -> None:
        self._instead = ReferenceKernel(self._region)
        refusal = Refusal(f"its kernel does not fit the device, so it runs by references: {reason}", node=self._region.name)
        self._context.report.unfused.append(refusal)
        log.warning("dsi: %s: %s", self._region.name, refusal.reason)

    def describe(self) -> str:
        return self._kernel.describe() if self._instead is None else self._instead.describe()
