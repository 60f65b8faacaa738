"""Generation: transformers' `generate` on a compiled model. `Generator` is imported when it is first used: it needs transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generator import Generator

__all__ = ["Generator"]


def __getattr__(name: str) -> Any:
    if name == "Generator":
        from .generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
