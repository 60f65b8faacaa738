"""The CPU executor: the lowered graph expanded from its regions, compiled by Inductor's C++."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.ir.context import Context
from torch import fx

from . import inductor_api
from .deduplicate import deduplicate
from .expand import CPU_EXPANSIONS, expand
from .kernels import print_kernels
from .program import interpret
from .results import take_writes, writing
from .timing import timed

Boxed = Callable[[list[Any]], Sequence[Any]]

NO_COMPILER = (
    "dsi: no C++ compiler was found (Inductor looks for the one named by CXX, else g++), so graphs on the CPU run operator by operator, "
    "slowly; install one to have them compiled"
)
APART = {"max_fusion_size": 1}
"""What has Inductor make a loop of its own for each operator."""
_warned = threading.Event()
log = logging.getLogger("dsi.runtime")


def compile_cpu(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context) -> Boxed:
    """A boxed callable that computes the lowered graph `gm` on the CPU.

    `example_inputs` are the fakes (and SymInts) that AOTAutograd traced `gm` with. Without a C++ compiler the graph runs operator by
    operator, one warning a process says so, and the report notes it. A graph that Inductor cannot compile is tried once more with each
    operator in a loop of its own; what that cannot help with runs operator by operator, too, with a warning and a note.
    """
    if context.options.dump is not None:
        with timed(context, "kernels"):
            print_kernels(context)
    if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in example_inputs):
        # Nothing is computed there, and passes of Inductor's take values without numbers for constants.
        return interpret(gm, example_inputs, context)
    if inductor_api.cpp_compiler() is None:
        if not _warned.is_set():
            _warned.set()
            warnings.warn(NO_COMPILER, stacklevel=2)
        context.report.notes.append(NO_COMPILER)
        return interpret(gm, example_inputs, context)
    fake_mode = inductor_api.fake_mode_of(example_inputs) or context.fake_mode
    if fake_mode is None:
        raise ValueError("compile_cpu needs fake example inputs, or context.fake_mode")
    reasons: list[str] = []
    for patches in ({}, APART):
        with timed(context, "expand"):
            flat = expand(gm, example_inputs, fake_mode, CPU_EXPANSIONS)
            deduplicate(flat)
            written = take_writes(flat)
        try:
            with timed(context, "inductor"):
                run = writing(inductor_api.compile_graph(flat, example_inputs, {**_patches(context), **patches}, written), written)
        except Exception as error:
            reasons.append(_first_line(error))
            continue
        if reasons:
            _tell(f"each operator is a loop of its own on the CPU, since Inductor cannot compile them together: {reasons[0]}", context)
        return run
    note = f"the graph runs operator by operator on the CPU, slowly, since Inductor cannot compile it: {reasons[-1]}"
    _tell(note, context)
    warnings.warn(f"dsi: {note}", stacklevel=2)
    return interpret(gm, example_inputs, context)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _tell(note: str, context: Context) -> None:
    context.report.notes.append(note)
    log.info("dsi: %s", note)


def _patches(context: Context) -> dict[str, Any]:
    patches = inductor_api.mode_patches(context.options.mode)
    if not context.options.cache:
        patches["fx_graph_cache"] = False
    return patches
