"""A region whose kernel the device cannot hold runs with fewer steps in flight, and at last by references; the report says so."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.codegen.kernel import Kernel, Launch
from dsi.ir.context import Context
from dsi.ir.errors import Refusal
from dsi.ir.region import Region

from .kernels import KernelSet, keep
from .launch import GeneratedKernel
from .program import ReferenceKernel, RegionKernel
from .sizes import Environment

log = logging.getLogger("dsi.runtime")


class FallingBack:
    """Runs a region by `kernel`, until that asks for more shared memory or registers than the device has.

    How much a kernel needs is known when Triton has compiled it, which the choice of its blocks could only estimate (tiles of branches that
    exclude each other may lie side by side). Then `remake` makes it again with one step less of its loop in flight, as long as there are
    two; after that references run. Nothing of a region's results was stored by then that is not stored anew.
    """

    def __init__(self, kernel: GeneratedKernel, region: Region, context: Context, remake: Callable[[KernelSet], GeneratedKernel]):
        self.allocate = kernel.allocate
        self._kernel, self._region, self._context, self._remake = kernel, region, context, remake
        self._instead: RegionKernel | None = None
        # (inputs, outputs, sizes) -> None: what a call does, but for what `failed` does.
        self.run = _run_of(kernel)

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        try:
            self.run(inputs, outputs, sizes)
        except Exception as error:
            self.failed(error, inputs, outputs, sizes)

    def failed(self, error: Exception, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        """Runs the region otherwise where its kernel raised that the device cannot hold it. To be called while `error` is handled, which it
        raises where it is another."""
        if self._instead is not None or not isinstance(error, _out_of_resources()):
            raise
        self._shrink(sizes, str(error).strip())
        self(inputs, outputs, sizes)

    @property
    def kernel(self) -> GeneratedKernel:
        """The generated kernel that runs the region where nothing has taken its place."""
        return self._kernel

    @property
    def launches(self) -> int:
        """How many launches a call is at most, by the generated kernel."""
        return self._kernel.launches

    def remade(self, variants: Sequence[Kernel]) -> GeneratedKernel:
        """Other variants of the region's kernel, for its place in the program; `use` has one run it."""
        return self._remake(dataclasses.replace(self._kernel.found, variants=tuple(variants)))

    def use(self, kernel: RegionKernel) -> None:
        """Has `kernel` run the region from the next call on. What that raises is raised: nothing takes its place."""
        self._instead, self.run = kernel, _run_of(kernel)

    def _shrink(self, sizes: Environment, reason: str) -> None:
        """Puts a smaller kernel in the place of one that does not fit; where there is none, the references."""
        failed = self._kernel.chosen(sizes)
        smaller = fewer_stages(failed)
        if smaller is None:
            self._instead = self.run = ReferenceKernel(self._region)
            refusal = Refusal(f"its kernel does not fit the device, so it runs by references: {reason}", node=self._region.name)
            self._context.report.unfused.append(refusal)
            log.warning("dsi: %s: %s", self._region.name, refusal.reason)
            return
        found = self._kernel.found
        found = dataclasses.replace(found, variants=tuple(smaller if kernel is failed else kernel for kernel in found.variants))
        keep(self._region, self._context, found)
        self._kernel = self._remake(found)
        self.run = _run_of(self._kernel)
        note = f"{self._region.name}: its kernel does not fit the device, so fewer steps of its loop are in flight: {reason}"
        self._context.report.notes.append(note)
        log.info("dsi: %s", note)

    def describe(self) -> str:
        return self._kernel.describe() if self._instead is None else self._instead.describe()


def _run_of(kernel: RegionKernel) -> Callable[..., Any]:
    """What a call of a kernel runs: where it says so itself, that, one step less on the way."""
    return getattr(kernel, "run", kernel)


def _out_of_resources() -> type[BaseException]:
    """What Triton raises for a kernel that its device cannot hold. Looked for when something was raised: it would cost each call."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def fewer_stages(kernel: Kernel) -> Kernel | None:
    """The kernel with one stage less where a launch has most of them; None where no launch has two."""
    most = max((launch.num_stages for launch in kernel.launches if isinstance(launch, Launch)), default=1)
    if most < 2:
        return None
    launches = tuple(
        dataclasses.replace(launch, num_stages=most - 1) if isinstance(launch, Launch) and launch.num_stages == most else launch
        for launch in kernel.launches
    )
    return dataclasses.replace(kernel, launches=launches)
