"""How models without a cache are run: one call, each padded row compared with itself alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .axes import Case, batch_of
from .family import HIDDEN
from .trial import Trial, accepts, logits_of

Arguments = Callable[[Any, Case, int], dict[str, Any]]


def one_call(trial: Trial, arguments: Arguments) -> None:
    """A model of one call with `arguments(model, case, length)`."""
    case, model, exact = trial.case, trial.model, trial.exact
    given = arguments(model, case, trial.length)
    forward, reports = trial.compiled()
    got = logits_of(forward(**given))
    trial.finish("prefill", reports)
    mask = given.get("attention_mask")
    if mask is None or case.padding == "none":
        wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        trial.note("prefill", got, logits_of(model(**given)), logits_of(exact(**wide)))
        return
    for i in range(len(mask)):
        seen = mask[i].bool()
        own = {k: v[i : i + 1][:, seen] for k, v in given.items() if k != "attention_mask"}
        trial.note("prefill", got[i][seen], logits_of(model(**own))[0], logits_of(exact(**own))[0])


def text(model: Any, case: Case, length: int) -> dict[str, Any]:
    """Ids and mask of a text encoder, and positions where padding on the left needs them."""
    batch = batch_of(case.padding, length, 0)
    pad = getattr(model.config, "pad_token_id", None)
    ids = batch.ids.masked_fill(~batch.keep, 0 if pad is None else pad)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": batch.keep.long()}
    if case.padding == "left" and accepts(model, "position_ids"):
        # RoBERTa counts positions from behind its padding token.
        given["position_ids"] = batch.positions + (pad + 1 if type(model).__name__.startswith(("Roberta", "MPNet")) else 0)
    if case.padding == "left" and accepts(model, "token_type_ids") and "position_ids" not in given:
        raise ValueError("left padding needs position_ids")
    return given


def pixels(model: Any, case: Case, length: int) -> dict[str, Any]:
    """Two images [2, 3, 24, 24]."""
    return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1)).to(case.dtype)}


def ids_alone(model: Any, case: Case, length: int) -> dict[str, Any]:
    """The ids of a model that takes nothing else."""
    return {"ids": batch_of("none", length, 0).ids}


def embedded(trial: Trial) -> None:
    """A model that takes vectors [B, S, H], and what to leave out as `src_key_padding_mask`."""
    case, length = trial.case, trial.length
    x = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    keep = batch_of(case.padding, length, 0).keep
    mask = {} if case.padding == "none" else {"src_key_padding_mask": ~keep}
    forward, reports = trial.compiled()
    got = forward(x, **mask)
    trial.finish("prefill", reports)
    for i in range(2):
        own = x[i : i + 1][:, keep[i]]
        trial.note("prefill", got[i][keep[i]], trial.model(own)[0], trial.exact(own.double())[0])
