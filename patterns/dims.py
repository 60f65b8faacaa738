"""Named dimensions: `"B S D"`, `"... D"`, `"G*HKV S D"`, `"~... R"`.

An entry states the shape of one tensor parameter of a rule. A name is a size that is the same wherever it occurs; a number is that size;
`a*b` is a product; a leading `...` is any number of leading dimensions, the same in every entry of the rule; `~...` is leading dimensions
that broadcast to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without a guard."""
    return len(a) == len(b) and all(same_size(p, q) for p, q in zip(a, b, strict=True))


def broadcasts_to(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether shape `a` is known to broadcast to shape `b` and leave it as it is."""
    return len(a) <= len(b) and all(same_size(p, 1) or same_size(p, q) for p, q in zip(reversed(a), reversed(b), strict=False))


@dataclass(frozen=True)
class DimSpec:
    """One parsed entry: `leading` is "", "..." or "~..."; `tokens` are the other dimensions, each a tuple of factors."""

    text: str
    leading: str
    tokens: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str, error: Callable[[str], Exception]) -> DimSpec:
        """Reads an entry; `error` makes the exception for a malformed one."""
        words = text.split()
        leading = words.pop(0) if words and words[0] in ("...", "~...") else ""
        tokens = []
        for word in words:
            factors = tuple(word.split("*"))
            if not all(f.isidentifier() or f.isdigit() for f in factors):
                raise error(f"{word!r} in dims {text!r} is not a name, a number or a product of those")
            tokens.append(factors)
        return DimSpec(text, leading, tuple(tokens))

    def names(self) -> set[str]:
        """The names that occur."""
        return {f for token in self.tokens for f in token if not f.isdigit()}


class DimSolver:
    """Unifies the shapes of a match's tensors with the rule's entries."""

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}
        self.leading: tuple[Any, ...] | None = None
        self._products: list[tuple[str, tuple[str, ...], Any]] = []
        self._broadcast: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, name: str, spec: DimSpec, shape: Sequence[Any]) -> str | None:
        """Adds one tensor; a sentence if it cannot be."""
        count = len(spec.tokens)
        if len(shape) < count or (not spec.leading and len(shape) != count):
            return f"{name} has shape {list(shape)}, the rule wants [{spec.text}]"
        leading, rest = tuple(shape[: len(shape) - count]), shape[len(shape) - count :]
        if spec.leading == "...":
            if self.leading is None:
                self.leading = leading
            elif not same_shape(self.leading, leading):
                return f"the leading dimensions of {name} are {list(leading)}, those before it are {list(self.leading)}"
        elif spec.leading == "~...":
            self._broadcast.append((name, leading))
        for token, size in zip(spec.tokens, rest, strict=True):
            if len(token) > 1:
                self._products.append((name, token, size))
                continue
            reason = self._one(name, token[0], size)
            if reason:
                return reason
        return None

    def _one(self, name: str, factor: str, size: Any) -> str | None:
        known = int(factor) if factor.isdigit() else self.sizes.get(factor)
        if known is None:
            self.sizes[factor] = size
        elif not same_size(known, size):
            return f"dimension {factor} of {name} is {size}, elsewhere {known}"
        return None

    def finish(self) -> str | None:
        """Solves the products and the broadcasts; a sentence if one does not hold."""
        for name, token, size in self._products:
            product, unknown = 1, []
            for factor in token:
                value = int(factor) if factor.isdigit() else self.sizes.get(factor)
                if value is None:
                    unknown.append(factor)
                else:
                    product = product * value
            if len(unknown) > 1:
                return f"dimension {'*'.join(token)} of {name}: neither {' nor '.join(unknown)} is known"
            if unknown:
                if not statically_known_true(size % product == 0):
                    return f"dimension {'*'.join(token)} of {name} is {size}, which is not known to be a multiple of {product}"
                self.sizes[unknown[0]] = size // product
            elif not same_size(product, size):
                return f"dimension {'*'.join(token)} of {name} is {size}, not {product}"
        for name, leading in self._broadcast:
            if not broadcasts_to(leading, self.leading or ()):
                return f"the leading dimensions of {name}, {list(leading)}, do not broadcast to {list(self.leading or ())}"
        return None
