"""`python -m bench bytes`: what a step reads from the device's memory, kernel by kernel, as Nsight Compute counts it, beside what it must.

Each side runs in a process of its own under `ncu`, which counts in one step behind two others. Caches are left as the kernel before leaves
them: weights of a step are larger than the last level, so that what is read twice is counted twice. Other metrics of `ncu` can be counted
beside (`--metrics`), to see what a kernel waits for; kernels run one after another then, whatever they overlap with in a step.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import path, timing, toolkit
from bench.comparators import reset
from bench.decode import workloads
from bench.report import Report, Settings, figure
from bench.sides import SIDES

ROOT = Path(__file__).resolve().parent.parent
MARK = "step: "
METRIC = "dram__bytes_read.sum"
COUNTING = ("--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--print-units", "base", "--csv")
SHOWN = 12  # kernels of a table, by what they read
TAKES = 40.0  # seconds of a side: a model, its compilation, and a step that is counted kernel by kernel


def run(
    settings: Settings,
    cases: Sequence[str],
    batches: Sequence[int],
    layers: int | None,
    cache: int,
    live: int | None,
    seconds: float,
    metrics: Sequence[str] = (),
) -> Report:
    """Count every case at every batch on every side, `metrics` besides; a process that runs longer than `seconds` is stopped."""
    report = Report("bytes", settings)
    tool = counter()
    report.head["tool"] = tool
    for name in cases:
        for batch in batches:
            for side in settings.against:
                if not report.fits(f"{name}, b{batch}, {side}", 0 if settings.small else TAKES):
                    continue
                row: dict[str, Any] = {"case": name, "batch": batch, "side": side}
                if tool is None:
                    row["problem"] = "ncu is neither on the PATH nor in a CUDA toolkit (CUDA_HOME, /usr/local/cuda)"
                else:
                    row |= _counted(tool, child_command(settings, name, batch, side, layers, cache, live), metrics, seconds)
                report.add(row)
                _print(row, metrics, report)
    return report


def counter() -> str | None:
    """Nsight Compute's path, if there is one."""
    return toolkit.program("ncu")


def child_command(settings: Settings, name: str, batch: int, side: str, layers: int | None, cache: int, live: int | None) -> list[str]:
    """What runs `one_step` in a process of its own."""
    own = [sys.executable, "-m", "bench", "bytes", "--child", name, "--batches", str(batch), "--sides", side, "--cache", str(cache)]
    for option, value in (("--layers", layers), ("--live", live), ("--dtype", settings.dtype)):
        own += [option, str(value)] if value is not None else []
    return own + (["--small"] if settings.small else [])


def _counted(tool: str, own: Sequence[str], metrics: Sequence[str], seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [tool, "--metrics", ",".join((METRIC, *metrics)), *COUNTING, *own],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"stopped after {seconds:.0f} s"}
    marks = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    kernels = kernels_of(done.stdout)
    if not marks or not kernels:
        return {"problem": " ".join((done.stderr or done.stdout).split())[-400:] or f"exit status {done.returncode}"}
    step = json.loads(marks[-1].removeprefix(MARK))
    read = sum(counts[METRIC] for _, counts in kernels)
    return {**step, "kernels": kernels, "bytes read": read, "over must": read / step["must read"]}


def kernels_of(said: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel, what was counted) in the order of the launches, from what `ncu --csv` prints among other things."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(line for line in said.splitlines() if line.startswith('"')):
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except (KeyError, AttributeError, ValueError):
            continue  # another table, or a metric that the device does not have
        found.setdefault(row["ID"], (row["Kernel Name"], {}))[1][row["Metric Name"]] = value
    return [kernel for kernel in found.values() if METRIC in kernel[1]]


def one_step(settings: Settings, name: str, batch: int, layers: int | None, cache: int, live: int | None) -> None:
    """In a process of its own: a step that is counted, behind two that compile and warm up."""
    path.backend()
    side = SIDES[settings.against[0]]
    with torch.no_grad():
        for _, _, work in workloads(settings, [name], [batch], layers, cache, live):
            reset()
            call = work.compile_for(side)[0]
            for counted in (False, False, True):
                work.prepare()
                timing.synchronize()
                if counted and torch.cuda.is_available():
                    torch.cuda.profiler.start()
                call()
                timing.synchronize()
            if torch.cuda.is_available():
                torch.cuda.profiler.stop()
            must = work.moved_int8 if side.int8 else work.moved
            print(MARK + json.dumps({"title": work.title, "must read": must}), flush=True)


def _print(row: dict[str, Any], metrics: Sequence[str], report: Report) -> None:
    if "problem" in row:
        report.say(f"{row['case']}, b{row['batch']}, {row['side']}: {row['problem']}")
        return
    launches: dict[str, list[dict[str, float]]] = {}
    for kernel, counts in row["kernels"]:
        launches.setdefault(kernel, []).append(counts)

    def mean(of: list[dict[str, float]], metric: str) -> float | None:
        values = [counts[metric] for counts in of if metric in counts]
        return sum(values) / len(values) if values else None

    lines = []
    for kernel, found in sorted(launches.items(), key=lambda item: -sum(counts[METRIC] for counts in item[1]))[:SHOWN]:
        read = sum(counts[METRIC] for counts in found)
        more = [figure(mean(found, metric), ".4g") for metric in metrics]
        lines.append((kernel[:60], str(len(found)), figure(read / len(found) / 1e6, ".3f"), figure(read / row["bytes read"], ".3f"), *more))
    title = f"{row['title']}, {row['side']}: {row['bytes read'] / 1e6:.1f} MB read, {row['must read'] / 1e6:.1f} must be"
    report.table(f"{title} ({row['over must']:.3f} x)", ("kernel", "count", "MB each", "share", *metrics), lines)
