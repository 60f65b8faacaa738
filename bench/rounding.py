"""Whether rounding explains that two ways to generate parted: a text's tokens beside the model's own logits, computed anew.

Two computations of the same logits differ by what each was rounded by, so greedy searches part where two tokens lie closer than that. What
rounding does is measured where the texts part: the model runs in its own dtype and in a wider one, in one forward without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.generate import cache_argument

TOP = 256  # logits of a token among which rounding is measured: those that could have been chosen
LIMIT = 5.0  # standard deviations of the difference of two rounded logits
SPARE = 2.0**31  # bytes of memory that a wider copy of the weights must leave free


@dataclass(frozen=True)
class Judged:
    """A text beside the model's own logits. By token [n]: how far its logit lies `below` the best, and what `rounding` can make of that;
    `logits` [n, V] in float64, `by` what they were computed in."""

    tokens: Tensor
    logits: Tensor
    below: Tensor
    rounding: Tensor
    by: str

    @property
    def beyond(self) -> int:
        """How many tokens lie further below the best than rounding can have moved them."""
        return sum(map(self.beyond_at, range(len(self.tokens))))

    def beyond_at(self, at: int) -> bool:
        """Whether one of them does; where logits are not finite, too."""
        return not bool(self.below[at] <= self.rounding[at])

    def complaint(self) -> str:
        """A sentence on the first of them, "" where there is none."""
        for at in filter(self.beyond_at, range(len(self.tokens))):
            return (
                f"{self.beyond} tokens differ from the model's by more than rounding: the first, token {at}, is {int(self.tokens[at])},"
                f" whose logit lies {float(self.below[at]):.3g} below the best in {self.by}, where rounding explains"
                f" {float(self.rounding[at]):.3g}"
            )
        return ""


def parting(ours: Tensor, theirs: Tensor) -> tuple[int, int] | None:
    """The row and the place of the first token that differs, in the row where that comes soonest; None where none does before either ends.

    Both hold tokens [rows, n]; n may differ.
    """
    n = min(ours.shape[1], theirs.shape[1])
    differ = (ours[:, :n] != theirs[:, :n]).nonzero().tolist()
    return min(((row, at) for row, at in differ), key=lambda found: (found[1], found[0]), default=None)


@torch.no_grad()
def judge(model: Any, prompt: Tensor, tokens: Tensor) -> Judged:
    """A text of `tokens` [n] behind a `prompt` [S], greedy, beside the logits of `model` for the same tokens before each."""
    ids = torch.cat([prompt, tokens.to(prompt)])[None]
    kept = slice(len(prompt) - 1, ids.shape[1] - 1)  # the logits that each token was picked from
    own = _whole(model, ids)[kept]
    dtype = wider(model)
    if dtype is None:  # two ways with the same weights are two samples: each is as far from what is right, their difference further
        exact, by, samples = _stepwise(model, ids)[kept], f"{_name(model.dtype)} with its cache", 2
    else:
        exact, by, samples = _whole(_widened(model, dtype), ids)[kept], _name(dtype), 1
    top, likely = exact.topk(min(TOP, exact.shape[1]), dim=1)
    error = (own - exact).gather(1, likely).std(dim=1) / math.sqrt(samples)  # what moves all alike changes no choice
    spacing = torch.finfo(model.dtype).eps * top[:, 0].abs()  # logits closer than that are the same number
    below = top[:, 0] - exact.gather(1, tokens.to(likely)[:, None])[:, 0]
    return Judged(tokens.cpu(), exact, below, torch.maximum(LIMIT * math.sqrt(2.0) * error, spacing), by)


def verdicts(model: Any, prompts: Tensor, texts: dict[str, Tensor], reference: str) -> dict[str, dict[str, Any]]:
    """What is told of each side by its tokens [rows, n] behind `prompts` [rows, S], where one parts from those of the side `reference`.

    Of a side that parts, in the row where that comes soonest: the "row", the token that it "parts at", the "gap" between the logits of its
    token and the other's, the "rounding" that it is held against, and what both are "by". Of each side looked at: how many tokens lie
    "beyond rounding", and what is "wrong", "" for nothing.
    """
    told: dict[str, dict[str, Any]] = {}
    theirs: dict[int, Judged] = {}
    for name, tokens in texts.items():
        where = parting(tokens, texts[reference])
        if where is None:
            continue
        row, at = where
        if row not in theirs:
            theirs[row] = judge(model, prompts[row], texts[reference][row])
        ours, other = judge(model, prompts[row], tokens[row]), theirs[row]
        mine, its = int(ours.tokens[at]), int(other.tokens[at])
        gap, rounding = float((ours.logits[at, its] - ours.logits[at, mine]).abs()), float(ours.rounding[at])
        told[name] = {"row": row, "parts at": at, "gap": gap, "rounding": rounding, "by": ours.by, "beyond rounding": ours.beyond}
        told[name]["wrong"] = ours.complaint()
        if ours.beyond_at(at):
            told[name]["wrong"] = (
                f"the tokens differ by more than rounding: {name} picks {mine} as token {at} where {reference} picks {its}, and their"
                f" logits lie {gap:.3g} apart in {ours.by}, where rounding explains {rounding:.3g}"
            )
        if reference not in told or not told[reference]["wrong"]:
            told[reference] = {"by": other.by, "beyond rounding": other.beyond, "wrong": other.complaint()}
    return told


def wider(model: Any) -> torch.dtype | None:
    """The widest dtype in which a second copy of the weights fits the memory that is free; None where none does."""
    numbers = sum(p.numel() for p in model.parameters())
    for dtype in (torch.float64, torch.float32):
        if dtype.itemsize > model.dtype.itemsize and numbers * dtype.itemsize + SPARE <= free(model.device):
            return dtype
    return None


def free(device: torch.device) -> float:
    """Bytes of memory that are free on a device; of the CPU's, where the system does not tell, none are known to be."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in open("/proc/meminfo", encoding="ascii"))  # noqa: SIM115
        return 1024.0 * float(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return 0.0


def _widened(model: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """The model with parameters and buffers of another dtype, each made once where several modules share it. It is not copied: what
    torch.compile has hung on it stays there."""
    made: dict[int, Tensor] = {}
    state = {
        name: made.setdefault(id(value), value.detach().to(dtype))
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        if value.is_floating_point()
    }
    return lambda **given: torch.func.functional_call(model, state, kwargs=given, tie_weights=False)


def _whole(forward: Callable[..., Any], ids: Tensor) -> Tensor:
    """The logits [S, V] of tokens [1, S] in one forward, in float64."""
    logits: Tensor = forward(input_ids=ids, use_cache=False).logits
    return logits[0].double()


def _stepwise(model: Any, ids: Tensor) -> Tensor:
    """The same, token by token over the model's own cache."""
    from transformers import DynamicCache

    cache = {cache_argument(model): DynamicCache(config=model.config)}
    steps = [model(input_ids=ids[:, at : at + 1], use_cache=True, **cache).logits[0, 0] for at in range(ids.shape[1])]
    return torch.stack(steps).double()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
