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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import plot
from bench.report import figure
from bench.tables import best_of

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.4  # of a row's expected seconds must be left for it to begin
PATIENCE = 1.6  # times its expected seconds a row may take
LONGEST = 170  # seconds that a side may be compiled, so that one which takes longer does not take the others' time
SPARE = 8.0  # seconds before the end of its time by which a benchmark stops by itself

# Sides that take the place of the rows' own.
SIDES = {
    "own": "",
    "ours": "dsi,dsi-reduce-overhead",
    "quick": "reduce-overhead,dsi,dsi-reduce-overhead",
    "tuned": "reduce-overhead,dsi,dsi-max-autotune",
    "slow": "max-autotune-no-cudagraphs,dsi",
}
# Seconds that a side adds, compiled for one workload of a few layers. Inductor's autotuning measures on the device.
COMPILES = {
    "default": 20.0,
    "reduce-overhead": 18.0,
    "max-autotune": 75.0,
    "max-autotune-no-cudagraphs": 75.0,
    "int8-recipe": 75.0,
    "torchao": 40.0,
    "dsi": 9.0,
    "dsi-reduce-overhead": 6.0,
    "dsi-laid-out": 6.0,
    "dsi-laid-out-reduce-overhead": 6.0,
    "dsi-int8": 12.0,
    "dsi-int8-reduce-overhead": 10.0,
    "dsi-max-autotune": 45.0,
    "dsi-max-autotune-no-cudagraphs": 45.0,
}


@dataclass(frozen=True)
class Row:
    """One benchmark: the words of its command, the seconds that it takes besides compiling its `sides`, and how many workloads these are
    compiled for (0: the command has ways of its own, and `seconds` is all)."""

    name: str
    words: tuple[str, ...]
    seconds: float
    sides: str = ""
    workloads: int = 0

    def against(self, sides: str) -> str:
        """The sides that it is run with, where others than its own may be asked for."""
        return sides or self.sides if self.workloads else ""

    def expected(self, sides: str = "") -> float:
        """Seconds, with these sides instead of its own."""
        return self.seconds + self.workloads * sum(COMPILES.get(side, 5.0) for side in self.against(sides).split(",") if side)


MAX = "max-autotune-no-cudagraphs"
# Captured as comparators without graphs of their own are, and by graphs of our own, as users have them: one launch a step each.
OWN = "dsi,dsi-reduce-overhead"
OURS = f"{OWN},dsi-int8,dsi-int8-reduce-overhead"
LAID_OUT = "dsi-laid-out,dsi-laid-out-reduce-overhead"
LIVE = ("--live", "128")  # tokens of a cache of 512
SHORT = ("--cache", "64", "--live", "32")
ROWS = (
    Row("gpt2", ("decode", "--cases", "gpt2", *LIVE), 25, f"dsi,{LAID_OUT},reduce-overhead,{MAX}", 1),
    Row("8b-16", ("decode", "--cases", "llama-3-8b", "--layers", "4", "--batches", "16", *LIVE), 25, f"{OURS},{MAX}", 1),
    Row("8b-1", ("decode", "--cases", "llama-3-8b", "--layers", "4", *LIVE), 25, f"{OURS},int8-recipe,{MAX}", 1),
    Row("generate-gpt2", ("generate", "--cases", "gpt2"), 90),
    Row("gpt2-xl", ("decode", "--cases", "gpt2-xl", *LIVE), 65, f"dsi,{LAID_OUT},reduce-overhead", 1),
    Row("1b", ("decode", "--cases", "llama-3.2-1b", *LIVE), 30, f"{OWN},reduce-overhead,{MAX}", 1),
    Row("8b-4-8", ("decode", "--cases", "llama-3-8b", "--layers", "4", "--batches", "4,8", *LIVE), 30, f"{OURS},{MAX}", 2),
    Row("generate-8b", ("generate", "--cases", "llama-3-8b", "--sides", "static,dsi"), 130),
    Row("generate-smollm2", ("generate", "--cases", "smollm2-135m", "--sides", "static,dsi"), 110),
    Row("bert-large", ("decode", "--cases", "bert-large"), 35, f"{OWN},eager,reduce-overhead,{MAX}", 1),
    Row("prefill-512", ("prefill", "--cases", "llama-3-8b", "--layers", "4", "--lengths", "512"), 25, f"dsi,{MAX}", 1),
    Row("prefill-2048", ("prefill", "--cases", "llama-3-8b", "--layers", "4", "--lengths", "2048"), 25, f"dsi,{MAX}", 1),
    Row(
        "live",
        ("decode", "--cases", "llama-3-8b", "--batches", "16", "--layers", "4", "--cache", "4096", "--live", "512,4080"),
        25,
        "dsi",
        2,
    ),
    Row("regions-1600", ("regions", "--widths", "1600"), 20, "dsi,dsi-reduce-overhead,eager,reduce-overhead", 1),
    Row("regions", ("regions", "--widths", "4256,12288"), 40, "dsi,dsi-reduce-overhead,eager,reduce-overhead", 1),
    Row("memory", ("memory", "--cases", "llama-3-8b"), 75),
    Row("int8-rows", ("decode", "--cases", "llama-3-8b", "--layers", "4", *SHORT, "--batches", "2,32,64,128,512"), 35, "dsi,dsi-int8", 5),
    Row("compile", ("compile", "--sides", "dsi"), 75),
    Row("7b", ("decode", "--cases", "llama-7b", "--layers", "4", *LIVE), 25, f"{OWN},{MAX}", 1),
    Row(
        "gpt2-xl-12",
        ("decode", "--cases", "gpt2-xl", "--layers", "12", *LIVE),
        25,
        f"dsi,{LAID_OUT},reduce-overhead,{MAX}",
        1,
    ),
    Row("8b-full", ("decode", "--cases", "llama-3-8b", "--layers", "32", *LIVE), 60, f"{OURS},reduce-overhead", 1),
    Row("repeat", ("repeat",), 100),
    Row("sanitize", ("sanitize",), 150),
    Row("attention", ("attention",), 60, "dsi,eager", 0),
    Row("int8-16", ("decode", "--cases", "llama-3-8b", "--layers", "4", "--batches", "16", *LIVE), 25, "dsi,dsi-int8,int8-recipe", 1),
    Row("torchao", ("decode", "--cases", "llama-3-8b", "--layers", "4", *LIVE), 25, "dsi,dsi-int8,torchao", 1),
    Row("deepspeed-768", ("deepspeed", "--width", "768"), 150),
    Row("deepspeed-1600", ("deepspeed", "--width", "1600"), 60),
    Row("deepspeed-4096", ("deepspeed", "--width", "4096"), 60),
    Row("compile-compared", ("compile", "--sides", f"dsi,default,{MAX}", "--layers", "4"), 330),
)


class Everything:
    """A run of many benchmarks within `seconds`."""

    def __init__(self, seconds: float, out: Path, sides: str, small: bool):
        self.out, self.small = out, small
        self.program = [sys.executable, "-m", "bench"]
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
        file = self.out / "row.json"  # whole at any time, and in place, should this process be killed, too
        file.unlink(missing_ok=True)
        command = [*self.program, *row.words, "--json", str(file), "--budget", f"{max(limit - SPARE, 1):.0f}"]
        command += ["--sides", row.against(self.sides), "--limit", str(LONGEST)] if row.workloads else []
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


def chosen(names: str) -> list[Row]:
    """The rows named, in the order in which they are named; all of them for "". Raises ValueError naming one that is unknown."""
    known = {row.name: row for row in ROWS}
    if not names:
        return list(ROWS)
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ValueError(f"unknown row {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def listing(sides: str) -> None:
    """Print the rows, the seconds that each is expected to take, and those up to its end."""
    named, sum_ = SIDES.get(sides, sides), 0.0
    print(f"{'row':18}{'seconds':>8}{'so far':>8}  command")
    for row in ROWS:
        sum_ += row.expected(named)
        against = row.against(named)
        words = " ".join([*row.words, *(["--sides", against] if against else [])])
        print(f"{row.name:18}{row.expected(named):8.0f}{sum_:8.0f}  {words}")
