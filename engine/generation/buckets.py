"""Sizes that lengths are rounded up to, so that a new length is seldom a new shape."""

from __future__ import annotations

PROMPT_STEP = 16  # kernels are specialised on sizes that 16 divides
SMALLEST_CACHE = 256


def prompt_bucket(length: int, room: int) -> int:
    """Tokens that a prompt of `length` is padded to: an eighth longer at most from 128 tokens on, never more than `room`.

    One token is left alone: it runs as a decode step does.
    """
    if length <= 1:
        return length
    step = max(PROMPT_STEP, power_of_two(length) // 16)
    return min(-(-length // step) * step, room)


def cache_bucket(tokens: int, least: int, most: int) -> int:
    """Slots of a cache for `tokens` tokens: a power of two that holds `least` tokens too, never more than `most`."""
    return min(power_of_two(max(tokens, least, SMALLEST_CACHE)), most)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than `number`."""
    return 1 << max(0, number - 1).bit_length()
