"""Which token comes next: transformers' logits processors with shapes that never change and no look at the host, and the draw.

A processor of transformers is used as it is where it computes with scores alone. Those that look at the tokens so far, or count them, are
said again here over buffers of fixed size; `tests/engine` holds each against transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from .decoder import NotOurs
from .state import State

Process = Callable[[State, Tensor], Tensor]  # (state, scores [rows, vocabulary] fp32) -> scores


@dataclass
class Recipe:
    """How a token is picked from logits.

    `key` tells recipes apart that are different computations; numbers that change from call to call (lengths) are in the state, under the
    names in `numbers`, and the tokens that each row's penalties skip at its beginning in `skipped`. `looks_behind`: whether a process reads
    the state's ids behind the newest token.
    """

    sample: bool
    key: Hashable
    steps: list[Process] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    skipped: Tensor | None = None
    looks_behind: bool = False

    def add_number(self, name: str, value: int) -> None:
        """Have the state hold `value` under `name`. Raises `NotOurs` where another processor wants another value there."""
        if self.numbers.setdefault(name, value) != value:
            raise NotOurs("there are two logits processors of one kind")

    @property
    def plain(self) -> bool:
        """Whether the token of the largest logit is the one."""
        return not self.sample and not self.steps

    def pick(self, state: State, logits: Tensor) -> Tensor:
        """The next token of each row, int64 [rows], from logits [rows, vocabulary]."""
        if self.plain:
            return logits.argmax(-1)
        scores = logits.to(torch.float32)
        for step in self.steps:
            scores = step(state, scores)
        if not self.sample:
            return scores.argmax(-1)
        # What torch.multinomial does for one draw, without its look at the numbers: the same tokens for the same seed.
        probabilities = scores.softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def recipe(processors: Sequence[Any], sample: bool) -> Recipe:
    """The recipe for transformers' prepared `processors`. Raises `NotOurs` for one that has no form with fixed shapes."""
    made = Recipe(sample, None)
    key: list[Hashable] = [sample]
    for processor in processors:
        translate = _TRANSLATIONS.get(type(processor))
        if translate is None:
            raise NotOurs(f"{type(processor).__name__} is no logits processor that runs on the device with fixed shapes")
        key.append((type(processor).__name__, translate(processor, made)))
    made.key = tuple(key)
    return made


# ------------------------------------------------------------------------------------------------------------------ translations


def _as_it_is(processor: Any, made: Recipe) -> Hashable:
    """Scores alone go in. What the processor holds makes its key; a tensor in it by its contents."""
    made.steps.append(lambda state, scores: processor(None, scores))
    held = sorted(vars(processor).items())
    return tuple((name, tuple(value.reshape(-1).tolist()) if isinstance(value, Tensor) else value) for name, value in held)


def _repetition(processor: Any, made: Recipe) -> Hashable:
    """The penalty for tokens that are there already, except for those that each row, or all rows, have at their beginning.

    Behind the newest token the buffer of ids repeats the prompt's last one, and a token counts once.
    """
    penalty, skip = processor.penalty, getattr(processor, "prompt_ignore_length", None)
    by_row = isinstance(skip, Tensor)
    if by_row and made.skipped is not None:
        raise NotOurs("there are two repetition penalties")
    if by_row:
        made.skipped = skip
    elif skip:
        made.add_number("repetition_skip", skip)

    def process(state: State, scores: Tensor) -> Tensor:
        vocabulary = scores.shape[-1]
        ids = state.ids.clamp(max=vocabulary)
        if by_row:
            ids = ids.masked_fill(state.columns < state.skipped[:, None], vocabulary)
        elif skip:
            counted = (state.columns >= state.number("repetition_skip")) & (state.columns < state.count)
            ids = ids.masked_fill(~counted, vocabulary)
        padded = torch.nn.functional.pad(scores, (0, 1))
        found = padded.gather(1, ids)
        return padded.scatter(1, ids, torch.where(found < 0, found * penalty, found / penalty))[:, :vocabulary]

    made.steps.append(process)
    made.looks_behind = True
    return penalty, "by row" if by_row else bool(skip)


def _while_short(number: str, least: Callable[[Any], int]) -> Callable[[Any, Recipe], Hashable]:
    """No end-of-sequence token while fewer tokens are there than the state's `number`."""

    def translate(processor: Any, made: Recipe) -> Hashable:
        ends = tuple(processor.eos_token_id.reshape(-1).tolist())
        made.add_number(number, least(processor))
        made.steps.append(lambda state, scores: _forbid(state, scores, ends, state.count < state.number(number)))
        return ends

    return translate


def _suppress(processor: Any, made: Recipe) -> Hashable:
    tokens = tuple(processor.suppress_tokens.tolist())
    made.steps.append(lambda state, scores: _forbid(state, scores, tokens, None))
    return tokens


def _suppress_at_begin(processor: Any, made: Recipe) -> Hashable:
    tokens = tuple(processor.begin_suppress_tokens.tolist())
    made.add_number("begin", processor.begin_index)
    made.steps.append(lambda state, scores: _forbid(state, scores, tokens, state.count == state.number("begin")))
    return tokens


def _forced_first(processor: Any, made: Recipe) -> Hashable:
    token = processor.bos_token_id
    made.steps.append(lambda state, scores: _force(state, scores, (token,), state.count == 1))
    return token


def _forced_last(processor: Any, made: Recipe) -> Hashable:
    tokens = tuple(processor.eos_token_id.reshape(-1).tolist())
    made.add_number("forced_last", processor.max_length - 1)
    made.steps.append(lambda state, scores: _force(state, scores, tokens, state.count == state.number("forced_last")))
    return tokens


def _forbid(state: State, scores: Tensor, tokens: tuple[int, ...], where: Tensor | None) -> Tensor:
    """`scores` with -inf for `tokens`, where the condition [] holds."""
    chosen = state.constant([token for token in tokens if 0 <= token < scores.shape[-1]])
    if where is None:
        return scores.index_fill(1, chosen, -torch.inf)
    kept = scores.index_select(1, chosen)
    return scores.index_copy(1, chosen, kept.masked_fill(where, -torch.inf))


def _force(state: State, scores: Tensor, tokens: tuple[int, ...], where: Tensor) -> Tensor:
    """`scores` with 0 for `tokens` and -inf for all others, where the condition [] holds."""
    only = torch.full_like(scores, -torch.inf).index_fill(1, state.constant(list(tokens)), 0.0)
    return torch.where(where, only, scores)


_TRANSLATIONS: dict[type, Callable[[Any, Recipe], Hashable]] = {
    **dict.fromkeys(
        (
            theirs.TemperatureLogitsWarper,
            theirs.TopKLogitsWarper,
            theirs.TopPLogitsWarper,
            theirs.MinPLogitsWarper,
            theirs.TypicalLogitsWarper,
            theirs.EpsilonLogitsWarper,
            theirs.InfNanRemoveLogitsProcessor,
            theirs.LogitNormalization,
        ),
        _as_it_is,
    ),
    theirs.RepetitionPenaltyLogitsProcessor: _repetition,
    theirs.MinLengthLogitsProcessor: _while_short("least", lambda processor: processor.min_length),
    theirs.MinNewTokensLengthLogitsProcessor: _while_short(
        "least_new", lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens
    ),
    theirs.SuppressTokensLogitsProcessor: _suppress,
    theirs.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    theirs.ForcedBOSTokenLogitsProcessor: _forced_first,
    theirs.ForcedEOSTokenLogitsProcessor: _forced_last,
}
