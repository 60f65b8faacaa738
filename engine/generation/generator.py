"""Text generation with a compiled model: transformers' `generate`, run by the engine's own loop wherever that does the same."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .cache import hand_over
from .compiled import loudly, switched_off
from .decoder import NotOurs
from .examine import examine, position_limit, source_limit
from .facade import Facade
from .kept import Call, Further, Kept
from .loop import Changed, Loop, Made
from .progress import compiling
from .prompts import check_cache, check_ids, check_padding, check_prompt, check_room, check_source, prompt_length, total_length, vocabulary
from .request import Request, request_of
from .seq2seq import states_of
from .steps import Steps, recorder_for

log = logging.getLogger("dsi.engine")


class Generator:
    """Generates with `model`, a transformers model in eval mode, compiled.

    `generate` takes what transformers' `generate` takes and returns what it returns. Greedy decoding and sampling of decoder-only models
    run in the engine's own loop: prompt and decode step are compiled once each, the KV cache is the engine's, and on CUDA (`cuda_graph`)
    a token is one launch of a recorded graph. Everything else runs in transformers' loops, which call the compiled forward.

    max_out_tokens: tokens of a row, prompt and new ones, at most. min_out_tokens: as many must fit into memory from the start.
    options: those of `torch.compile(model, backend="dsi", options=...)`.

    One call runs at a time; others wait. What a call has returned is never written to again.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_out_tokens: int,
        min_out_tokens: int = 1,
        options: dict[str, Any] | None = None,
        cuda_graph: bool = True,
    ) -> None:
        if min_out_tokens > max_out_tokens:
            raise ValueError(f"dsi: min_out_tokens = {min_out_tokens} is more than max_out_tokens = {max_out_tokens}")
        self.model = model
        self.max_out_tokens, self.min_out_tokens = max_out_tokens, min_out_tokens
        self.options, self.cuda_graph = options, cuda_graph
        self.why_not_ours = ""  # why the last call ran in transformers' loops; "" where it did not
        self.loop: Loop | None = None
        self._kind: tuple[torch.device, torch.dtype] | None = None  # where and in what dtype the loop was made
        self._tried = 0  # which model the loop was last found right for, where that was tried
        self._refused = ""
        self._positions, self._source_positions = position_limit(model, model.config), source_limit(model)
        self._facade = Facade(model, options, self._sample, self._check_prepared)
        self._lock = threading.RLock()
        self._kept = Kept(model)
        self._prepared: tuple[Tensor, Request, Any, int] | None = None  # what `_sample` made last, of what, and which model that is for
        self._growing: object = None  # the configurations for which transformers has made a cache of the kind that grows
        self._vocabulary: int | None = None  # of the model that was looked at last
        self._done: Any = None
        self._called = False

    # ------------------------------------------------------------------------------------------------------------------ the two calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, compiled, without gradients: same arguments, same output."""
        with torch.no_grad(), loudly:
            new, self._called = not self._called, True
            with compiling("forward", new):
                return self._facade.stand_in()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`: token ids, or a ModelOutput with `return_dict_in_generate`.

        Raises ValueError, before anything is computed, where the prompt and the new tokens together are more than `max_out_tokens`, or
        more than the model has positions for, where the prompt is empty, or holds ids that are no tokens.
        """
        given = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
        # Arguments without a name here, and those that are given twice, are for transformers to look at.
        call = self._kept.call(given) if len(given) == len(args) + len(kwargs) and not switched_off() else None
        if call is not None and self._kept.has(call):
            try:
                with self._lock, torch.inference_mode(False), torch.no_grad(), self._ordered(self.loop):
                    again = self._again(call)
                if again is not None:
                    return again
            except Changed:
                if call.streamer is not None:
                    kwargs["streamer"] = Further(call.streamer)
        check_prompt(self.model, given)
        check_source(self.model, given, self._source_positions)
        check_cache(given, None)
        prompt = prompt_length(self.model, given)
        if prompt is not None:
            total = total_length(self.model, given, prompt)
            self._check(prompt, total)
            check_room(given, prompt, total)
        with self._lock, torch.inference_mode(False), torch.no_grad(), loudly, self._ordered():
            self._prepared = None
            self.why_not_ours = "the way to generate is none of the loop's"
            before = self._facade.called
            self._facade.no_cache = call is not None and call.configs is self._growing and "custom_generate" not in given
            made = self._facade.stand_in().generate(*args, **kwargs)
            if self.why_not_ours and self._facade.called == before:
                log.warning(
                    "dsi: nothing of this generation was compiled: the generate of %s runs a model inside of it; give init_inference "
                    "that model",
                    type(self.model).__name__,
                )
            prepared, self._prepared = self._prepared, None
            if call is not None and prepared is not None and prepared[0] is made:
                if prepared[1].past is not None:
                    self._growing = call.configs
                assert self.loop is not None
                self._kept.keep(call, *prepared[1:], plain=not self.loop.decoder.prepares.own)
            return made

    # --------------------------------------------------------------------------------------------------------------------- the loop

    def _again(self, call: Call) -> Tensor | None:
        """The ids that `call` makes, if it is prepared already. Raises `Changed` where a record of the prompt, which the streamer has been
        given by then, turned out to be of another model."""
        loop = self.loop
        if loop is None:
            return None
        looked, sure = self._looked(loop)
        ids = call.ids.cpu()
        request = self._kept.request(call, looked, ids)
        if request is None:
            return None
        check_ids(call.name, ids, self._vocabulary)
        self._check(request.fed, request.total)
        if call.streamer is not None:
            call.streamer.put(ids)
        try:
            made = loop.run(request, looked, sure)
        except torch._dynamo.exc.Unsupported:
            if loop.taken or call.streamer is not None:
                raise
            self._kept.forget()  # the model is more than one graph by now: `_sample` says so
            return None
        self.why_not_ours = ""
        return self._ended(request, made, call.ids.device)

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' `_sample` by the engine's loop. Raises `NotOurs`."""
        ends = any(hasattr(criterion, "eos_token_id") for criterion in kwargs.get("stopping_criteria") or ())
        check_padding(self.model, kwargs["generation_config"], input_ids.shape[0], ends)
        try:
            loop, looked, sure = self._ready(states_of(kwargs.get("encoder_outputs")) if self.model.config.is_encoder_decoder else None)
            request = request_of(loop.decoder, loop.device, input_ids, *args, **kwargs)
        except NotOurs as reason:
            self.why_not_ours = str(reason)
            log.debug("generation runs in transformers' loop: %s", reason)
            raise
        self._check(request.held + request.fed, request.total)
        try:
            try:
                made = loop.run(request, looked, sure)
            except Changed:  # the request is of the model as it is
                looked = loop.look()
                made = loop.run(request, looked)
        except torch._dynamo.exc.Unsupported as error:
            if loop.taken:
                raise
            self._refused = self.why_not_ours = f"the model is more than one graph: {str(error).strip().splitlines()[0]}"
            log.warning("dsi: generation runs in transformers' loop: %s", self._refused)
            raise NotOurs(self._refused) from error
        self.why_not_ours = ""
        config = kwargs["generation_config"]
        ids = self._ended(request, made, input_ids.device)
        if config.return_dict_in_generate and made.source is not None and request.source is not None:
            both = made.source.handed_over(made.held, request.source[0].shape[1])
            return GenerateEncoderDecoderOutput(sequences=ids, **{_CACHE_FIELD: both})
        cache = request.past
        if cache is not None and (config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)):
            hand_over(made.cache, cache, request.held, made.held, made.first)
        elif config.return_dict_in_generate:
            cache = hand_over(made.cache, DynamicCache(config=self.model.config), 0, made.held, made.first)
        if not config.return_dict_in_generate:
            self._prepared = ids, request, config, looked
            return ids
        return GenerateDecoderOnlyOutput(sequences=ids, **{_CACHE_FIELD: cache})

    def _ended(self, request: Request, made: Made, device: torch.device) -> Tensor:
        """The ids that were made, on `device`."""
        ids = made.ids.to(device)
        if request.streamer is not None:
            request.streamer.end()
        return ids

    def _looked(self, loop: Loop) -> tuple[int, bool]:
        """Which model it is that `loop` runs, and whether that is sure, or for the loop to look at beside the prompt."""
        size = vocabulary(self.model)
        found = loop.lies() if size == self._vocabulary else None  # tokens may be none of the table that a record reads
        self._vocabulary = size
        return (loop.look(), True) if found is None else (found, False)

    def _ready(self, states: Tensor | None = None) -> tuple[Loop, int, bool]:
        """The loop, made at the first call, where an encoder made `states`, and what `_looked` says of it. Raises `NotOurs` where the model
        is none for it; whether it is one behind its encoder is tried again when something has happened to the model, such as a hook that
        reads what is padding."""
        if self._refused:
            raise NotOurs(self._refused)
        if switched_off():
            log.warning("dsi: nothing is compiled: %s", _OFF)
            raise NotOurs(_OFF)
        kind = self.model.device, self.model.dtype
        loop = self.loop if self._kind == kind else None
        if loop is not None and states is None:
            return loop, *self._looked(loop)
        if loop is not None and states is not None:
            looked = loop.look()
            if looked == self._tried or not loop.decoder.reads(states):
                return loop, looked, True
        try:
            decoder = examine(self.model, states)
        except NotOurs as reason:
            if loop is None:  # otherwise it was right once, and may be again: it is tried until then
                self._refused = str(reason)
            raise
        if loop is None or dataclasses.replace(decoder, prepares=loop.decoder.prepares) != loop.decoder:
            self._kept.forget()
            steps = Steps(recorder_for(self.model.device, self.cuda_graph))
            most = min(self.max_out_tokens, self._positions or self.max_out_tokens)
            loop = Loop(decoder, self.min_out_tokens, most, self.options, steps, self.model.device)
        self._kind, self.loop, self._tried, self._vocabulary = kind, loop, loop.look(), vocabulary(self.model)
        return loop, self._tried, True

    def _check_prepared(self, prompt: int, config: Any) -> None:
        check_cache({}, config.cache_implementation)
        self._check(prompt, config.max_length)

    def _check(self, prompt: int, total: int) -> None:
        asked = f"dsi: a prompt of {prompt} tokens and {total - prompt} new ones are {total} tokens"
        if total > self.max_out_tokens:
            raise ValueError(
                f"{asked}, and the engine was made for max_out_tokens = {self.max_out_tokens}: ask for fewer, or make it larger"
            )
        if self._positions is not None and total > self._positions:
            raise ValueError(f"{asked}, and {type(self.model).__name__} has a table of {self._positions} positions: ask for fewer")

    @contextlib.contextmanager
    def _ordered(self, loop: Loop | None = None) -> Iterator[None]:
        """Within: work goes to the model's device, or that of `loop`, behind what the last call has queued there on whatever stream."""
        device = self.model.device if loop is None else loop.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            if self._done is None:
                self._done = torch.cuda.Event()
            torch.cuda.current_stream().wait_event(self._done)
            try:
                yield
            finally:
                self._done.record()


_OFF = "torch.compile is switched off (torch._dynamo.config.disable, which TORCH_COMPILE_DISABLE=1 sets)"
_CACHE_FIELD = next(
    name for name in ("cache", "past_key_values") if name in {f.name for f in dataclasses.fields(GenerateDecoderOnlyOutput)}
)
