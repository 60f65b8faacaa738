"""`python -m bench regions`: the four regions of a GPT layer, each alone, against unfused eager PyTorch: one token, a context of 1,024.

1. qkv: layer norm, query/key/value projection, bias.
2. attention: the new key and value into the cache, attention over it.
3. mlp_in: output projection with bias and residual, layer norm, first feed-forward projection with bias and GELU.
4. mlp_out: second projection, bias, residual.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import estimates, timing
from bench.comparators import DTYPES, WIDER, Workload, compare
from bench.estimates import REGION
from bench.models import hot
from bench.report import Report, Settings
from bench.sides import Side
from bench.tables import summary

NAMES = ("qkv", "attention", "mlp_in", "mlp_out")
HEADS = {64: 4, 1600: 25, 4256: 28, 12288: 96}
PAST = 4  # weights of all copies over the last-level cache
MOST_COPIES = 40
LEAST_CALLS = 200  # of a block: a few dozen are over before the host has its code in its caches again


class QKV(nn.Module):
    """x [1, 1, H] -> [1, 1, 3H]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


class Attention(nn.Module):
    """qkv [1, 1, 3H] and the position [1] -> [1, 1, H], over a cache of `context` tokens of which those up to the position are live."""

    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads, self.size = heads, width // heads
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, heads, context, self.size))

    def forward(self, qkv: Tensor, position: Tensor) -> Tensor:
        q, k, v = (part.view(1, 1, self.heads, self.size).transpose(1, 2) for part in qkv.split(qkv.shape[-1] // 3, dim=-1))
        assert isinstance(self.keys, Tensor) and isinstance(self.values, Tensor)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (torch.arange(self.keys.shape[2], device=qkv.device) <= position)[None, None, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return out.transpose(1, 2).reshape(1, 1, -1)


class MLPIn(nn.Module):
    """attention's output and the residual [1, 1, H] -> (FF activations [1, 1, 4H], the new residual [1, 1, H]), side by side."""

    def __init__(self, width: int):
        super().__init__()
        self.out, self.norm, self.first = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 4 * width)

    def forward(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.out(attended)
        return F.gelu(self.first(self.norm(residual)), approximate="tanh"), residual


class MLPOut(nn.Module):
    """FF activations [1, 1, 4H] and the residual [1, 1, H] -> [1, 1, H]."""

    def __init__(self, width: int):
        super().__init__()
        self.second = nn.Linear(4 * width, width)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        return residual + self.second(inner)


def run(settings: Settings, widths: Sequence[int], context: int, only: Sequence[str]) -> Report:
    """Benchmark the regions named `only` at every width."""
    report = Report("regions", settings)
    report.measure_rates()
    dtype = DTYPES[settings.dtype or ("fp32" if settings.small else "fp16")]
    least = estimates.REFERENCE + estimates.timing(len(settings.against))
    for width in widths:
        for name in only:
            if report.fits(f"{name} of width {width}", 0 if settings.small else least):
                compare(workload(name, width, context, dtype, settings.device), report)
    summary(report)
    return report


def make(name: str, width: int, context: int) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """The module of a region, and the shapes of its floating-point inputs."""
    one = (1, 1, width)
    if name == "qkv":
        return QKV(width), (one,)
    if name == "attention":
        return Attention(width, HEADS[width], context), ((1, 1, 3 * width),)
    if name == "mlp_in":
        return MLPIn(width), (one, one)
    if name == "mlp_out":
        return MLPOut(width), ((1, 1, 4 * width), one)
    raise ValueError(f"unknown region {name!r}; known: {', '.join(NAMES)}")


def copies_of(name: str, width: int, context: int, dtype: torch.dtype, device: str) -> tuple[list[nn.Module], list[Any]]:
    """Modules of a region, and inputs: so many that the weights (or cache) of none are still in the last-level cache at its next turn."""
    with torch.device(device):
        module, shapes = make(name, width, context)
        module = module.to(dtype).eval()
        if name != "attention":
            hot(module)
        inputs: list[Any] = [torch.randn(shape).to(dtype) for shape in shapes]
        if name == "attention":
            inputs.append(torch.tensor([context - 1]))
    return [module, *(copy.deepcopy(module) for _ in range(copies_past_cache(moved_by(module)) - 1))], inputs


def moved_by(module: nn.Module) -> int:
    """Bytes of a module's weights and caches."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def workload(name: str, width: int, context: int, dtype: torch.dtype, device: str) -> Workload:
    """A region on every side."""
    modules, inputs = copies_of(name, width, context, dtype, device)

    def compile_for(side: Side) -> list[Callable[[], Tensor]]:
        compiled = [side.compile(one) for one in modules]
        return block_of([lambda one=one: first(one(*inputs)) for one in compiled])  # type: ignore[misc]

    def reference() -> Tensor:
        wide = copy.deepcopy(modules[0]).to(WIDER[dtype])
        return first(wide(*(x.to(WIDER[dtype]) if x.is_floating_point() else x for x in inputs)))[None]

    return Workload(
        title=f"{name}, width {width}, {len(modules)} copies",
        facts={"region": name, "width": width, "heads": HEADS[width], "context": context, "copies": len(modules)},
        dtype=dtype,
        compile_for=compile_for,
        reference=reference,
        moved=moved_by(modules[0]),
        in_graph=len(modules),
        size=REGION,
    )


def first(result: Any) -> Tensor:
    """The first output, by which a region is judged."""
    return result[0] if isinstance(result, tuple) else result


def block_of(calls: list[Callable[[], Tensor]]) -> list[Callable[[], Tensor]]:
    """The calls over and over, so that a block has `LEAST_CALLS`, as a loop of steps has, and its synchronisation counts for little."""
    return calls * math.ceil(LEAST_CALLS / len(calls))


def copies_past_cache(size: int) -> int:
    """How many copies of `size` bytes make `PAST` last-level caches; 2 without a device."""
    return max(2, min(MOST_COPIES, math.ceil(PAST * timing.cache_bytes() / max(size, 1))))
