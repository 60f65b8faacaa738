"""Decode speed on the CPU: backend="dsi" beside torch.compile's default, in turns in one process. Prints one JSON line.

    python -m bench.cpu_decode [--cache 512] [--rounds 20] [--steps 4] [--threads 2] [--dtype bfloat16] [--int8]

A process compiles each side once before anything is timed. `--cold` times the compilation itself instead: each side in a process of its own
with empty caches, one after the other, twice. `--int8`: one more side, dsi with int8 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from bench import models
from bench.arguments import count
from bench.generate import cache_argument, static_cache

PROMPT = 16  # tokens
SIDES = {"dsi": "dsi", "default": "inductor"}
INT8 = "dsi int8"


def prepare(model: Any, backend: str, cache_length: int, prompt: torch.Tensor) -> tuple[Any, Any]:
    """A compiled model and a cache that holds the prompt."""
    cache = {cache_argument(model): static_cache(model, cache_length)}
    model(input_ids=prompt, **cache)
    options = {"dtype": "int8"} if backend == INT8 else None
    return torch.compile(model, backend="dsi" if options else backend, fullgraph=True, options=options), cache


def one_step(compiled: Any, cache: dict[str, Any]) -> torch.Tensor:
    """The logits [1, 1, V] after one more token."""
    return compiled(input_ids=torch.tensor([[77]]), **cache).logits


@torch.no_grad()
def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds a step of each side, rounds taking turns, and how far the logits lie apart."""
    model = models.smollm2(dtype=getattr(torch, arguments.dtype))
    prompt = torch.arange(100, 100 + PROMPT)[None]
    ready, logits = {}, {}
    sides = {**SIDES, **({INT8: INT8} if arguments.int8 else {})}
    for name, backend in sides.items():
        ready[name] = prepare(model, backend, arguments.cache, prompt)
        logits[name] = one_step(*ready[name]).double()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            for _ in range(arguments.steps):
                start = time.perf_counter()
                one_step(*ready[name])
                times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "what": "decode, milliseconds a step",
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "cache": arguments.cache,
        **{name: round(value, 2) for name, value in medians.items()},
        "speed of dsi over default": round(medians["default"] / medians["dsi"], 3),
        **({f"speed of {INT8} over default": round(medians["default"] / medians[INT8], 3)} if arguments.int8 else {}),
        "largest relative difference": float((logits["dsi"] - logits["default"]).abs().max() / logits["default"].abs().max()),
    }


@torch.no_grad()
def first_step(arguments: argparse.Namespace) -> tuple[float, float]:
    """What the first step of one side takes in this process (capture, compilation and the step): seconds on the wall, and of processors
    with the C++ compiler's, which other load on the machine hardly changes."""
    model = models.smollm2()
    compiled, cache = prepare(model, SIDES[arguments.side], arguments.cache, torch.arange(100, 100 + PROMPT)[None])
    start, spent = time.perf_counter(), processor_seconds()
    one_step(compiled, cache)
    return time.perf_counter() - start, processor_seconds() - spent


def processor_seconds() -> float:
    """Processor time of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def cold(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first step with empty caches, the least of two processes a side, in turns."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    for _ in range(2):
        for name in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                # One process does everything, so that its processor time counts everything.
                environment = {
                    **os.environ,
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                    "DSI_CACHE_DIR": f"{folder}/dsi",
                }
                command = [sys.executable, "-m", "bench.cpu_decode", "--side", name, "--threads", str(arguments.threads)]
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                wall, processor = done.stdout.split()[-2:]
                seconds[name].append((float(wall), float(processor)))
    least = {name: min(wall for wall, _ in values) for name, values in seconds.items()}
    used = {name: min(spent for _, spent in values) for name, values in seconds.items()}
    return {
        "what": "first step with empty caches, seconds",
        "threads": arguments.threads,
        **{name: round(value, 2) for name, value in least.items()},
        "time of dsi over default": round(least["dsi"] / least["default"], 3),
        "processor seconds": {name: round(value, 2) for name, value in used.items()},
        "processor time of dsi over default": round(used["dsi"] / used["default"], 3),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=count, default=512, help="length of the static cache")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--steps", type=count, default=4, help="steps of each side a round")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model")
    parser.add_argument("--int8", action="store_true", help="dsi with int8 weights, too")
    parser.add_argument("--cold", action="store_true", help="time compilation with empty caches instead")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    needed = PROMPT + 1 + (0 if arguments.cold or arguments.side else arguments.rounds * arguments.steps)
    if arguments.cache < needed:
        parser.error(f"a cache of {arguments.cache} has no room for the {needed} tokens of the prompt and the steps")
    torch.set_num_threads(arguments.threads)
    if arguments.side:
        print(*first_step(arguments))
    else:
        print(json.dumps(cold(arguments) if arguments.cold else speed(arguments)))


if __name__ == "__main__":
    main()
