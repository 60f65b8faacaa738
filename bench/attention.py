"""`python -m bench attention`: attention alone, of one decode step over a cache and of a prompt, beside SDPA.

Keys and values are rotated past the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import estimates
from bench.comparators import DTYPES, WIDER, Workload, compare
from bench.estimates import REGION
from bench.gpt_regions import block_of, copies_past_cache
from bench.report import Report, Settings
from bench.sides import Side
from bench.tables import summary

DECODE = "1x12x12x64x512x502,1x32x8x128x512x502,16x32x8x128x512x64,16x32x8x128x512x502,1x32x8x128x8192x8192,16x32x8x128x4096x512"
PREFILL = "1x32x8x128x512,1x32x8x128x2048"


@dataclass(frozen=True)
class Case:
    """`live` keys of a cache of `room`, one query (decode); or `live` None: `room` queries and keys, causal (prefill)."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    room: int
    live: int | None = None

    @classmethod
    def parse(cls, text: str) -> Case:
        """From batch x heads x kv heads x head size x cache length [x live length]. Raises ValueError."""
        parts = text.split("x")
        if len(parts) not in (5, 6) or not all(part.strip().isdecimal() and int(part) for part in parts):
            raise ValueError(f"{text!r}: five numbers of 1 or more are wanted for a prompt, six for a decode step")
        case = cls(*map(int, parts))
        if case.heads % case.kv_heads:
            raise ValueError(f"{text!r}: {case.heads} heads are no multiple of {case.kv_heads} key heads")
        if case.live is not None and not 0 < case.live <= case.room:
            raise ValueError(f"{text!r}: the live length must lie between 1 and the cache's")
        return case


def decode_attention(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """One query a sequence over a static cache, masked as models mask it."""
    mask = (torch.arange(k.shape[2], device=k.device) <= position)[None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a prompt over itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def run(settings: Settings, cases: Sequence[Case]) -> Report:
    """Benchmark every case. The side "eager" is SDPA."""
    report = Report("attention", settings)
    dtype = DTYPES[settings.dtype or ("fp32" if settings.small else "bf16")]
    report.measure_rates([dtype] if any(case.live is None for case in cases) else [])
    least = estimates.REFERENCE + estimates.timing(len(settings.against))
    for case in cases:
        if report.fits(str(case), 0 if settings.small else least):
            compare(workload(case, dtype, settings.device), report)
    summary(report)
    return report


def workload(case: Case, dtype: torch.dtype, device: str) -> Workload:
    """A case on every side."""
    decode = case.live is not None
    queries, live = (1, case.live) if case.live is not None else (case.room, case.room)
    kv = (case.batch, case.kv_heads, case.room, case.size)
    copies = copies_past_cache(2 * case.batch * case.kv_heads * live * case.size * dtype.itemsize)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = random(case.batch, case.heads, queries, case.size)
    pairs = [(random(*kv), random(*kv)) for _ in range(copies)]
    function: Callable[..., Tensor] = decode_attention if decode else prefill_attention
    more = (torch.tensor([live - 1], device=device),) if decode else ()

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        compiled = side.compile(function)
        return block_of([lambda k=k, v=v: compiled(q, k, v, *more) for k, v in pairs])  # type: ignore[misc]

    def reference() -> Tensor:
        k, v = pairs[0]
        return function(*(x.to(WIDER[dtype]) for x in (q, k, v)), *more)[None]

    pairs_seen = case.room * case.room / 2 if not decode else live
    what = f"decode, {live} of {case.room} keys" if decode else f"prefill, {case.room} tokens"
    return Workload(
        title=f"{what}, b{case.batch}, {case.heads}/{case.kv_heads} heads of {case.size}",
        facts={**vars(case), "copies": copies},
        dtype=dtype,
        compile_for=compile_for,
        reference=reference,
        moved=2.0 * case.batch * case.kv_heads * live * case.size * dtype.itemsize,
        flops=4.0 * case.batch * case.heads * case.size * pairs_seen,
        in_graph=copies,
        size=REGION,
    )
