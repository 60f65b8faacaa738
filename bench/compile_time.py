"""`python -m bench compile`: how long the first decode step of a model takes, part by part: each side in a process of its own, with empty
caches ("cold") and again with what that process left ("warm")."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import path
from bench.decode import decode, model_of
from bench.report import Report, Settings, figure
from bench.sides import SIDES
from bench.timing import synchronize

ROOT = Path(__file__).resolve().parent.parent
MARK = "measured: "
CACHES = {"DSI_CACHE_DIR": "dsi", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
SECONDS = {"cold": 150.0, "warm": 75.0}  # that a process may take where no limit is given
START = 25  # of them: importing, and making a model of billions of random numbers
LEVELS = ("guard", "lift", "shard", "capture")  # dsi's parts before AOTAutograd, or instead of it
AFTER = "after aot"  # and all of those behind it


def run(settings: Settings, cases: Sequence[str], layers: int | None, others: int | None, cache: int) -> Report:
    """Time every side of every case, cold and then warm: dsi's sides with `layers` layers; with `others` layers all sides that are
    compared, dsi's once more."""
    report = Report("compile", settings)
    ours = [side for side in settings.against if side.startswith("dsi")]
    theirs = [side for side in settings.against if side not in ours]
    for name in cases:
        rows: list[dict[str, Any]] = []
        plan = [(side, layers) for side in ours]
        if theirs:
            plan += [(side, others) for side in (*(ours if others != layers else ()), *theirs)]
        for side, count in plan:
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    expected = 0.0 if settings.small else START
                    if report.fits(f"{name}, {count} layers: {side}, {state}", expected):
                        found = _in_process(settings, side, name, count, cache, Path(folder), state)
                        rows.append({"case": name, "layers": count, "side": side, "caches": state, **found})
                        report.add(rows[-1])
                        shown = found.get("problem") or f"{found['seconds']:.1f} s"
                        report.say(f"{name}, {count} layers: {side}, {state}: {shown}")
                        if "problem" in found:
                            break  # without a first process there is nothing warm
        _print(name, rows, report)
    return report


def _in_process(settings: Settings, side: str, name: str, layers: int | None, cache: int, folder: Path, state: str) -> dict[str, Any]:
    environment = {**os.environ, **{key: str(folder / value) for key, value in CACHES.items()}}
    limit = settings.limit or SECONDS[state]
    if settings.budget.seconds is not None:
        limit = min(limit, max(settings.budget.seconds - settings.budget.spent, 1.0))
    command = [sys.executable, "-m", "bench", "compile", "--child", side, "--cases", name, "--cache", str(cache), "--limit", f"{limit:.0f}"]
    command += ["--layers", str(layers)] if layers else []
    command += ["--dtype", settings.dtype] if settings.dtype else []
    command += ["--small"] if settings.small else []
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        where = next((line.strip() for line in said.splitlines() if line.strip().startswith("File")), "")
        return {"problem": f"stopped after {limit:.0f} s{f', in {where}' if where else ''}"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        return {"problem": " ".join(done.stderr.split())[-300:] or f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def first_step(settings: Settings, side: str, name: str, layers: int | None, cache: int) -> None:
    """In the process of one side: print, as JSON, the seconds of its first step, of later ones, and where the first one's went."""
    began = time.perf_counter()
    if settings.limit is not None:
        faulthandler.dump_traceback_later(0.8 * settings.limit)  # so that a process that is stopped says where it was
    path.backend()  # so that the package is found, and its import is not charged to the first step
    from dsi.compiler.observe import collecting

    model, _ = model_of(name, settings, layers, cache, hot=False)
    work = decode(model, name, 1, cache, None)
    with torch.no_grad(), collecting() as contexts:
        (call, *_) = work.compile_for(SIDES[side])
        work.prepare()
        synchronize()
        times = []
        started = time.perf_counter() - began
        for _ in range(4):
            start = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - start)
    faulthandler.cancel_dump_traceback_later()
    own: Counter[str] = Counter()
    for context in contexts:
        own.update(context.report.seconds)
    found = {"seconds": times[0], "later": times[1:], "parts": parts_of(times[0], torch_times(), own), "graphs": len(contexts)}
    print(MARK + json.dumps({**found, "before": started}), flush=True)


def torch_times() -> dict[str, float]:
    """Seconds by torch's own account: "compile" (all of a frame's compilation), "backend" (in the backend), by the names used here."""
    from torch._dynamo.utils import compilation_time_metrics

    names = {"_compile.compile_inner": "compile", "OutputGraph.call_user_compiler": "backend", "build_guards": "guards"}
    return {name: sum(compilation_time_metrics.get(key, ())) for key, name in names.items()}


def parts_of(total: float, torch_says: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    """The seconds of a first step, cut into parts that add up to `total`: Dynamo, the backend (for dsi: AOTAutograd, each of its stages,
    the executor's parts and the rest), and the first run. `own` is dsi's account, empty for other sides."""
    compile_, backend = torch_says["compile"], torch_says["backend"]
    parts = {"Dynamo": compile_ - backend}
    if own:
        before = sum(own.get(part, 0.0) for part in LEVELS)
        parts["AOTAutograd"] = backend - before - own.get(AFTER, 0.0)
        parts |= {part: seconds for part, seconds in own.items() if part != AFTER}
        behind = sum(seconds for part, seconds in own.items() if part not in (*LEVELS, AFTER))
        parts["dsi, the rest"] = own.get(AFTER, 0.0) - behind
    else:
        parts["backend"] = backend
    parts["first run"] = total - compile_
    return parts


def _print(name: str, rows: Sequence[dict[str, Any]], report: Report) -> None:
    """A table of the totals, and one of the parts, which add up to the first step."""
    report.table(
        f"{name}: seconds of a step; before: of the process until then",
        ("side", "layers", "caches", "first", "second", "before"),
        [
            (
                r["side"],
                str(r["layers"] or "all"),
                r["caches"],
                figure(r.get("seconds"), ".1f"),
                figure(r["later"][0] if "later" in r else None),
                figure(r.get("before"), ".1f"),
            )
            for r in rows
        ],
    )
    timed = [row for row in rows if row.get("parts")]
    names = list(dict.fromkeys(part for row in timed for part in row["parts"]))
    for at in range(0, len(timed), 4):  # as many columns as a log is wide
        some = timed[at : at + 4]
        report.table(
            f"{name}: parts of the first step, seconds",
            ("part", *(f"{row['side']} {row['layers']} {row['caches']}" for row in some)),
            [(part, *(figure(row["parts"].get(part)) for row in some)) for part in names if any(part in row["parts"] for row in some)],
        )
