"""`python -m bench repeat`: whether a decode step gives the same bits every time, with other work on the chip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.comparators import reset
from bench.decode import Cache, decoded, model_of
from bench.report import Report, Settings
from bench.sides import SIDES

LAYERS = 2
TOGETHER = 50  # runs between two waits for the device
SIDE = 4096  # of the square matrices that the other stream multiplies
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Noise:
    """Work on a stream of its own: now products, now copies, so that kernels meet fewer processors free, or less bandwidth."""

    def __init__(self, device: str):
        self.on = device == "cuda"
        if self.on:
            self._stream = torch.cuda.Stream()
            self._matrices = [torch.randn(SIDE, SIDE, device=device, dtype=torch.float16) for _ in range(3)]
            self._memory = [torch.empty(64 << 20, device=device, dtype=torch.uint8) for _ in range(2)]

    def make(self, turn: int) -> None:
        """Queue some; every fourth turn none, so that a step runs alone, too."""
        if not self.on or turn % 4 == 3:
            return
        with torch.cuda.stream(self._stream):
            if turn % 2:
                self._memory[0].copy_(self._memory[1])
            else:
                torch.mm(self._matrices[0], self._matrices[1], out=self._matrices[2])


def run(settings: Settings, cases: Sequence[str], batches: Sequence[int], layers: int | None, room: int, runs: int) -> Report:
    """Repeat the step of every case at every batch on every side. A row's "differing" counts runs whose logits, or whose caches at the end
    of a stretch, were not those of the first run."""
    report = Report("repeat", settings)
    for name in cases:
        for batch in batches:
            model, title = model_of(name, settings, layers or LAYERS, room)
            live = room - 16
            with torch.no_grad():
                cache = Cache(model, batch, room, live)
                call_for = decoded(model, cache, batch)
                for side in settings.against:
                    if report.fits(f"{title}, b{batch}: {side}", 0 if settings.small else 40):
                        found: dict[str, Any] = {"case": name, "batch": batch, "side": side, "runs": runs}
                        try:
                            found |= repeated(call_for(SIDES[side]), cache, Noise(settings.device), runs)
                        except Exception as error:
                            found |= {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                        report.add({"title": f"{title}, b{batch}, {live} of {room} tokens", **found})
                        said = found.get("problem") or f"{found['differing']} of {runs} runs differ from the first"
                        report.say(f"{title}, b{batch}: {side}: {said}")
                    reset()
            del model, cache, call_for
    lines = [(row["title"], row["side"], str(row["runs"]), str(row.get("differing", "-"))) for row in report.rows]
    report.table("Steps that gave other bits than the first", ("case", "side", "runs", "differing"), lines)
    return report


def repeated(call: Callable[[], Tensor], cache: Cache, noise: Noise, runs: int) -> dict[str, Any]:
    """How many of `runs` steps from the same cache differ from the first, and the kernels that a step runs."""
    for _ in range(3):  # compile, and record graphs
        cache.rewind()
        call()
    cache.rewind()
    first = call().clone()
    state = [tensor.clone() for tensor in cache.tensors()]
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    for turn in range(runs):
        noise.make(turn)
        cache.rewind()
        differing += other_bits(call(), first)
        if turn % TOGETHER == TOGETHER - 1 or turn == runs - 1:
            differing += torch.stack([other_bits(a, b) for a, b in zip(cache.tensors(), state, strict=True)]).any()
            timing.synchronize()
    cache.rewind()
    profile = timing.profile(call)
    return {"differing": int(differing), **profile.as_json()}


def other_bits(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ in any bit (a NaN equals itself, and 0 is not -0): a bool on their device."""
    bits = BITS[a.element_size()]
    return (a.contiguous().view(bits) != b.contiguous().view(bits)).any()


def good(report: Report) -> bool:
    """Whether every row has run, and gave the same bits each time."""
    return bool(report.rows) and not report.skipped and all(row.get("differing") == 0 for row in report.rows)
