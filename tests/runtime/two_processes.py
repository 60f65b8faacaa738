"""Run as a script: compiles a small Llama's decode step by backend="dsi" and prints, as JSON, the seconds of each part after AOTAutograd's
tracing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch  # noqa: E402

torch.set_num_threads(1)

import dsi.compiler.backend as backend  # noqa: E402
import zoo  # noqa: E402
from dsi.runtime import inductor_api  # noqa: E402

from bench.generate import cache_argument, static_cache  # noqa: E402


def main() -> None:
    seconds = {}
    original = backend._compile_aten

    def timed(gm, fake_inputs, observer):
        start = time.perf_counter()
        result = original(gm, fake_inputs, observer)
        seconds["backend"] = time.perf_counter() - start
        seconds["parts"] = observer.context.report.seconds
        return result

    backend._compile_aten = timed
    model = zoo.decoder("llama")
    compiled = torch.compile(model, backend="dsi", fullgraph=True)
    ids = torch.randint(3, 199, (1, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = {cache_argument(model): static_cache(model, 32, 1)}
        seconds["logits"] = float(compiled(input_ids=ids, **cache).logits.double().sum())
    seconds["hits"], seconds["misses"] = inductor_api.cache_hits()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
