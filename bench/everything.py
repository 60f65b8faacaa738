"""`python -m bench all`: the benchmarks in order of importance, within a time, each in a process of its own: one that fails fails alone.

Three files come of it: `results.json` (the content of every benchmark's file, whole after each), `log.txt` (what they printed) and
`roofline.svg`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from bench.report import figure
from bench.rows import SETS, Row
from bench.tables import best_of

FILES = ("results.json", "log.txt", "roofline.svg")
ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.9  # of a row's expected seconds must be left for it to begin: with fewer, sides would be left out
PATIENCE = 1.6  # times its expected seconds a row may take
LONGEST = 170  # seconds that a side may be compiled, so that one which takes longer does not take the others' time
SPARE = 8.0  # seconds before the end of its time by which a benchmark stops by itself


class Everything:
    """A run of many benchmarks within `seconds`."""

    def __init__(self, seconds: float, out: Path, sides: str, small: bool):
        self.out, self.small = out, small
        self.program = [sys.executable, "-m", "bench"]
        self.sides = SETS.get(sides, sides)
        self.ends = time.monotonic() + seconds
        self.states: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "log.txt"
        self.log.write_text("")

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()

    def run(self, rows: Sequence[Row]) -> bool:
        """Run the rows that fit; whether all ran well. Where the process is told to end, what was measured is written first."""
        if threading.current_thread() is not threading.main_thread():
            return self._run(rows)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
        try:
            return self._run(rows)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self, rows: Sequence[Row]) -> bool:
        for row in rows:
            expected = 0.0 if self.small else row.expected(self.sides)
            if self.left < (LEAST * expected + SPARE if expected else 1.0):
                self._note(row, "skipped", 0.0, f"{self.left:.0f} s are left, and it takes {expected:.0f}")
                continue
            self._one(row, min(self.left, PATIENCE * expected) if expected else self.left)
        if any(run.get("rows") for run in self.runs):
            try:
                plot.draw([self.out / "results.json"], self.out / "roofline.svg")
            except ValueError as error:
                print(error, flush=True)
        return all(state["state"] == "ok" for state in self.states)

    def _one(self, row: Row, limit: float) -> None:
        file = self.out / "row.json"  # whole at any time, and in place, should this process be killed, too
        file.unlink(missing_ok=True)
        command = [*self.program, *row.words, "--json", str(file), "--budget", f"{max(limit - SPARE, 1):.0f}"]
        command += ["--sides", row.against(self.sides), "--limit", str(LONGEST)] if row.sizes else []
        command += ["--small"] if self.small else []
        began = time.monotonic()
        state, why = "stopped", "the run was ended"
        try:
            state, why = run_within(command, limit, self.log)
        finally:
            if file.exists():
                content = json.loads(file.read_text())
                self.runs.append({"row": row.name, **content})
                left_out = [*(f"skipped: {name}" for name in content.get("skipped", ())), *problems_of(content)]
                if state == "ok" and left_out:
                    state, why = "incomplete", "; ".join(left_out)
                for line in lines_of(content):
                    print(f"    {line}", flush=True)
            self._note(row, state, time.monotonic() - began, why)
            file.unlink(missing_ok=True)

    def _note(self, row: Row, state: str, took: float, why: str) -> None:
        self.states.append({"row": row.name, "words": list(row.words), "state": state, "seconds": round(took, 1), "why": why})
        print(f"[{self.left:6.0f} s left] {row.name}: {state}{f' ({why})' if why else ''}, {took:.0f} s", flush=True)
        (self.out / "results.json").write_text(json.dumps({"states": self.states, "runs": self.runs}, indent=1))


def run_within(command: Sequence[str], limit: float, log: Path) -> tuple[str, str]:
    """Run a command for at most `limit` seconds, its output at the end of `log`; how it ended, and why if not well. What it has started is
    stopped with it."""
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "stopped", f"after {limit:.0f} s"
        finally:  # of a run that is ended, too
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return ("ok", "") if code == 0 else ("failed", f"exit status {code}: {last_words(log)}")


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:200] if said else ""


def problems_of(content: dict[str, Any]) -> list[str]:
    """What kept whole rows of a result file from being measured."""
    rows = [row for row in content["rows"] if row.get("problem")]
    return [f"{row.get('title', row.get('case', '?'))}: {row['problem']}" for row in rows]


def lines_of(content: dict[str, Any]) -> list[str]:
    """A line a row of a result file: dsi's time, its share of the roofline, and the best other side's."""
    lines = []
    for row in content.get("rows", ()):
        if "sides" not in row:
            shown = {key: value for key, value in row.items() if isinstance(value, int | float | str) and key not in ("title", "case")}
            lines.append(f"{row.get('title', row.get('case', ''))}: " + ", ".join(f"{key} {_short(value)}" for key, value in shown.items()))
            continue
        what = "device" if any(found.get("device") for found in row["sides"].values()) else "wall"
        name, ours = best_of(row, what, ours=True)
        other, theirs = best_of(row, what, ours=False)
        share = row["roofline ms"] / ours if row.get("roofline ms") and ours else None
        times = f"{name} {figure(ours, '.4f')} ms ({what}), roofline {figure(share, '.2f')}"
        ratio = theirs / ours if ours and theirs else None
        lines.append(f"{row['title']}: {times}; {other} {figure(theirs, '.4f')} ms, {figure(ratio, '.2f')} x")
        lines += [f"  {side}: {found['problem']}" for side, found in row["sides"].items() if found.get("problem")]
    return lines


def _short(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:120]
