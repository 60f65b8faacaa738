"""The engine's own loop: a prompt's step, then decode steps until every row is at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .buckets import cache_bucket, prompt_bucket
from .cache import KeyValueStore, take_over
from .compiled import compiled, loudly
from .decoder import Decoder
from .feed import Feed
from .gpu_state import GpuState
from .looks import Looks
from .progress import compiling
from .reader import Copying, Direct, Reader
from .request import Request
from .seq2seq import Seq2Seq
from .source import Behind, SourceStore
from .state import State
from .steps import PROMPT_RUNS, Steps
from .watch import Watch


class Changed(Exception):
    """The model is another one than the last look said."""


@dataclass
class Made:
    """What came of a request: `ids` [rows, n + new], a copy, and the cache, of which the `held` tokens from slot `first` on count; it is
    the engine's own. Behind an encoder, `source` is what the decode steps read of it."""

    ids: Tensor
    cache: Cache
    held: int
    first: int
    source: Behind | None = None


@dataclass
class Loop:
    """Runs requests one at a time. `least`, `most`: tokens of a row that the cache holds at first, and at all."""

    decoder: Decoder
    least: int
    most: int
    options: dict[str, Any] | None
    steps: Steps
    device: torch.device
    reader: Reader | None = None
    _states: dict[tuple[int, int], State] = field(default_factory=dict)
    _feeds: dict[tuple[int, int], Feed] = field(default_factory=dict)
    _compiled: set[Hashable] = field(default_factory=set)
    _place: tuple[int, int, int] = (0, 0, 0)  # which model and which memory steps were recorded for
    _running: bool = False
    last_step: Hashable = None  # the key of the decode step that was run last
    last_prompt: Hashable = None  # and of the prompt
    _began: tuple[State, Feed, int, int, int] | None = None  # and tokens: of the sequence so far, of those in the cache, and to be made
    taken: int = 0  # tokens of a row that the request under way, or the last one, has got

    def __post_init__(self) -> None:
        self.store = KeyValueStore(self.decoder.layers, self.device)
        source = self.decoder.source if isinstance(self.decoder, Seq2Seq) else None
        self.sources = None if source is None else SourceStore(source, self.device)
        self.reader = self.reader or (Copying(self.device) if self.device.type == "cuda" else Direct())
        self._watch = Watch(self.decoder.model)
        decoder = self.decoder

        def prompt(ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, fed: Tensor, last: Tensor) -> Tensor:
            logits = decoder.logits(ids, positions, mask, cache, fed, last)
            return logits if decoder.keeps else logits.index_select(1, last)

        def step(ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, fed: Tensor) -> Tensor:
            return decoder.logits(ids, positions, mask, cache, fed, None)

        self._prompt = compiled(prompt, self.options, whole=True)
        self._step = compiled(step, self.options, whole=True)

    @torch.no_grad()
    def run(self, request: Request, looked: int | None = None, sure: bool = True) -> Made:
        """Generate. The cache and the state that it leaves are overwritten by the next run. `looked`: what `look` has just returned, if it
        was called. Not `sure`: what `lies` has returned; then the look comes beside the prompt, where that is a record to be launched, and
        before any other step. Raises `Changed`, before anybody is given a token, if it says something else, and RuntimeError inside of
        another run."""
        if self._running:
            raise RuntimeError(
                "dsi: a streamer or a stopping criterion calls the engine that it serves; generate with another engine there"
            )
        self._running = True
        try:
            return self._run(request, self.look() if looked is None else looked, sure)
        finally:
            self._running = False

    def look(self) -> int:
        """A number that tells which model it is that the loop runs (watch.py)."""
        return self._watch.look()

    def lies(self) -> int | None:
        """The number of the last look, where records may be launched before the next one; None where they may not."""
        return None if self.steps.recorder is None else self._watch.lies()

    def _run(self, request: Request, looked: int, sure: bool) -> Made:
        rows = request.ids.shape[0]
        moved = self.store.grown
        cache = self._cache(rows, request.total)
        if self.store.grown != moved:
            self._states.clear()
        behind = None if self.sources is None or request.source is None else self.sources.hold(cache, *request.source)
        # What was recorded is for a model and for memory that stay where they are.
        place = looked, self.store.grown, 0 if self.sources is None else self.sources.grown
        if self._place != place:
            self.steps.forget()
            self._place = place
        if request.past is not None and request.held:
            take_over(cache, request.past, request.held, self.store.slots - request.held if self.decoder.rolls else 0)
        state = self._state(rows)
        feed = self._begin(state, request)
        self._tokens(state, feed, behind or (cache, cache), request, sure)
        n = request.ids.shape[1]
        # Steps behind the end may have been run: they have moved what rolls.
        first = self.store.slots - int(state.length) if self.decoder.rolls else 0
        held = request.held + request.fed + self.taken - 1
        return Made(state.ids[:, : n + self.taken].clone(), cache, held, first, None if behind is None else behind[1])

    def measured(self, prompt: bool = False) -> tuple[Callable[[], None], Callable[[], None], int] | None:
        """For benchmarks: what launches the last decode step (`prompt`: the last prompt) once more, what sets its counters back to where
        the last request began to decode (its prompt), and how often it may be launched in between. None where it was not recorded."""
        replay = self.steps.replay(self.last_prompt if prompt else self.last_step)
        if replay is None or self._began is None:
            return None
        state, feed, tokens, held, new = self._began
        made, length = (0, held) if prompt else (1, held + int(feed.length))

        def rewind() -> None:
            for counter, value in ((state.count, tokens + made), (state.made, made), (state.length, length)):
                counter.fill_(value)
            state.token.copy_(state.ids[:, tokens : tokens + 1])
            state.position.copy_(feed.positions.index_select(1, feed.last) + made)
            state.finished.zero_()

        return replay, rewind, 1 if prompt else new - 1

    # ------------------------------------------------------------------------------------------------------------------- buffers

    def _cache(self, rows: int, total: int) -> Cache:
        """An empty cache for `total` tokens a row; with room for more, so that it need not grow soon, if the memory is there."""
        slots = cache_bucket(total, self.least, self.most)
        try:
            return self.store.cleaned(rows, slots)
        except RuntimeError:  # what running out of memory is, on every device
            needed = max(total, self.least)
            try:
                return self.store.cleaned(rows, needed)
            except RuntimeError as error:
                size = self.store.bytes_a_token * needed * rows / 2**20
                raise RuntimeError(
                    f"dsi: the KV cache of {rows} rows of {needed} tokens needs {size:.0f} MiB, which {self.device} does not have "
                    f"(max_out_tokens = {self.most}, min_out_tokens = {self.least}): {error}"
                ) from error

    def _state(self, rows: int) -> State:
        key = (rows, self.store.slots)
        if key not in self._states:
            kind = GpuState if self.device.type == "cuda" else State
            self._states[key] = kind(rows, self.store.slots, self.store.length)
        return self._states[key]

    def _begin(self, state: State, request: Request) -> Feed:
        """Have `state` begin, and the prompt in its buffers."""
        # Padding between what is held and what is fed would be tokens that a model counts.
        whole = self.decoder.rolls and request.held > 0
        bucket = request.fed if whole else prompt_bucket(request.fed, state.slots - request.held)
        if (state.rows, bucket) not in self._feeds:
            self._feeds[state.rows, bucket] = Feed(state.rows, bucket, self.device, at_end=self.decoder.rolls)
        feed, recipe = self._feeds[state.rows, bucket], request.recipe
        copies = [*feed.filling(request.ids[:, -request.fed :], request.positions)]
        if request.positions is not None:
            copies.append((state.position, request.positions[:, -1:]))
        begins = request.ids, request.mask, request.ends, request.pad, recipe.numbers
        state.begin(*begins, held=request.held, looks_behind=recipe.looks_behind, besides=copies)
        if recipe.skipped is not None:
            state.skipped.copy_(recipe.skipped)
        return feed

    # ---------------------------------------------------------------------------------------------------------------------- steps

    def _tokens(self, state: State, feed: Feed, caches: tuple[Any, Any], request: Request, sure: bool) -> None:
        """Run the steps, and count the tokens that a row gets. `caches`: what the prompt's step is given, and what each decode step is."""
        recipe = request.recipe
        masked = request.source is None and (state.rows > 1 or request.mask is not None or self.decoder.always_masked)
        mask = state.mask if masked else None
        self._began = state, feed, request.ids.shape[1], request.held, request.limit
        bucket = feed.bucket
        self.store.written = state.slots if self.decoder.rolls else max(self.store.written, request.held + bucket, request.total)

        written, cache = caches
        places = () if request.source is None else (written.states.shape[1], cache.states.shape[1])
        one = bucket == 1 and request.source is None  # a prompt that is a decode step
        within = _Within(self.decoder)

        def prompt() -> None:
            within.loudly()
            if one:
                within.decoding()
                logits = self._step(feed.ids, feed.positions, mask, cache, feed.length)
            else:
                logits = self._prompt(feed.ids, feed.positions, mask, written, feed.length, feed.last)
            state.follow(recipe, logits[:, -1], feed.length)

        def step() -> None:
            within.loudly()
            within.decoding()
            logits = self._step(state.token, state.position, mask, cache, state.one)
            state.follow(recipe, logits[:, -1], state.one)

        kind = (state.rows, state.slots, masked, state.ending, recipe.key)
        self.last_step, self.last_prompt = ("step", *kind, *places[1:]), ("prompt", bucket, *kind, *places)
        looks = Looks(self, state, request)
        launch: Callable[[], None] | None = None
        draws = None
        if not sure:
            sure = not self.steps.has(self.last_prompt)
            if sure:
                self._be_sure()
            elif recipe.sample:
                draws = _Draws(self.device)
        with within:
            for number in range(request.limit):
                if launch is not None:
                    launch()
                elif number == 0:
                    with compiling("decode step" if one else "prompt", self._new((not one, *kind[:3]))):
                        self.steps.run(self.last_prompt, prompt, PROMPT_RUNS)
                    if not sure:
                        self._be_sure(draws)
                else:
                    with compiling("decode step", self._new((False, *kind[:3]))):
                        launch = self.steps.run(self.last_step, step)
                if looks.queued(number):
                    return
        looks.finish()

    def _be_sure(self, draws: _Draws | None = None) -> None:
        """Raise `Changed` if what was recorded is of another model than the one that there is now. `draws`: to be taken back then."""
        if self.look() != self._place[0]:
            if draws is not None:
                draws.take_back()
            raise Changed

    def _new(self, key: Hashable) -> bool:
        if key in self._compiled:
            return False
        self._compiled.add(key)
        return True


class _Draws:
    """Random numbers that are drawn on a device from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def take_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._before, self._device)
        else:
            torch.set_rng_state(self._before)


class _Within(contextlib.ExitStack):
    """What steps run in that may compile something, entered by the first that does: launching a record takes none of it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = decoder
        self._loudly = self._decoding = False

    def loudly(self) -> None:
        if not self._loudly:
            self._loudly = True
            self.enter_context(loudly)

    def decoding(self) -> None:
        if not self._decoding:
            self._decoding = True
            self.enter_context(self._decoder.decoding())
