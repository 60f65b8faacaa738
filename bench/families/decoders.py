"""How decoders are run: a prompt, and decode steps over a cache; each row is compared with itself alone, unpadded and without a cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.generate import cache_argument

from .axes import Batch, batch_of
from .trial import Trial, accepts, logits_of


def decoder(trial: Trial, decodes: bool) -> None:
    """Prompt and, where the case has them, decode steps of a decoder-only model."""
    case, length = trial.case, trial.length
    inputs = _Inputs(trial)
    total = length + (trial.steps if decodes else 0)
    if trial.family.wrong_with_static_cache and case.cache == "static":
        eager, right = (_with_cache(which, inputs, total) for which in (trial.model, trial.exact))
    else:
        eager, right = (_alone(which, inputs, total) for which in (trial.model, trial.exact))

    def compare(phase: str, got: Tensor, first: int, last: int) -> None:
        for i, keep in enumerate(inputs.batch.keep):
            seen, before = keep[first:last], int(keep[:first].sum())
            part = slice(before, before + int(seen.sum()))
            trial.note(phase, got[i][seen], eager[i][part], right[i][part])

    forward, reports = trial.compiled()
    if case.cache == "none":
        own = {"use_cache": False} if accepts(trial.model, "use_cache") else {}
        compare("prefill", logits_of(forward(**inputs(0, length), **own)), 0, length)
        trial.finish("prefill", reports)
        return
    more = {cache_argument(trial.model): _cache(trial, inputs), "use_cache": True}
    compare("prefill", logits_of(forward(**inputs(0, length), **more)), 0, length)
    trial.finish("prefill", reports)
    if not decodes:
        return
    for at in range(length, total):
        compare("decode", logits_of(forward(**inputs(at, at + 1), **more)), at, at + 1)
    trial.finish("decode", reports)


class _Inputs:
    """Arguments of the model for tokens `first` to `last`, of all rows or of one without its padding."""

    def __init__(self, trial: Trial):
        self.trial = trial
        self.batch: Batch = batch_of(trial.case.padding, trial.length, trial.steps)
        self.room = trial.length + trial.steps + 3  # of a static cache

    def __call__(self, first: int, last: int, row: int | None = None) -> dict[str, Any]:
        rows = slice(None) if row is None else slice(row, row + 1)
        keep = self.batch.keep
        ids, positions = self.batch.ids[rows, first:last], self.batch.positions[rows, first:last]
        if row is not None:
            seen = keep[row, first:last]
            ids, positions = ids[:, seen], positions[:, seen]
        given: dict[str, Any] = {"input_ids": ids.contiguous()}
        if accepts(self.trial.model, "position_ids"):
            given["position_ids"] = positions.contiguous()
        if row is None and accepts(self.trial.model, "attention_mask"):
            whole = self.trial.family.whole_mask and self.trial.case.cache == "static"
            given["attention_mask"] = F.pad(keep[:, :last].long(), (0, (self.room if whole else last) - last))
        return given


def _alone(which: Any, inputs: _Inputs, total: int) -> list[Tensor]:
    """Logits [S', V] of each row by itself, unpadded, without a cache."""
    own = {"use_cache": False} if accepts(which, "use_cache") else {}
    return [logits_of(which(**inputs(0, total, row), **own))[0] for row in range(len(inputs.batch.keep))]


def _with_cache(which: Any, inputs: _Inputs, total: int) -> list[Tensor]:
    """Logits [S', V] of each row by an eager run with a StaticCache, for the one family whose eager run without gives others."""
    import transformers as T

    length = inputs.trial.length
    cache = T.StaticCache(config=which.config, max_cache_len=inputs.room)
    parts = [(0, length), *((at, at + 1) for at in range(length, total))]
    more = {cache_argument(which): cache, "use_cache": True}
    logits = torch.cat([logits_of(which(**inputs(*part), **more)) for part in parts], 1)
    return [row[seen[:total]] for row, seen in zip(logits, inputs.batch.keep, strict=True)]


def _cache(trial: Trial, inputs: _Inputs) -> Any:
    import transformers as T

    if trial.case.cache == "dynamic":
        return T.DynamicCache(config=trial.model.config)
    cache = T.StaticCache(config=trial.model.config, max_cache_len=inputs.room)
    if trial.case.padding != "left":
        _allocate(cache, trial.model, len(inputs.batch.keep))
    return cache


def _allocate(cache: Any, model: Any, batch: int) -> None:
    """The memory of a StaticCache at once."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    elif getattr(config, "new_decoder_architecture", False):
        heads = config.num_attention_heads  # repeated before they are kept
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, heads, size, model.dtype, model.device)


def seq2seq(trial: Trial) -> None:
    """An encoder-decoder: its encoder once, the decoder's prompt, and decode steps with both caches."""
    import transformers as T

    case, model, steps = trial.case, trial.model, trial.steps
    batch = batch_of(case.padding if case.padding == "right" else "none", trial.length, 0)
    g = torch.Generator().manual_seed(3)
    decoder_ids = torch.randint(3, model.config.vocab_size, (2, 7 + steps), generator=g)
    audio = model.main_input_name == "input_features"
    if audio:
        source: dict[str, Any] = {"input_features": torch.randn(2, 8, 24, generator=g).to(case.dtype)}
    else:
        source = {"input_ids": batch.ids, "attention_mask": batch.keep.long()}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in source.items()}

    def whole(which: Any, given: dict[str, Any]) -> Tensor:
        if audio or case.padding == "none":
            return which(**given, decoder_input_ids=decoder_ids, use_cache=False).logits
        rows = []
        for i in range(2):
            ids = given["input_ids"][i : i + 1, batch.keep[i]]
            rows.append(which(input_ids=ids, decoder_input_ids=decoder_ids[i : i + 1], use_cache=False).logits)
        return torch.cat(rows)

    eager, right = whole(model, source), whole(trial.exact, wide)
    forward, reports = trial.compiled()
    if case.cache == "none":
        got = forward(**source, decoder_input_ids=decoder_ids[:, :7].contiguous(), use_cache=False).logits
        trial.note("prefill", got, eager[:, :7], right[:, :7])
        trial.finish("prefill", reports)
        return
    config = model.config
    if case.cache == "static":
        rooms = (7 + steps + 3, 12 if audio else trial.length)
        cache = T.EncoderDecoderCache(*(T.StaticCache(config=config, max_cache_len=room) for room in rooms))
    else:
        cache = T.EncoderDecoderCache(T.DynamicCache(config=config), T.DynamicCache(config=config))
    given: dict[str, Any] = {} if audio else {"attention_mask": source["attention_mask"]}
    given |= {"encoder_outputs": model.get_encoder()(**source), cache_argument(model): cache, "use_cache": True}

    def call(first: int, last: int) -> Tensor:
        return forward(decoder_input_ids=decoder_ids[:, first:last].contiguous(), **given).logits

    trial.note("prefill", call(0, 7), eager[:, :7], right[:, :7])
    trial.finish("prefill", reports)
    for at in range(7, 7 + steps):
        trial.note("decode", call(at, at + 1), eager[:, at : at + 1], right[:, at : at + 1])
    trial.finish("decode", reports)
