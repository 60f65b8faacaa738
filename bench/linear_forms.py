"""Linears as models have them, each a function that becomes one region, with what is fused before and behind the product; real inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import path, timing
from bench.comparators import WIDER, reset
from bench.gpt_regions import copies_past_cache
from bench.shapes import Shape
from bench.sides import FLOOR, SLACK

EPS = 1e-5
SCALE = 0.5  # so that an output is no view of another: what views of one sum are returned for is that sum


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), g, EPS), w)


def layer_norm(x: Tensor, g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (x.shape[-1],), g, h, EPS), w)


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w)


def bias_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, b)


def bias_residual_kn(b: Tensor, x: Tensor, W: Tensor, r: Tensor) -> Tensor:
    return r + torch.addmm(b, x, W)


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def norm_bias_gelu_kn(x: Tensor, g: Tensor, h: Tensor, b: Tensor, W: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, F.layer_norm(x, (x.shape[-1],), g, h, EPS), W), approximate="tanh")


def norm_bias_gelu(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, (x.shape[-1],), g, h, EPS), w, b), approximate="tanh")


def gated(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, u)


def norm_gated(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> Tensor:
    y = F.rms_norm(x, (x.shape[-1],), g, EPS)
    return F.silu(F.linear(y, w)) * F.linear(y, u)


def _heads(x: Tensor, size: int) -> Tensor:
    return x.view(1, x.shape[0], -1, size).transpose(1, 2)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)


def norm_qkv_rope(x: Tensor, g: Tensor, c: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, size = F.rms_norm(x, (x.shape[-1],), g, EPS), c.shape[-1]
    queries, keys, values = (_heads(F.linear(y, w), size) for w in (q, k, v))
    # As they lie in a cache: [batch, heads, rows, size].
    return _rope(queries, c, s).contiguous(), _rope(keys, c, s).contiguous(), values * SCALE


def _split_in_heads(y: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (_heads(part, head_size(width)) * SCALE for part in y.split(width, dim=-1))
    return first, second, third


def norm_qkv(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    return _split_in_heads(F.linear(F.layer_norm(x, (width,), g, h, EPS), w, b), width)


def norm_qkv_kn(x: Tensor, g: Tensor, h: Tensor, b: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    return _split_in_heads(torch.addmm(b, F.layer_norm(x, (width,), g, h, EPS), W), width)


def bias_qkv(x: Tensor, q: Tensor, a: Tensor, k: Tensor, b: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = head_size(x.shape[-1])
    queries, keys, values = (_heads(F.linear(x, w, bias), size) * SCALE for w, bias in ((q, a), (k, b), (v, d)))
    return queries, keys, values


def head_size(width: int) -> int:
    """Channels of a head in models of a width."""
    return 128 if width >= 4096 else 64


# Each with its inputs' letters (`Problem.sizes`), in the order of its arguments. "-kn": the weight is stored [K, N].
FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (plain, "xw"),
    "norm": (norm, "xgw"),
    "layer-norm": (layer_norm, "xghw"),
    "residual": (residual, "xwr"),
    "bias-residual": (bias_residual, "xwbr"),
    "bias-residual-kn": (bias_residual_kn, "bxWr"),
    "bias-gelu": (bias_gelu, "xwb"),
    "norm-bias-gelu": (norm_bias_gelu, "xghwb"),
    "norm-bias-gelu-kn": (norm_bias_gelu_kn, "xghbW"),
    "gated": (gated, "xwu"),
    "norm-gated": (norm_gated, "xgwu"),
    "norm-qkv-rope": (norm_qkv_rope, "xgcqkvs"),
    "norm-qkv": (norm_qkv, "xghwb"),
    "norm-qkv-kn": (norm_qkv_kn, "xghbW"),
    "bias-qkv": (bias_qkv, "xqakbvd"),
}
WEIGHTS = "wWuqkv"
CHANGING = "xr"  # what the kernel before may have written


def linears(shape: Shape, laid_out: bool = False) -> list[tuple[str, int, int]]:
    """(form, N, K) of the linear regions of a model, the head included; N counts the columns of one window. `laid_out`: no weight is
    stored [K, N]."""
    if laid_out:
        return [(form.removesuffix("-kn"), n, k) for form, n, k in linears(shape)]
    width, inner, vocab = shape.width, shape.inner, shape.vocab
    if shape.family == "gpt2":
        return [
            ("norm-qkv-kn", 3 * width, width),
            ("bias-residual-kn", width, width),
            ("norm-bias-gelu-kn", inner, width),
            ("bias-residual-kn", width, inner),
            ("layer-norm", vocab, width),
        ]
    if shape.family == "bert":
        return [
            ("bias-qkv", 3 * width, width),
            ("bias-residual", width, width),
            ("bias-gelu", inner, width),
            ("bias-residual", width, inner),
        ]
    kv = width // shape.heads * (shape.kv_heads or shape.heads)
    return [
        ("norm-qkv-rope", width + 2 * kv, width),
        ("residual", width, width),
        ("norm-gated", inner, width),
        ("residual", width, inner),
        ("norm", vocab, width),
    ]


@dataclass
class Problem:
    """A form at N columns, K inner and M rows: inputs, the region that dsi makes of it, and the result in a wider dtype.

    There is one set of inputs at first; `fill` adds copies with other weights, until they do not fit the last-level cache together.
    `int8`: the region reads weights as int8, a scale a row; the sets hold what these stand for, for the library and the reference.
    """

    form: str
    n: int
    k: int
    m: int
    dtype: torch.dtype
    device: str
    int8: bool = False
    sets: list[list[Tensor]] = field(default_factory=list)
    packed: list[list[Tensor]] = field(default_factory=list)  # int8 and scales of each weight, a list a set
    region: Any = None
    spec: Any = None

    def __post_init__(self) -> None:
        self.function, self.letters = FORMS[self.form]
        self.generator = torch.Generator(self.device).manual_seed(0)
        if self.int8 and "W" in self.letters:
            raise ValueError(f"{self.form} stores its weight [K, N]; int8 weights are stored [N, K]")
        each = 1 if self.int8 else self.dtype.itemsize
        self.moved = sum(each * self.sizes(letter)[0] * self.sizes(letter)[1] for letter in self.letters if letter in WEIGHTS)
        self.shared = {letter: self.random(letter) for letter in self.letters if letter not in WEIGHTS}
        self.add()
        self.region, self.order = region_of_int8(self) if self.int8 else region_of(self.function, self.sets[0])
        constants = frozenset(n for n, at in enumerate(self.order) if at >= len(self.letters) or self.letters[at] not in CHANGING)
        self.spec = dataclasses.replace(self.region.spec, constants=constants)

    def sizes(self, letter: str) -> tuple[int, ...]:
        """Shape of an input: x, r rows; g, h of a norm; b, a, d biases; w, u, q, k, v weights, W one stored [K, N]; c, s of rope."""
        n, k, m = self.n, self.k, self.m
        kv = (n - k) // 2
        known: dict[str, tuple[int, ...]] = {"x": (m, k), "r": (m, n), "g": (k,), "h": (k,), "W": (k, n)}
        known |= {"w": (n, k), "u": (n, k), "b": (n,)}
        if "q" in self.letters:
            known |= {"q": (k, k), "k": (kv, k), "v": (kv, k), "a": (k,), "b": (kv,), "d": (kv,)}
            known |= {"c": (1, m, head_size(k)), "s": (1, m, head_size(k))}
        return known[letter]

    def random(self, letter: str) -> Tensor:
        values = torch.randn(self.sizes(letter), generator=self.generator, device=self.device)
        return (values / self.k**0.5 if letter in WEIGHTS else values).to(self.dtype)

    def add(self) -> None:
        self.sets.append([self.shared[letter] if letter in self.shared else self.random(letter) for letter in self.letters])
        self.packed.append([])
        for number, letter in enumerate(self.letters if self.int8 else ""):
            if letter in WEIGHTS:
                self.sets[-1][number], *pair = rounded(self.sets[-1][number])
                self.packed[-1] += pair

    def fill(self) -> None:
        """Copies of the weights past the last-level cache, and what the outputs must be."""
        while len(self.sets) < copies_past_cache(self.moved):
            self.add()
        if hasattr(self, "reference"):
            return
        wide = tuple_of(self.function(*(x.to(WIDER[self.dtype]) for x in self.exact(0))))
        found = tuple_of(self.function(*self.sets[0]))
        bodies = tuple_of(self.region.body(*self.inputs(0)))
        # The region's outputs need not be in the function's order.
        places = [min(range(len(found)), key=lambda at: _distance(found[at], body)) for body in bodies]
        if any(_distance(found[place], body) > 0.1 for place, body in zip(places, bodies, strict=True)):
            raise ValueError(f"the region of {self} returns something else than {self.form}")
        self.reference = [wide[place] for place in places]
        self.bound = SLACK * max(timing.relative_error(a, b) for a, b in zip(found, wide, strict=True)) + FLOOR

    def exact(self, number: int) -> list[Tensor]:
        """The function's arguments of one copy, int8 weights as what they stand for in fp32."""
        pairs = iter(zip(self.packed[number][::2], self.packed[number][1::2], strict=True))
        return [
            wide_of(*next(pairs)) if self.int8 and letter in WEIGHTS else value
            for letter, value in zip(self.letters, self.sets[number], strict=True)
        ]

    def inputs(self, number: int) -> list[Tensor]:
        """The region's inputs of one copy."""
        known = [*self.sets[number], *self.packed[number]]
        return [known[index] for index in self.order]

    def __str__(self) -> str:
        return f"{self.form} N={self.n} K={self.k} M={self.m} {str(self.dtype).removeprefix('torch.')}{' int8' if self.int8 else ''}"


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a weight's int8 stands for, in its dtype; the int8 and a scale a row."""
    path.backend()  # so that the package is found
    from dsi.quantize.int8 import quantise

    found = quantise(weight)
    return wide_of(found.weight, found.scales).to(weight.dtype), found.weight, found.scales


def wide_of(weight: Tensor, scales: Tensor) -> Tensor:
    """int8 with a scale a row as what it stands for, in fp32."""
    return weight.float() * scales.float()[:, None]


def tuple_of(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _distance(one: Tensor, other: Tensor) -> float:
    """How far apart two outputs are; infinite where they are not the same."""
    return float("inf") if one.shape != other.shape else timing.relative_error(one, other)


class Holder(torch.nn.Module):
    """A form whose weights are parameters, as what is rounded to int8 must be; called with its other inputs."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.function, self.letters = problem.function, problem.letters
        for number, (letter, value) in enumerate(zip(self.letters, problem.sets[0], strict=True)):
            if letter in WEIGHTS:
                self.register_parameter(f"weight{number}", torch.nn.Parameter(value, requires_grad=False))

    def forward(self, *others: Tensor) -> Any:
        rest = iter(others)
        return self.function(*[getattr(self, f"weight{n}") if c in WEIGHTS else next(rest) for n, c in enumerate(self.letters)])


def region_of_int8(problem: Problem) -> tuple[Any, list[int]]:
    """`region_of` with int8 weights: which of the function's arguments, or behind them of int8 and scales, each input is."""
    holder, letters, values = Holder(problem), problem.letters, problem.sets[0]
    others = [value for value, letter in zip(values, letters, strict=True) if letter not in WEIGHTS]
    region, arguments = only_region(holder, others, {"dtype": "int8"}, problem.form, values)
    # int8 and scales, by turns, in the order of the linears: the graph's last results of operators that have several.
    numbers = {node.name: int(node.name.removeprefix("getitem").removeprefix("_") or 0) for node in region.inputs if _is_part(node)}
    packed = {name: len(letters) + place for place, name in enumerate(sorted(numbers, key=numbers.__getitem__))}
    return region, [packed[node.name] if node.name in packed else arguments[_argument(node)] for node in region.inputs]


def region_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, list[int]]:
    """The one region that dsi makes of a function, planned but not run, and which argument each of its inputs is.

    Raises ValueError where there are more regions or none.
    """
    region, arguments = only_region(function, inputs, {}, getattr(function, "__name__", str(function)), inputs)
    return region, [arguments[_argument(node)] for node in region.inputs]


def _argument(node: Any) -> int:
    """The number of a graph's argument, which is called "arg0_1"."""
    return int(node.name.removeprefix("arg").split("_")[0])


def _is_part(node: Any) -> bool:
    """Whether a graph's value is one of several of an operator, which torch.fx calls "getitem"."""
    return bool(node.name.startswith("getitem"))


def only_region(
    function: Callable[..., Any], inputs: Sequence[Tensor], options: dict[str, Any], name: str, known: Sequence[Tensor]
) -> tuple[Any, list[int]]:
    """The one region that dsi makes of a function, and for each of the graph's arguments which of the `known` tensors it was given: in
    which order Dynamo passes inputs and parameters is its own affair. Raises ValueError where there are more regions or none."""
    backend = path.backend()
    from dsi.compiler.observe import collecting

    places = {value.data_ptr(): number for number, value in enumerate(known)}
    arguments: list[int] = []

    def noting(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        compiled = backend(graph, examples, options={"executor": "reference", **options})

        def call(*values: Tensor) -> Any:
            arguments[:] = [places[value.data_ptr()] for value in values]
            return compiled(*values)

        return call

    reset()
    with torch.no_grad(), collecting() as contexts:
        torch.compile(function, backend=noting, fullgraph=True, dynamic=False)(*inputs)
    regions = [region for context in contexts for region in context.report.regions]
    if len(regions) != 1 or regions[0].spec is None:
        raise ValueError(f"{len(regions)} regions with plans are made of {name}; one is wanted")
    return regions[0], arguments
