"""Random programs of views and pointwise operations, for property tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

UNARY = {"silu": F.silu, "neg": torch.neg, "tanh": torch.tanh, "double": lambda x: x * 2.0, "clone": torch.clone}


def divisors(n: int) -> list[int]:
    return [d for d in range(2, n) if n % d == 0]


@st.composite
def programs(draw: st.DrawFn, shape: tuple[int, ...], longest: int = 6) -> tuple[list[tuple], list[tuple[int, ...]]]:
    """(steps, shapes of further inputs) of a program on a tensor of `shape`. Every step is legal for torch."""
    steps: list[tuple] = []
    further: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, longest))):
        rank = len(shape)
        kinds = ["unary", "binary", "unsqueeze"]
        if rank > 1:
            kinds += ["permute", "merge"]
        if any(divisors(n) for n in shape):
            kinds += ["split", "split"]
        if any(n > 1 for n in shape):
            kinds += ["slice", "half", "flip", "select", "pairs", "chunk", "pad"]
        if any(n == 1 for n in shape):
            kinds += ["expand", "squeeze"]
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, rank - 1)) if rank else 0
        if kind == "unary":
            steps.append((kind, draw(st.sampled_from(sorted(UNARY)))))
        elif kind == "binary":
            own = tuple(n if draw(st.booleans()) else 1 for n in shape)
            own = own[draw(st.integers(0, rank)) :]
            steps.append((kind, draw(st.sampled_from(["add", "mul", "rsub"])), len(further)))
            further.append(own)
        elif kind == "unsqueeze":
            steps.append((kind, dim))
            shape = (*shape[:dim], 1, *shape[dim:])
        elif kind == "squeeze":
            dim = draw(st.sampled_from([i for i, n in enumerate(shape) if n == 1]))
            steps.append((kind, dim))
            shape = (*shape[:dim], *shape[dim + 1 :])
        elif kind == "permute":
            order = tuple(draw(st.permutations(range(rank))))
            steps.append((kind, order))
            shape = tuple(shape[i] for i in order)
        elif kind == "merge":
            dim = draw(st.integers(0, rank - 2))
            shape = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
            steps.append(("reshape", shape))
        elif kind == "split":
            dim = draw(st.sampled_from([i for i, n in enumerate(shape) if divisors(n)]))
            by = draw(st.sampled_from(divisors(shape[dim])))
            shape = (*shape[:dim], shape[dim] // by, by, *shape[dim + 1 :])
            steps.append(("reshape", shape))
        elif kind == "expand":
            dim = draw(st.sampled_from([i for i, n in enumerate(shape) if n == 1]))
            shape = (*shape[:dim], draw(st.integers(2, 3)), *shape[dim + 1 :])
            steps.append((kind, shape))
        else:
            dim = draw(st.sampled_from([i for i, n in enumerate(shape) if n > 1]))
            n = shape[dim]
            if kind == "slice":
                start = draw(st.integers(0, n - 1))
                end = draw(st.integers(start + 1, n))
                step = draw(st.integers(1, 2))
                steps.append((kind, dim, start - n if start and draw(st.booleans()) else start, end, step))
                shape = (*shape[:dim], len(range(start, end, step)), *shape[dim + 1 :])
            elif kind == "half":  # the quarter turn of rope, with halves that need not be equal
                steps.append((kind, dim, draw(st.integers(1, n - 1))))
            elif kind == "pad":  # part of it changed, the rest passed on
                steps.append((kind, dim, draw(st.integers(1, n - 1)), draw(st.sampled_from(sorted(UNARY)))))
            elif kind == "flip":
                steps.append((kind, dim))
            elif kind == "select":
                steps.append((kind, dim, draw(st.integers(-n, n - 1))))
                shape = (*shape[:dim], *shape[dim + 1 :])
            elif kind == "pairs":  # the turn of interleaved rope
                if n % 2:
                    continue
                steps.append((kind, dim))
            elif kind == "chunk":  # gate and up in one tensor
                if n % 2:
                    continue
                steps.append((kind, dim))
                shape = (*shape[:dim], n // 2, *shape[dim + 1 :])
    return steps, further


def run(steps: list[tuple], x: torch.Tensor, further: list[torch.Tensor], lead: int = 0) -> torch.Tensor:
    """A program on a tensor; on its last dimensions only, if it has `lead` more in front."""
    for kind, *args in steps:
        if lead and kind in ("reshape", "expand"):
            args = [(*x.shape[:lead], *args[0])]
        elif lead and kind == "permute":
            args = [(*range(lead), *(i + lead for i in args[0]))]
        elif lead and kind not in ("unary", "binary"):
            args[0] += lead
        x = _STEPS[kind](x, further, *args)
    return x


def _half(x: torch.Tensor, _: Any, dim: int, at: int) -> torch.Tensor:
    low, high = x.split([at, x.shape[dim] - at], dim)
    return torch.cat([-high, low], dim)


def _pad(x: torch.Tensor, _: Any, dim: int, at: int, name: str) -> torch.Tensor:
    low, high = x.split([at, x.shape[dim] - at], dim)
    return torch.cat([UNARY[name](low), high], dim)


def _pairs(x: torch.Tensor, _: Any, dim: int) -> torch.Tensor:
    x = x.transpose(dim, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1)
    return turned.reshape(x.shape).transpose(dim, -1)


def _chunk(x: torch.Tensor, _: Any, dim: int) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


_STEPS = {
    "unary": lambda x, f, name: UNARY[name](x),
    "binary": lambda x, f, name, i: x + f[i] if name == "add" else x * f[i] if name == "mul" else f[i] - x,
    "unsqueeze": lambda x, f, dim: x.unsqueeze(dim),
    "squeeze": lambda x, f, dim: x.squeeze(dim),
    "permute": lambda x, f, order: x.permute(order),
    "reshape": lambda x, f, shape: x.reshape(shape),
    "expand": lambda x, f, shape: x.expand(shape),
    "slice": lambda x, f, dim, start, end, step: x[(slice(None),) * dim + (slice(start, end, step),)],
    "select": lambda x, f, dim, i: x.select(dim, i),
    "flip": lambda x, f, dim: x.flip(dim),
    "half": _half,
    "pad": _pad,
    "pairs": _pairs,
    "chunk": _chunk,
}
