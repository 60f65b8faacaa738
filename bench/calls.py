"""What a call of a region is made of on the host: eager, dsi as its users call it, Dynamo with a backend that does nothing, and what dsi
compiled called without Dynamo. Microseconds of the wall a call, the least and the median of some loops.

python -m bench.calls [--width 1600] [--regions qkv,attention,mlp_in,mlp_out] [--context 1024] [--calls 400] [--loops 7] [--small]

Unlike `bench regions`, which times sides by turns, asks for whole graphs (`fullgraph=True`) and runs in one process with what it has
captured and traced, this is the loop that a user writes. One side after the other, each in a Dynamo that knows no other: two compiled
forms of one function are looked through in each call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bench import arguments, path, timing
from bench.gpt_regions import HEADS, NAMES, copies_of
from bench.regions import print_table

Call = Callable[[], Any]


def loops_of(calls: Sequence[Call], count: int, loops: int) -> list[float]:
    """Microseconds a call in each of `loops` loops of `count` calls or more, over all of `calls` by turns."""
    rounds, found = -(-count // len(calls)), []
    for call in calls:
        call()
    for _ in range(loops):
        timing.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        timing.synchronize()
        found.append((time.perf_counter() - start) / (rounds * len(calls)) * 1e6)
    return found


def compiled(modules: Sequence[nn.Module], inputs: Sequence[Any], backend: Any) -> list[Call]:
    """Calls of the modules by a backend, after two of each."""
    torch._dynamo.reset()
    calls: list[Call] = [lambda one=one: one(*inputs) for one in [torch.compile(module, backend=backend) for module in modules]]  # type: ignore[misc]
    for call in (*calls, *calls):
        call()
    return calls


def sides_of(modules: Sequence[nn.Module], inputs: Sequence[Any]) -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of each side."""
    dsi: Any = path.backend()

    def nothing(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        kept: list[Any] = []

        def call(*given: Any) -> Any:
            if not kept:
                kept.append(graph(*given))
            return kept[0]

        return call

    def inside() -> list[Call]:
        last: dict[int, Call] = {}

        def noting(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            run = dsi(graph, examples)

            def call(*given: Any) -> Any:
                last[id(run)] = lambda: run(*given)
                return run(*given)

            return call

        compiled(modules, inputs, noting)
        return list(last.values())

    return {
        "eager": lambda: [lambda one=one: one(*inputs) for one in modules],  # type: ignore[misc]
        "dsi": lambda: compiled(modules, inputs, dsi),
        "Dynamo, nothing": lambda: compiled(modules, inputs, nothing),
        "inside": inside,
    }


def main(words: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1600, choices=sorted(HEADS))
    parser.add_argument("--regions", type=arguments.some_of(NAMES), default=list(NAMES))
    parser.add_argument("--context", type=arguments.count, default=1024, help="tokens of attention's cache")
    parser.add_argument("--calls", type=arguments.count, default=400, help="calls of a loop, at least")
    parser.add_argument("--loops", type=arguments.count, default=7)
    parser.add_argument("--small", action="store_true", help="toy sizes and few calls, to try it anywhere")
    given = parser.parse_args(words)
    width, context, calls, loops = (64, 32, 2, 2) if given.small else (given.width, given.context, given.calls, given.loops)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows = []
    for name in given.regions:
        modules, inputs = copies_of(name, width, context, dtype, device)
        with torch.no_grad():
            found = {side: loops_of(made(), calls, loops) for side, made in sides_of(modules, inputs).items()}
        times = {side: statistics.median(values) for side, values in found.items()}
        rows.append([f"{name}, width {width}", *(f"{min(found[side]):.1f}, {times[side]:.1f}" for side in found)])
        rows[-1].append(f"{times['eager'] / times['dsi']:.2f}x")
    print_table(["region", "eager", "dsi", "Dynamo, nothing", "inside", "over eager"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
