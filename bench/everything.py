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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import plot
from bench.report import Report, Settings, figure
from bench.tables import best_of

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.4  # of a row's expected seconds must be left for it to begin
PATIENCE = 2.5  # times its expected seconds a row may take
SPARE = 8.0  # seconds before the end of its time by which a benchmark stops by itself

SIDES = {
    "ours": "dsi,dsi-reduce-overhead",
    "quick": "reduce-overhead,dsi,dsi-reduce-overhead",
    "tuned": "reduce-overhead,dsi,dsi-max-autotune",
    "slow": "max-autotune-no-cudagraphs,dsi",
}
COMPILES = {"max-autotune": 80.0, "max-autotune-no-cudagraphs": 80.0, "dsi-max-autotune": 45.0, "dsi-max-autotune-no-cudagraphs": 45.0}


@dataclass(frozen=True)
class Row:
    """One benchmark: the words of its command, the seconds that it takes with quick sides, and how many workloads a side is compiled for
    (0: it has sides of its own)."""

    name: str
    words: tuple[str, ...]
    seconds: float
    workloads: int = 1

    def expected(self, sides: Sequence[str]) -> float:
        """Seconds with these sides."""
        return self.seconds + self.workloads * sum(COMPILES.get(side, 0.0) for side in sides)


ROWS = (
    Row("gpt2", ("decode", "--cases", "gpt2"), 45),
    Row("8b", ("decode", "--cases", "llama-3-8b", "--batches", "1,16,4,8"), 150, 4),
    Row("1b", ("decode", "--cases", "llama-3.2-1b"), 60),
    Row("gpt2-xl", ("decode", "--cases", "gpt2-xl"), 90),
    Row("7b", ("decode", "--cases", "llama-7b"), 55),
    Row("regions", ("regions",), 120, 12),
    Row("compile", ("compile", "--sides", "dsi"), 110, 0),
    Row("prefill", ("prefill", "--cases", "llama-3-8b"), 100, 2),
    Row("bert-large", ("decode", "--cases", "bert-large"), 55),
    Row("live", ("decode", "--cases", "llama-3-8b", "--batches", "16", "--layers", "4", "--cache", "4096", "--live", "512,4080"), 75, 2),
    Row("repeat", ("repeat",), 100, 0),
    Row("sanitize", ("sanitize",), 150, 0),
    Row("8b-full", ("decode", "--cases", "llama-3-8b", "--layers", "32"), 130),
    Row("attention", ("attention",), 90, 0),
    Row("generate", ("generate",), 200, 0),
    Row("deepspeed-768", ("deepspeed", "--width", "768"), 150, 0),
    Row("deepspeed-1600", ("deepspeed", "--width", "1600"), 60, 0),
    Row("deepspeed-4096", ("deepspeed", "--width", "4096"), 60, 0),
    Row("compile-compared", ("compile", "--sides", "dsi,default,max-autotune-no-cudagraphs", "--layers", "4"), 330, 0),
)


class Everything:
    """A run of many benchmarks within `seconds`."""

    def __init__(self, seconds: float, out: Path, sides: str, small: bool):
        self.out, self.small = out, small
        self.sides = SIDES.get(sides, sides)
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
        """Run the rows that fit; whether all ran well."""
        for row in rows:
            expected = 0.0 if self.small else row.expected(self.sides.split(","))
            if self.left < max(LEAST * expected, 1.0):
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
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "row.json"
            command = [sys.executable, "-m", "bench", *row.words, "--json", str(file), "--budget", f"{max(limit - SPARE, 1):.0f}"]
            command += ["--sides", self.sides] if row.workloads else []
            command += ["--small"] if self.small else []
            began = time.monotonic()
            state, why = run_within(command, limit, self.log)
            took = time.monotonic() - began
            if file.exists():  # whole, whatever has become of the process
                content = json.loads(file.read_text())
                self.runs.append({"row": row.name, **content})
                if content.get("skipped") and state == "ok":
                    state, why = "incomplete", f"skipped: {'; '.join(content['skipped'])}"
                for line in lines_of(content):
                    print(f"    {line}", flush=True)
            self._note(row, state, took, why)

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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "stopped", f"after {limit:.0f} s"
    return ("ok", "") if code == 0 else ("failed", f"exit status {code}: {last_words(log)}")


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:200] if said else ""


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


def chosen(names: str) -> list[Row]:
    """The rows named, in the order in which they are named; all of them for "". Raises ValueError naming one that is unknown."""
    known = {row.name: row for row in ROWS}
    if not names:
        return list(ROWS)
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ValueError(f"unknown row {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def listing(sides: str) -> Report:
    """Print the rows and the seconds that each is expected to take."""
    report = Report("all", Settings())
    named = SIDES.get(sides, sides).split(",")
    lines = [(row.name, f"{row.expected(named):.0f}", " ".join(row.words)) for row in ROWS]
    report.table(f"Rows, with the sides {', '.join(named)}", ("row", "seconds", "command"), lines)
    return report
