"""`python -m bench prefill`: a decoder's prompt into an empty static cache, as generation runs it: with the last token's logits alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bench import estimates, shapes
from bench.comparators import DTYPES, WIDER, Workload, compare
from bench.decode import Cache, model_of, same, token_ids
from bench.estimates import Size
from bench.memory import held
from bench.report import Report, Settings
from bench.sides import Side
from bench.tables import summary
from bench.weights import rounded

CALLS = 4  # back to back, in a block


def run(settings: Settings, cases: Sequence[str], batches: Sequence[int], lengths: Sequence[int], layers: int | None) -> Report:
    """Benchmark every case at every batch and prompt length."""
    report = Report("prefill", settings)
    report.measure_rates(sorted({DTYPES[settings.dtype or shapes.SHAPES[name].dtype] for name in cases}, key=str))
    for name in cases:
        least = estimates.building(shapes.SHAPES[name].parameters(layers)) + estimates.REFERENCE + estimates.timing(len(settings.against))
        for length in lengths:
            for batch in batches:
                if report.fits(f"{name} b{batch}, {length} tokens", 0 if settings.small else least):
                    model, title = model_of(name, settings, layers, length)
                    work = prefill(model, title, batch, length)
                    work.facts |= {"case": name, "layers": model.config.num_hidden_layers, "batch": batch}
                    compare(work, report)
                    del model, work
    summary(report)
    return report


def prefill(model: Any, title: str, batch: int, length: int) -> Workload:
    """`batch` prompts of `length` tokens. Each call begins by setting the cache back, one small launch."""
    cache = Cache(model, batch, length, 0)
    ids = token_ids(model, batch, length)

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        forward = side.compile(model)

        def call() -> Tensor:
            cache.rewind()
            return forward(input_ids=ids, logits_to_keep=1, **cache.argument).logits

        return [call] * CALLS

    def reference(change: Callable[[Any], Any] = same) -> Tensor:
        wide = change(copy.deepcopy(model).to(WIDER[model.dtype]))
        own = Cache(wide, batch, length, 0)
        return wide(input_ids=ids, logits_to_keep=1, **own.argument).logits[None]

    config = model.config
    return Workload(
        title=f"{title}, b{batch}, {length} tokens",
        facts={"length": length},
        dtype=model.dtype,
        compile_for=compile_for,
        reference=reference,
        rounded=lambda: reference(rounded),
        moved=shapes.weight_bytes(model) + shapes.cache_bytes(model, batch, length),
        moved_int8=shapes.int8_bytes(model) + shapes.cache_bytes(model, batch, length),
        flops=shapes.weight_flops(model, batch * length, batch) + shapes.attention_flops(config, batch, length, length, causal=True),
        size=Size(config.num_hidden_layers, batch * length),
        held=held(model, cache.cache),
    )
