"""Generate and compile kernels in many processes: what they find out lies in Triton's cache on disk, where a launch finds it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench import path


@dataclass
class Compiled:
    """A choice's kernels, or why there are none. `spills` are bytes of registers that did not fit, of the worst kernel."""

    kernels: tuple[Any, ...] = ()
    spills: int = 0
    problem: str = ""


class CompilePool:
    """Processes that compile for this machine's GPU, one a core but one. To be used as a context manager."""

    def __init__(self, device_name: str, workers: int | None = None):
        self.device_name = device_name
        count = workers or max((os.cpu_count() or 2) - 1, 1)
        # Not forked: this process has a CUDA context, which a fork cannot use.
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)

    def submit(self, spec: Any, choices: Sequence[Any]) -> list[Future[Compiled]]:
        """Queues the choices of one specification, in order."""
        return [self._pool.submit(compile_choice, spec, choice, self.device_name) for choice in choices]

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _start() -> None:
    path.backend()  # so that the package is found


def generated(spec: Any, choice: Any, device_name: str) -> Compiled:
    """A choice's kernels as source text."""
    from dsi.codegen.devices import find_device

    from dsi import codegen

    try:
        return Compiled(codegen.generate(spec, choice, find_device(device_name)))
    except Exception as error:  # a refusal, or a choice that makes no sense: the sweep goes on
        return Compiled(problem=_sentence(error))


def runner(spec: Any, kernels: Sequence[Any], device: Any) -> Any:
    """What launches a specification's kernels, each as if another had just been launched before it."""
    import sympy
    from dsi.runtime.cache import DiskCache
    from dsi.runtime.kernels import KernelSet
    from dsi.runtime.launch import GeneratedKernel
    from dsi.runtime.sizes import Sizes

    found = KernelSet(tuple(kernels), sympy.Integer(1), {})
    return GeneratedKernel(found, (), Sizes(()), DiskCache("bench", enabled=False), device, overlaps=True)


def compile_choice(spec: Any, choice: Any, device_name: str) -> Compiled:
    """A choice's kernels, compiled as `runner` launches them."""
    import torch

    made = generated(spec, choice, device_name)
    if made.problem:
        return made
    try:
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in (spec.inputs, spec.outputs)]
        compiled = runner(spec, made.kernels, torch.device("cuda", torch.cuda.current_device())).compile(*dtypes, ())
        made.spills = max((kernel.n_spills or 0 for kernel in compiled), default=0)
    except Exception as error:  # out of shared memory, or an error inside Triton
        made.problem = _sentence(error)
    return made


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
