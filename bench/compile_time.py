"""`python -m bench compile`: how long the first decode step of a model takes, part by part: each side in a process of its own, cold and
warm."""

from __future__ import annotations

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
from bench.comparators import SIDES
from bench.decode import decode, model_of
from bench.report import Report, Settings, figure
from bench.timing import synchronize

MARK = "measured: "
CACHES = {"DSI_CACHE_DIR": "dsi", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
EXPECTED = {"dsi": 90, "dsi-reduce-overhead": 90, "max-autotune": 400, "max-autotune-no-cudagraphs": 400}  # seconds of a cold process
USUAL = 150


def run(settings: Settings, cases: Sequence[str], layers: int | None, cache: int) -> Report:
    """Time every side of every case, cold and then warm."""
    report = Report("compile", settings)
    for name in cases:
        rows = []
        for side in settings.against:
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    expected = 0 if settings.small else EXPECTED.get(side, USUAL) / (1 if state == "cold" else 3)
                    if report.fits(f"{name}: {side}, {state}", expected):
                        found = _in_process(settings, side, name, layers, cache, Path(folder))
                        rows.append({"case": name, "layers": layers, "side": side, "caches": state, **found})
                        report.add(rows[-1])
                        report.say(f"{name}: {side}, {state}: {found.get('problem') or format(found['seconds'], '.1f') + ' s'}")
        _print(name, rows, report)
    return report


def _in_process(settings: Settings, side: str, name: str, layers: int | None, cache: int, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, **{key: str(folder / value) for key, value in CACHES.items()}}
    command = [sys.executable, "-m", "bench", "compile", "--child", side, "--cases", name, "--cache", str(cache)]
    command += ["--layers", str(layers)] if layers else []
    command += ["--dtype", settings.dtype] if settings.dtype else []
    command += ["--small"] if settings.small else []
    left = None if settings.budget.seconds is None else max(settings.budget.seconds - settings.budget.spent, 1.0)
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return {"problem": "stopped: the budget was spent"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        return {"problem": " ".join(done.stderr.split())[-300:] or f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def first_step(settings: Settings, side: str, name: str, layers: int | None, cache: int) -> None:
    """In the process of one side: print, as JSON, the seconds of its first step, of later ones, and dsi's own account of the parts."""
    path.backend()  # so that the package is found, and its import is not charged to the first step
    from dsi.compiler.observe import collecting

    model, _ = model_of(name, settings, layers, cache)
    work = decode(model, name, 1, cache, None)
    with torch.no_grad(), collecting() as contexts:
        (call, *_) = work.compile_for(SIDES[side])
        work.prepare()
        synchronize()
        times = []
        for _ in range(4):
            start = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - start)
    parts: Counter[str] = Counter()
    for context in contexts:
        parts.update(context.report.seconds)
    print(MARK + json.dumps({"seconds": times[0], "later": times[1:], "parts": dict(parts), "graphs": len(contexts)}), flush=True)


def _print(name: str, rows: Sequence[dict[str, Any]], report: Report) -> None:
    """A table of the totals, and one of dsi's parts. Parts overlap where one contains another ("after aot" holds the stages after it)."""
    report.table(
        f"{name}: seconds of a step",
        ("side", "caches", "first", "second"),
        [(r["side"], r["caches"], figure(r.get("seconds"), ".1f"), figure(r["later"][0] if "later" in r else None)) for r in rows],
    )
    ours = [row for row in rows if row.get("parts")]
    names = list(dict.fromkeys(part for row in ours for part in row["parts"]))
    if ours:
        report.table(
            f"{name}: parts, seconds",
            ("part", *(f"{row['side']} {row['caches']}" for row in ours)),
            [(part, *(figure(row["parts"].get(part)) for row in ours)) for part in names],
        )
