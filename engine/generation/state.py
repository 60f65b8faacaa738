"""What a generation under way holds on the device: tokens, positions, masks and counters, in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sampling import Recipe

NUMBERS = ("least", "least_new", "repetition_skip", "begin", "forced_last")
STARTS = 64  # of numbers to begin with, that are kept on the device

Copies = Sequence[tuple[Tensor, Tensor]]  # (to, from)


class State:
    """Buffers for `rows` rows of up to `slots` tokens. A decode step reads and writes nothing else besides weights and cache.

    * `ids` [rows, slots]: the sequence so far, prompt included; behind it each row repeats its last prompt token, for those who look there.
    * `count`, `made` []: tokens in a row of `ids`, and tokens made. `length` []: those in the cache (shared with the cache).
    * `token`, `position` [rows, 1]: what the next step reads, and its position. `mask` [rows, slots]: 0 in slots of padding.
    * `finished` [rows]: rows that are at their end; they go on with `pad`. `ends` [n]: the end-of-sequence tokens.
    * `board` [slots, rows + 1]: a row for each step: the tokens made, and whether every row is finished after it.
    """

    def __init__(self, rows: int, slots: int, length: Tensor) -> None:
        device = length.device

        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.rows, self.slots, self.length = rows, slots, length
        self.ids, self.mask = integers(rows, slots), integers(rows, slots)
        self.token, self.position, self.skipped = integers(rows, 1), integers(rows, 1), integers(rows)
        self.pad = integers()
        # Counters are one memory, so that one copy sets them; two entries each, since kernels are specialised on addresses that 16 divides.
        self._counters = integers(2 * (2 + len(NUMBERS)) + -(-rows // 8))
        self.count, self.made, *numbers = self._counters[: 2 * (2 + len(NUMBERS)) : 2].unbind()
        self.finished = self._counters[2 * (2 + len(NUMBERS)) :].view(torch.bool)[:rows]
        self.one = torch.ones((), dtype=torch.int64, device=device)
        self.board = integers(slots, rows + 1)
        self.columns = torch.arange(slots, device=device)
        self.ends: Tensor | None = None
        self._numbers = dict(zip(NUMBERS, numbers, strict=True))
        self._starts: dict[tuple[int, ...], Tensor] = {}
        self._nothing = integers()
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}  # by their number: where they are held, and what was copied there
        self._pad: Tensor | int | None = None  # what `pad` was set to
        self._hides = True  # whether `mask` may hold a 0
        self._constants: dict[tuple[int, ...], Tensor] = {}

    def number(self, name: str) -> Tensor:
        """A number that changes from call to call, as a tensor []."""
        return self._numbers[name]

    def constant(self, values: Sequence[int]) -> Tensor:
        """int64 [n] on the device, made once."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key, dtype=torch.int64, device=self.ids.device)
        return self._constants[key]

    def begin(
        self,
        ids: Tensor,
        mask: Tensor | None,
        ends: Tensor | None,
        pad: Tensor | int,
        numbers: dict[str, int],
        *,
        held: int = 0,
        looks_behind: bool = True,
        besides: Copies = (),
    ) -> None:
        """Start with `ids` [rows, n]. mask [rows, m]: of the tokens in the cache and in the prompt, None where none is padding. `ends`:
        None where no token ends a row. `pad` and `ends` are not written to while they are in use: the same ones are not copied again.
        `held`: tokens in the cache. looks_behind: whether a step looks at what is behind the newest token in `ids`. `besides`: what else
        is to be copied."""
        n = ids.shape[1]
        copies = [(self._counters, self._start(n, numbers)), (self.ids[:, :n], ids), *besides]
        if held:
            self.length.fill_(held)
        else:
            copies.append((self.length, self._nothing))
        copy_all(copies)
        if looks_behind:
            self.ids[:, n:].copy_(ids[:, -1:].expand(-1, self.slots - n))
        if mask is not None or self._hides:
            self.mask.fill_(1)
        self._hides = mask is not None
        if mask is not None:
            self.mask[:, : mask.shape[1]].copy_(mask)
        if pad is not self._pad:
            self.pad.copy_(pad) if isinstance(pad, Tensor) else self.pad.fill_(pad)
        self._pad = pad
        self.ends = None
        if ends is not None:
            self.ends, copied = self._ends.get(len(ends)) or (torch.empty_like(ends, device=self.ids.device), None)
            if copied is not ends:
                self.ends.copy_(ends)
            self._ends[len(ends)] = self.ends, ends

    def _start(self, n: int, numbers: dict[str, int]) -> Tensor:
        """The counters behind `n` tokens of a prompt."""
        key = (n, 0, *(numbers.get(name, 0) for name in NUMBERS))
        found = self._starts.get(key)
        if found is None:
            if len(self._starts) >= STARTS:
                self._starts.clear()
            values = [value for number in key for value in (number, 0)]
            values += [0] * (len(self._counters) - len(values))  # of rows that are finished
            found = self._starts[key] = torch.tensor(values, dtype=torch.int64, device=self.ids.device)
        return found

    @property
    def ending(self) -> int:
        """How many tokens end a row: part of what a step computes."""
        return 0 if self.ends is None else len(self.ends)

    def follow(self, recipe: Recipe, logits: Tensor, fed: Tensor) -> None:
        """Pick a token of each row from `logits` [rows, vocabulary], and take it. `fed` []: tokens a row that the model was fed."""
        self.advance(recipe.pick(self, logits), fed)

    def advance(self, token: Tensor, fed: Tensor) -> None:
        """Take the `token` [rows] that was picked."""
        if self.ends is not None:
            token = torch.where(self.finished, self.pad, token)
            self.finished.logical_or_((token[:, None] == self.ends).any(1))
        self.token.copy_(token[:, None])
        self.ids.index_copy_(1, self.count[None], token[:, None])
        self.board.index_copy_(0, self.made[None], torch.cat([token, self.finished.all()[None].to(torch.int64)])[None])
        self.count.add_(1)
        self.made.add_(1)
        self.position.add_(1)
        self.length.add_(fed)


def copy_all(copies: Copies) -> None:
    """Copy each to its place. What is one run of memory on both sides takes one launch in all."""
    joined = []
    for to, source in copies:
        if to.dim() == 2 and to.shape[0] == source.shape[0] == 1:
            to, source = to.view(-1), source.reshape(-1)
        if to.shape == source.shape and to.is_contiguous() and source.is_contiguous():
            joined.append((to, source))
        else:
            to.copy_(source)
    torch._foreach_copy_([to for to, _ in joined], [source for _, source in joined])
