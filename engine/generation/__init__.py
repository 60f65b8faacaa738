"""Generation: transformers' `generate` on a compiled model."""

from .generator import Generator

__all__ = ["Generator"]
