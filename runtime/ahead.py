"""Compiling a program's kernels side by side before its first call, which would compile them one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from dsi.ir.region import Region

from .launch import GeneratedKernel
from .launcher import start_driver
from .sizes import Environment, Sizes

log = logging.getLogger("dsi.runtime")

THREADS = 8
Made = tuple[Region, GeneratedKernel]


def compile_ahead(made: Sequence[Made], sizes: Environment, device: torch.device) -> None:
    """Compiles the kernels that a call with these sizes launches, each once. What cannot be compiled now says so at its launch."""
    jobs = {(id(kernel.found), kernel.overlaps): (region, kernel) for region, kernel in reversed(made)}

    def compile(job: Made) -> None:
        region, kernel = job
        dtypes = [[_dtype(node.meta["val"]) for node in nodes] for nodes in (region.inputs, region.outputs)]
        try:
            with torch.cuda.device(device):
                kernel.compile(dtypes[0], dtypes[1], sizes)
        except Exception as error:
            log.debug("dsi: %s cannot be compiled ahead: %s", region.name, error)

    start_driver()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile, jobs.values()))


def sizes_now(sizes: Sizes, example_inputs: Sequence[Any]) -> Environment | None:
    """The sizes that the call has for which a graph is compiled; None where they are not known."""
    found = [value.node.hint if isinstance(value, torch.SymInt) else value for value in sizes.bind(example_inputs)]
    return None if any(type(value) is not int for value in found) else tuple(found)


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else value
