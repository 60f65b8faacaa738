"""`python -m bench decode`: one token's step of a decoder over a static cache, or one pass of an encoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import estimates, shapes
from bench.comparators import DTYPES, WIDER, Workload, compare
from bench.estimates import Size
from bench.generate import cache_argument, static_cache
from bench.memory import held
from bench.report import Report, Settings
from bench.sides import Side
from bench.tables import summary
from bench.weights import rounded

STEPS = 10  # back to back, in a block


def run(
    settings: Settings,
    cases: Sequence[str],
    batches: Sequence[int],
    layers: int | None,
    cache: int,
    lives: Sequence[int | None],
    length: int,
) -> Report:
    """Benchmark every case at every batch. `lives`: tokens in the cache when a step begins (None: all but the block's); `length`: of an
    encoder's input."""
    report = Report("decode", settings)
    report.measure_rates()
    least = estimates.REFERENCE + estimates.timing(len(settings.against))
    for name in cases:
        shape = shapes.SHAPES[name]
        if not report.fits(name, 0 if settings.small else estimates.building(shape.parameters(layers))):
            continue
        encoder = shape.family == "bert"
        model, title = model_of(name, settings, layers, max(cache, length))
        for batch in (1,) if encoder else batches:
            for live in (None,) if encoder else lives:
                if report.fits(f"{name} b{batch}", 0 if settings.small else least):
                    work = encode(model, title, batch, length) if encoder else decode(model, title, batch, cache, live)
                    work.facts |= {"case": name, "layers": model.config.num_hidden_layers, "batch": batch}
                    compare(work, report)
                    del work
        del model
    summary(report)
    return report


def model_of(name: str, settings: Settings, layers: int | None, positions: int, hot: bool = True) -> tuple[Any, str]:
    """The model of a case under the settings, and its title. `hot`: with weights that make every term of the arithmetic count."""
    shape = shapes.SHAPES[name]
    dtype = settings.dtype or ("fp32" if settings.small else shape.dtype)
    count = layers or shape.timed_layers
    if settings.small:
        shape, count = shape.small(), layers or 2
    model = shapes.build(shape, count, positions, DTYPES[dtype], settings.device, hot)
    return model, f"{name}{' (toy)' if settings.small else ''}, {count} layers, {dtype}"


def workloads(
    settings: Settings, cases: Sequence[str], batches: Sequence[int], layers: int | None, cache: int, live: int | None
) -> Iterator[tuple[str, int, Workload]]:
    """The decode steps of all cases at all batches, each with its case and batch; encoders at batch 1, over 128 tokens."""
    for name in cases:
        model, title = model_of(name, settings, layers, cache)
        encoder = shapes.SHAPES[name].family == "bert"
        for batch in (1,) if encoder else batches:
            yield name, batch, encode(model, title, batch, 128) if encoder else decode(model, title, batch, cache, live)
        del model


def same(model: Any) -> Any:
    """The model, unchanged."""
    return model


def token_ids(model: Any, batch: int, length: int) -> Tensor:
    """Random tokens [batch, length]."""
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


class Cache:
    """A model's static cache that can be set back: its keys and values stay, its position is `start` again."""

    def __init__(self, model: Any, batch: int, room: int, live: int):
        self.cache = static_cache(model, room, batch)
        self.argument = {cache_argument(model): self.cache}
        self.positions = [layer.cumulative_length for layer in self.cache.layers]
        if live:
            model(input_ids=token_ids(model, batch, live), logits_to_keep=1, **self.argument)
        self.start_at(live)

    def start_at(self, live: int) -> None:
        """Steps begin after `live` tokens from now on."""
        self._start = [torch.full_like(position, live) for position in self.positions]

    def rewind(self) -> None:
        """Set the position back: one launch."""
        torch._foreach_copy_(self.positions, self._start)

    def tensors(self) -> list[Tensor]:
        """Keys and values of every layer."""
        return [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]

    def widened(self, model: Any, batch: int, room: int) -> Cache:
        """The same contents and position for a model of another dtype."""
        other = Cache(model, batch, room, 0)
        for ours, theirs in zip(other.cache.layers, self.cache.layers, strict=True):
            ours.keys.copy_(theirs.keys)
            ours.values.copy_(theirs.values)
        other._start = self._start
        return other


def decoded(model: Any, cache: Cache, batch: int) -> Callable[[Side], Callable[[], Tensor]]:
    """For a side: the call that decodes one token after what is in `cache`, and returns its logits."""
    step = token_ids(model, batch, 1)

    def call_for(side: Side) -> Callable[[], Tensor]:
        forward = side.compile(model)
        return lambda: forward(input_ids=step, **cache.argument).logits

    return call_for


def decode(model: Any, title: str, batch: int, room: int, live: int | None) -> Workload:
    """A decode step of `batch` sequences whose cache has room for `room` tokens, of which `live` are there."""
    live = room - STEPS if live is None else live
    if not 0 < live <= room - STEPS:
        raise ValueError(f"a block of {STEPS} steps needs 0 < live <= {room - STEPS}; {live} tokens of a cache of {room} were asked for")
    with torch.no_grad():
        cache = Cache(model, batch, room, live)
    step, call_for = token_ids(model, batch, 1), decoded(model, cache, batch)

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        return [call_for(side)] * STEPS

    def reference(change: Callable[[Any], Any] = same) -> Tensor:
        wide = change(copy.deepcopy(model).to(WIDER[model.dtype]))
        cache.rewind()
        own = cache.widened(wide, batch, room)
        own.rewind()
        return torch.stack([wide(input_ids=step, **own.argument).logits for _ in range(2)])

    return Workload(
        title=f"{title}, b{batch}, {live} of {room} tokens",
        facts={"cache": room, "live": live},
        dtype=model.dtype,
        compile_for=compile_for,
        reference=reference,
        prepare=cache.rewind,
        rounded=lambda: reference(rounded),
        moved=shapes.weight_bytes(model) + shapes.cache_bytes(model, batch, live),
        moved_int8=shapes.int8_bytes(model) + shapes.cache_bytes(model, batch, live),
        checked=2,  # the second step reads what the first one wrote
        size=Size(model.config.num_hidden_layers, batch),
        held=held(model, cache.cache),
        state=cache.tensors(),
    )


def encode(model: Any, title: str, batch: int, length: int) -> Workload:
    """One pass of an encoder over `batch` sequences of `length` tokens, with the mask that a tokenizer gives."""
    inputs = {
        "input_ids": token_ids(model, batch, length),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64, device=model.device),
    }

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        forward = side.compile(model)
        return [lambda: forward(**inputs).last_hidden_state] * STEPS

    def reference(change: Callable[[Any], Any] = same) -> Tensor:
        return change(copy.deepcopy(model).to(WIDER[model.dtype]))(**inputs).last_hidden_state[None]

    return Workload(
        title=f"{title}, b{batch}, {length} tokens",
        facts={"length": length},
        dtype=model.dtype,
        compile_for=compile_for,
        reference=reference,
        rounded=lambda: reference(rounded),
        moved=shapes.weight_bytes(model),
        moved_int8=shapes.int8_bytes(model),
        size=Size(model.config.num_hidden_layers, batch * length),
        held=held(model),
    )
