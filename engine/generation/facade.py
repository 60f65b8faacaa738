"""The model as transformers' `generate` sees it: its forward is compiled, and the engine's loop makes the tokens where it does the same.

Everything that prepares a generation (configuration, special tokens, logits processors, stopping criteria) stays transformers' own code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from .compiled import compiled
from .decoder import NotOurs
from .lengths import for_all_lengths, of_any_length
from .merged import Merged
from .stand_in import stand_in, stand_in_class

Sample = Callable[..., Any]  # what `_sample` takes, without self; raises NotOurs
Check = Callable[[int, Any], None]  # (tokens of the prompt, GenerationConfig as prepared); raises ValueError


class Facade:
    """Makes stand-ins for a model. `no_cache`: whether the next generation's cache is made only if the engine's loop, which has one of its
    own, does not run it: transformers makes it in a third of the time that preparing takes, a layer at a time."""

    def __init__(self, model: Any, options: dict[str, Any] | None, sample: Sample, check: Check) -> None:
        self.model = model
        self.options = options
        self.called = 0  # calls of the compiled forward so far
        self.no_cache = False
        run = compiled_forward(model, options)

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called += 1
            if kwargs.get("encoder_outputs") is not None:
                kwargs = of_any_length(kwargs)
            return run(*args, **kwargs)

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # looked at several times a call
        self._kind = stand_in_class(model, forward, **_members(type(model), sample, check, self._encoder, Merged(), lambda: self.no_cache))
        self._encoders: dict[int, tuple[nn.Module, type]] = {}

    def stand_in(self) -> Any:
        """The model of this moment, to call `generate` of."""
        return stand_in(self.model, self._kind)

    def _encoder(self, encoder: Any) -> Any:
        known = self._encoders.get(id(encoder))
        if known is None or known[0] is not encoder:
            kind = stand_in_class(encoder, for_all_lengths(compiled_forward(encoder, self.options)))
            known = self._encoders[id(encoder)] = (encoder, kind)
        return stand_in(encoder, known[1])


def compiled_forward(module: Any, options: dict[str, Any] | None) -> Callable[..., Any]:
    """The forward of `module` compiled, under its own signature: transformers looks at that."""

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    return compiled(forward, options, whole=False)


def _members(
    base: type,
    sample: Sample,
    check: Check,
    compiled_encoder: Callable[[Any], Any],
    merged: Merged,
    no_cache: Callable[[], bool],
) -> dict[str, Any]:
    """What a stand-in for a model of the class `base` does in a way of its own."""
    left: list[Any] = []  # what the cache that was not made is made of, but for the model's arguments

    def _prepare_cache_for_generation(self: Any, config: Any, given: dict[str, Any], mode: Any, *args: Any, **kwargs: Any) -> Any:
        left.clear()
        if no_cache() and mode in _LOOPS and config.cache_implementation is None and not config.return_dict_in_generate:
            left.append((config, mode, args, kwargs))
            return None
        return base._prepare_cache_for_generation(self, config, given, mode, *args, **kwargs)  # type: ignore[attr-defined]

    def _sample(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = left.copy()
        left.clear()
        try:
            return sample(input_ids, *args, **kwargs)
        except NotOurs:
            for config, mode, more, named in prepared:
                base._prepare_cache_for_generation(self, config, kwargs, mode, *more, **named)  # type: ignore[attr-defined]
            return base._sample(self, input_ids, *args, **kwargs)  # type: ignore[attr-defined]

    def _validate_generated_length(self: Any, generation_config: Any, input_ids_length: int, *args: Any, **kwargs: Any) -> None:
        base._validate_generated_length(self, generation_config, input_ids_length, *args, **kwargs)  # type: ignore[attr-defined]
        check(input_ids_length, generation_config)

    def _valid_auto_compile_criteria(self: Any, *args: Any, **kwargs: Any) -> bool:
        return False  # what is called is compiled already

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoder = base.get_encoder(self, *args, **kwargs)  # type: ignore[attr-defined]
        return compiled_encoder(encoder) if isinstance(encoder, nn.Module) and encoder is not self else encoder

    def _prepare_generation_config(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        prepare = base._prepare_generation_config  # type: ignore[attr-defined]
        if args or prepare is not GenerationMixin._prepare_generation_config:
            return prepare(self, generation_config, *args, **kwargs)
        return merged.merge(self, functools.partial(prepare, self), generation_config, kwargs)

    own = [
        _prepare_generation_config,
        _prepare_cache_for_generation,
        _sample,
        _validate_generated_length,
        _valid_auto_compile_criteria,
        get_encoder,
    ]
    return {function.__name__: function for function in own if hasattr(base, function.__name__)}


_LOOPS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)  # those of `_sample`
