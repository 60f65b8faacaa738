"""Values for a rule's parameters, to verify the rule with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from .dims import DimSpec
from .pattern import Call, Either, Value, Var
from .rule import Compiled

T = TypeVar("T")
_PRIMES = (2, 3, 5, 7, 11, 13)
_LEADING = (2, 2, 1, 3)  # how many dimensions `...` stands for: a rule must not count on it
_SCALES = (1.0, 1e-3, 4.0)  # of the tensors: the small one makes an epsilon matter
_FAR = 64.0  # and the large one a bound: most of it is beyond the clamps and caps that models have


class Sampler:
    """Draws one set of values: sizes are distinct primes (or 1), tensors are normal. What it draws depends on the seed alone."""

    def __init__(
        self,
        compiled: Compiled,
        branches: Mapping[str, str],
        dtype: torch.dtype,
        seed: int,
        literals: Mapping[str, Any] | None = None,
        far: bool = False,
    ):
        self._compiled, self._branches = compiled, branches
        self._literals = literals or {}  # instead of those that the rule lists
        self.dtype = dtype
        """The dtype under test."""
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = _FAR if far else _SCALES[seed % len(_SCALES)]
        self._primes = list(_PRIMES)
        self._random.shuffle(self._primes)
        self._sizes: dict[str, int] = {}
        self._leading = random.Random(f"leading {seed}").choice(_LEADING)

    def chosen(self, tag: str) -> str | None:
        """The branch of `op.either(tag, ...)` that is about to be verified; None where it plays no part."""
        return self._branches.get(tag)

    def size(self, name: str) -> int:
        """The size that a name stands for: a prime that no other name has, rarely 1; beyond six names larger numbers."""
        if name not in self._sizes:
            count = len(self._sizes)
            size = self._primes[count] if count < len(self._primes) else 15 + 2 * count
            self._sizes[name] = 1 if self._random.random() < 0.08 else size
        return self._sizes[name]

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self._random.choice(list(options))

    def tensor_of(self, sizes: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of these sizes: normal for floats, small numbers for integers, a coin for bools."""
        dtype = dtype or self.dtype
        if dtype == torch.bool:
            return torch.rand(list(sizes), generator=self._generator) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(0, 2, list(sizes), generator=self._generator).to(dtype)
        return (torch.randn(list(sizes), generator=self._generator) * self._scale).to(dtype)

    def tensor(self, dims: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor with named dimensions, as in a rule's `dims`."""
        return self.tensor_of(self._shape(DimSpec.parse(dims, ValueError)), dtype)

    def integers(self, dims: str, high: int) -> torch.Tensor:
        """int64 in [0, high), with named dimensions."""
        return torch.randint(0, high, self._shape(DimSpec.parse(dims, ValueError)), generator=self._generator)

    def positions(self, count: int, length: int) -> torch.Tensor:
        """int64 [count], distinct positions in [0, length)."""
        return torch.randperm(length, generator=self._generator)[:count]

    def mask_of(self, sizes: Sequence[int], invert: bool = False) -> torch.Tensor:
        """A bool mask whose last dimension has at least one True everywhere (one False, inverted)."""
        mask = torch.rand(list(sizes), generator=self._generator) < 0.6
        mask[..., 0] = True
        return ~mask if invert else mask

    def defaults(self) -> dict[str, Any]:
        """A value for each parameter that the rule's `dims` or `literals` mention."""
        rule = self._compiled.rule
        values: dict[str, Any] = {
            name: self._literals[name] if name in self._literals else self.pick(options) for name, options in rule.literals.items()
        }
        for name, spec in self._compiled.dims.items():
            values[name] = self.tensor_of(self._shape(spec), rule.dtypes.get(name))
        return values

    def _shape(self, spec: DimSpec) -> list[int]:
        sizes = []
        leading = [self.size(f"... {i}") for i in range(self._leading)] if spec.leading else []
        if spec.leading == "...":
            sizes = leading
        elif spec.leading == "~...":
            # The last ones, each of them or 1; no more than there are.
            sizes = [size if self._random.random() < 0.6 else 1 for size in leading[self._random.randint(0, len(leading)) :]]
        for token in spec.tokens:
            product = 1
            for factor in token:
                product *= int(factor) if factor.isdigit() else self.size(factor)
            sizes.append(product)
        return sizes


def assignments(compiled: Compiled, limit: int, seed: int = 0) -> list[dict[str, str]]:
    """Choices of a branch per tag: all of them if there are at most `limit`, else `limit` random ones."""
    found: list[dict[str, str]] = []
    script: list[int] = []
    while True:
        walk = _Walk(script)
        for output in compiled.outputs:
            walk(output)
        found.append(walk.chosen)
        script = walk.next()
        if not script:
            return found
        if len(found) > limit:
            break
    rng = random.Random(seed)
    found = []
    for _ in range(limit):
        walk = _Walk([], rng)
        for output in compiled.outputs:
            walk(output)
        found.append(walk.chosen)
    return found


class _Walk:
    """One walk through a pattern that takes the branches of a script, or random ones, and notes what else it could have taken."""

    def __init__(self, script: list[int], rng: random.Random | None = None):
        self.script, self.rng = script, rng
        self.taken: list[tuple[int, int]] = []  # (branch number, number of branches) per choice
        self.chosen: dict[str, str] = {}
        self._seen: set[int] = set()

    def __call__(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self(item)
            return
        if not isinstance(value, Value) or isinstance(value, Var) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Call):
            self([*value.args, *value.kwargs.values()])
        elif isinstance(value, Either):
            names = list(value.branches)
            if self.chosen.get(value.tag) not in names:
                number = self._choose(len(names))
                self.chosen[value.tag] = names[number]
            self(value.branches[self.chosen[value.tag]])

    def _choose(self, count: int) -> int:
        position = len(self.taken)
        number = self.rng.randrange(count) if self.rng else self.script[position] if position < len(self.script) else 0
        self.taken.append((number, count))
        return number

    def next(self) -> list[int]:
        """The script of the next walk in order; empty after the last."""
        taken = list(self.taken)
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return []
        return [n for n, _ in taken[:-1]] + [taken[-1][0] + 1]
