"""What a benchmark says: progress lines while it runs, a JSON file that is whole after every row, tables that fit a log."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench import timing
from bench.arguments import beside

ANYWHERE = ("audit", "generate")  # commands whose sizes suit a CPU
WIDTH = 110  # of a table where the output is not a terminal


@dataclass
class Settings:
    """What every command is told: comparators in order, blocks to take the median of, dtype (None: the case's own), where to run, and the
    seconds that a side may be compiled (None: any)."""

    against: tuple[str, ...] = ("eager", "dsi")
    blocks: int = 5
    dtype: str | None = None
    small: bool = False
    device: str = "cpu"
    budget: timing.Budget = field(default_factory=timing.Budget)
    json: Path | None = None
    limit: float | None = None


class Report:
    """Rows of one command with the machine that they were measured on."""

    def __init__(self, command: str, settings: Settings):
        from rich.console import Console

        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)
        self.machine = machine()
        self.head = {"command": command, "words": sys.argv[1:], "machine": self.machine}
        self.say(", ".join(f"{key} {value}" for key, value in self.machine.items()))
        if settings.device == "cpu" and not settings.small and command not in ANYWHERE:
            self.say("there is no CUDA device: sizes made for one may take hours; --small tries toy ones")

    def measure_rates(self, dtypes: Sequence[torch.dtype] = ()) -> None:
        """Measure what shares of the roofline are taken of: the read bandwidth, and the matrix rate of `dtypes`."""
        if not torch.cuda.is_available():
            return
        self.machine["read bytes/s"] = timing.bandwidth()
        self.say(f"read bandwidth {self.machine['read bytes/s'] / 1e12:.2f} TB/s")
        for dtype in dtypes:
            self.machine[f"{dtype} FLOP/s"] = timing.matrix_rate(dtype)
            self.say(f"{dtype} products {self.machine[f'{dtype} FLOP/s'] / 1e12:.0f} TFLOP/s")
        torch.cuda.empty_cache()

    def roofline(self, moved: float, flops: float = 0.0, dtype: torch.dtype | None = None) -> float | None:
        """Milliseconds that the measured rates allow for so many bytes read and operations done; None where they were not measured."""
        if "read bytes/s" not in self.machine:
            return None
        rate = self.machine.get(f"{dtype} FLOP/s")
        return max(moved / self.machine["read bytes/s"], flops / rate if rate else 0.0) * 1e3

    def say(self, text: str) -> None:
        """A progress line, with the seconds since the start."""
        print(f"[{self.settings.budget.spent:6.1f} s] {text}", flush=True)

    def skip(self, what: str, seconds: float) -> None:
        """Say that `what`, expected to take `seconds`, no longer fits the budget."""
        self.skipped.append(what)
        self.say(f"skipped, too little time is left for its {seconds:.0f} s: {what}")
        self.write()

    def fits(self, what: str, seconds: float) -> bool:
        """Whether `what` fits the budget; says so where it does not."""
        if self.settings.budget.fits(seconds):
            return True
        self.skip(what, seconds)
        return False

    def limit(self, rest: float) -> float | None:
        """Seconds that what begins now may take where the budget must have `rest` of them left after it; None: any."""
        limits = [self.settings.limit, self.settings.budget.left(rest)]
        return min((seconds for seconds in limits if seconds is not None), default=None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the file too."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the file: after every row and at once, so that a run that is cut short leaves what it found. Where that fails (a full disk)
        it is said, and the run goes on: its tables are still printed."""
        path = self.settings.json
        if path is None:
            return
        content = {**self.head, "seconds": self.settings.budget.spent, "skipped": self.skipped, "rows": self.rows}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside(path).write_text(json.dumps(content, indent=1, default=_plain))
            beside(path).replace(path)
        except OSError as error:
            self.say(f"{path} was not written: {error}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is text, the others figures."""
        from rich import box
        from rich.table import Table

        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        for number, column in enumerate(columns):
            shown.add_column(column, justify="left" if number == 0 else "right", overflow="fold", no_wrap=number > 0)
        for row in rows:
            shown.add_row(*row)
        self.console.print(shown)
        sys.stdout.flush()


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def figure(value: float | None, form: str = ".3f") -> str:
    """A number for a table, "-" for none."""
    return "-" if value is None else format(value, form)


def machine() -> dict[str, Any]:
    """Where and with what this runs, for the record."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    git = shutil.which("git")
    if git:
        command = [git, "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or "unknown"
    return found
