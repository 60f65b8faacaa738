"""What of the time of linears' schedules is fitted to measured kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """What of a schedule's time is not derived but fitted: to 3,500 kernels measured on an H200 one behind another, over weights past its
    cache: gemv at one row, skinny at 1 and 16, tiled at 512. Between measurement and model lie 14 %, 14 % and 9 % of the fastest kernels'
    time, root mean square; the best of the model's first eight loses 4 %, 1 % and 1 % to the best of all that were measured.

    `latency`, in the device's, from asking for a tile to using it. Seconds: `once` a kernel, `program` a program, `step` a step of the loop
    at least, `norm` where rows are computed, `reading` a pass over the rows for statistics, `meeting` where programs share a sum, `apart`
    for a kernel of the prologue. `stream` and `cache`: the shares of the rates of memory and of the last-level cache that count.
    `sharpness`: how hard the slowest of several limits decides; the larger, the nearer to a plain maximum. `registers` of a thread beside
    its sums and tiles.
    """

    latency: float
    once: float
    program: float
    step: float
    norm: float
    reading: float
    meeting: float
    apart: float
    stream: float
    cache: float
    sharpness: float
    registers: int


FITS = {
    "gemv": Fit(1.0, 0.65e-6, 0.10e-6, 0.0, 0.36e-6, 0.66e-6, 1.74e-6, 0.53e-6, 1.03, 8.0, 4.0, 9),
    "skinny": Fit(1.39, 1.90e-6, 0.47e-6, 0.07e-6, 2.66e-6, 2.54e-6, 0.96e-6, 2.6e-6, 0.97, 0.86, 2.5, 96),
    "tiled": Fit(1.53, 2.49e-6, 0.0, 0.13e-6, 0.17e-6, 2.7e-6, 0.0, 8.6e-6, 1.0, 3.0, 3.6, 48),
}

# gemv over words of int8, with what word_cost.py counts: fitted together with gemv's first fit.
WORDS = Fit(1.42, 0.50e-6, 0.14e-6, 0.0, 0.52e-6, 0.51e-6, 1.74e-6, 0.41e-6, 1.03, 8.0, 4.1, 12)

# Skinny over two int8 digits in several blocks of rows: to 86 products of 64 to 512 rows by 11 tiles, 10 % between measurement and model.
# `step` comes on top of what a step waits for. Blocks that run at a time read the same weights: hence more than the last-level cache gives.
BLOCKS = Fit(0.5, 1.0e-6, 0.0, 0.15e-6, 0.0, 2.54e-6, 0.0, 2.6e-6, 0.97, 2.5, 3.0, 96)
