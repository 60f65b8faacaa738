"""`python -m bench sanitize`: one layer of GPT-2 and one of Llama under compute-sanitizer's memcheck, prompt and decode steps.

Each model runs twice in processes of their own: first as it is, which fills the caches of kernels, then under the checker, with every
tensor in an allocation of its own, so that a read past one does not end in the next.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import path, timing, toolkit
from bench.comparators import DTYPES
from bench.decode import token_ids
from bench.generate import cache_argument, static_cache
from bench.report import Report, Settings
from bench.shapes import SHAPES, build

ROOT = Path(__file__).resolve().parent.parent
MARK = "ran: "
PROMPT, ROOM, STEPS, VOCAB = 37, 96, 3, 1031  # sizes that no block divides
BOUND = 0.05  # relative error against eager: whether it ran at all, not how well


def run(settings: Settings, cases: Sequence[str], batches: Sequence[int], seconds: float) -> Report:
    """Check every case at every batch; a process that runs longer than `seconds` is stopped."""
    report = Report("sanitize", settings)
    tool = sanitizer()
    report.head["tool"] = tool
    for name in cases:
        for batch in batches:
            row: dict[str, Any] = {"case": name, "batch": batch}
            if tool is None:
                row["problem"] = "compute-sanitizer is neither on the PATH nor in a CUDA toolkit (CUDA_HOME, /usr/local/cuda)"
            elif report.fits(f"{name}, b{batch}", 0 if settings.small else 30):
                row |= _checked(settings, tool, name, batch, seconds)
            else:
                continue
            report.add(row)
            report.say(f"{name}, b{batch}: {row.get('problem') or 'no error, ' + ', '.join(row['kernels'])}")
    return report


def sanitizer() -> str | None:
    """The checker's path, if there is one."""
    return toolkit.program("compute-sanitizer")


def child_command(settings: Settings, name: str, batch: int) -> list[str]:
    """What runs `one_layer` in a process of its own."""
    own = [sys.executable, "-m", "bench", "sanitize", "--child", name, "--batches", str(batch)]
    return own + (["--dtype", settings.dtype] if settings.dtype else []) + (["--small"] if settings.small else [])


def _checked(settings: Settings, tool: str, name: str, batch: int, seconds: float) -> dict[str, Any]:
    own = child_command(settings, name, batch)
    found: dict[str, Any] = {}
    for command, more in ((own, {}), ([tool, "--tool", "memcheck", *own], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})):
        start = time.monotonic()
        what = "under the checker" if more else "by itself"
        try:
            done = subprocess.run(
                command, env={**os.environ, **more}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {**found, "problem": f"{what}: stopped after {seconds:.0f} s"}
        found[f"seconds {what}"] = time.monotonic() - start
        marks = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not marks:
            return {**found, "problem": f"{what}: {' '.join((done.stderr or done.stdout).split())[-400:] or done.returncode}"}
        found |= json.loads(marks[-1].removeprefix(MARK))
    return found | verdict(done.stdout + done.stderr)


def verdict(said: str) -> dict[str, Any]:
    """What the checker's words come to: its number of errors, and the first of them as the problem."""
    counts = [int(number) for number in re.findall(r"ERROR SUMMARY: (\d+) error", said)]
    if not counts:
        return {"problem": "the checker gave no summary"}
    errors = [line.strip("= ") for line in said.splitlines() if line.startswith("=========") and line.strip("= ")]
    found: dict[str, Any] = {"errors": sum(counts)}
    if sum(counts):
        found["problem"] = f"{sum(counts)} errors; the first: {' '.join(errors[1:6])[:500]}"
    return found


def one_layer(settings: Settings, name: str, batch: int) -> None:
    """In a process of its own: prompt and decode steps of one layer, compiled without library kernels, beside eager."""
    shape = SHAPES[name].small() if settings.small else dataclasses.replace(SHAPES[name], vocab=VOCAB)
    dtype = DTYPES[settings.dtype or shape.dtype]
    model = build(shape, 1, ROOM, dtype, settings.device)
    prompt, step = token_ids(model, batch, PROMPT), token_ids(model, batch, 1)

    def outputs(forward: Any) -> torch.Tensor:
        argument = {cache_argument(model): static_cache(model, ROOM, batch)}
        logits = [forward(input_ids=prompt, **argument).logits]
        logits += [forward(input_ids=step, **argument).logits for _ in range(STEPS)]
        return torch.cat([part.float().clone() for part in logits], 1)

    backend = path.backend()
    from dsi.compiler.observe import collecting

    with torch.no_grad(), collecting() as contexts:
        expected = outputs(model)
        got = outputs(torch.compile(model, backend=backend, options={"library": False}))
        timing.synchronize()
        error = timing.relative_error(got, expected)
    if not error <= BOUND:
        raise SystemExit(f"{name}: the compiled layer is {error:.1e} off eager")
    kernels = sorted({kernel.name for context in contexts for region in context.report.regions for kernel in region.kernels})
    print(MARK + json.dumps({"error from eager": error, "kernels": kernels}), flush=True)


def good(report: Report) -> bool:
    """Whether every case was checked and no error was found."""
    return bool(report.rows) and not report.skipped and all("problem" not in row for row in report.rows)
