"""What a compiled kernel does where it spends its time, read off its PTX: the loads of its loops, exchanges through shared memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LABEL = re.compile(r"^\s*(\$L__BB\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
LOAD = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\b")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b.*?,\s*(?:0x)?(\d+)")
STORE = re.compile(r"\b(?:st\.shared|stmatrix)\b")


@dataclass
class Loop:
    """A loop without loops inside (`again`), or a kernel that has none. `loads`: bytes of a thread's load from global memory -> how many
    (copies to shared memory count as loads); `exchanges`: stores to shared memory; `products`: instructions of the matrix units."""

    loads: dict[int, int] = field(default_factory=dict)
    exchanges: int = 0
    products: int = 0
    lines: int = 0
    again: bool = True

    @property
    def widest(self) -> int:
        return max(self.loads, default=0)

    @property
    def bytes(self) -> int:
        return sum(width * count for width, count in self.loads.items())


def loops(text: str) -> list[Loop]:
    """The innermost loops of a kernel's PTX; its whole body where it has none."""
    lines = text.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := LABEL.match(line))}
    spans = []
    for number, line in enumerate(lines):
        if (match := BRANCH.search(line)) and labels.get(match[1], number + 1) <= number:
            spans.append((labels[match[1]], number))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [loop(lines[start : stop + 1]) for start, stop in inner] or [loop(lines, again=False)]


def loop(lines: list[str], again: bool = True) -> Loop:
    """What is in some lines of PTX."""
    widths: Counter[int] = Counter()
    found = Loop(lines=len(lines), again=again)
    for line in lines:
        if match := LOAD.search(line):
            widths[int(match[1] or 1) * int(match[2]) // 8] += 1
        elif match := COPY.search(line):
            widths[int(match[1], 16 if "0x" in line else 10)] += 1
        elif "cp.async.bulk" in line:
            widths[128] += 1
        found.exchanges += bool(STORE.search(line))
        found.products += "mma." in line and ".sync" in line
    found.loads = dict(widths)
    return found


def busiest(text: str) -> Loop:
    """The loop that loads the most bytes a turn."""
    return max(loops(text), key=lambda loop: loop.bytes)


def resources(cubin: bytes, entry: str, folder: Path) -> dict[str, int]:
    """Registers (REG), stack and local memory (STACK, LOCAL: spills) of a kernel, by Triton's own cuobjdump."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    text = subprocess.run([tool, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True).stdout
    usage = text[text.index(f"Function {entry}:") :]
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
