"""How each pointwise operation of `dsi.ir.pointwise` reads in Triton. Floats are fp32 throughout."""

from __future__ import annotations

import torch

from .integers import ATOM, PRODUCT, RELATION, SUM

# name -> (form, strength of the result, strength that each operand must have). One operand is {0}, two are {0} and {1}.
FORMS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "add": ("{0} + {1}", SUM, (SUM, PRODUCT)),
    "sub": ("{0} - {1}", SUM, (SUM, PRODUCT)),
    "mul": ("{0} * {1}", PRODUCT, (PRODUCT, ATOM)),
    "div": ("{0} / {1}", PRODUCT, (PRODUCT, ATOM)),
    "neg": ("-{0}", SUM, (ATOM,)),
    "abs": ("tl.abs({0})", ATOM, (RELATION,)),
    "floor": ("tl.floor({0})", ATOM, (RELATION,)),
    "ceil": ("tl.ceil({0})", ATOM, (RELATION,)),
    "reciprocal": ("1.0 / {0}", PRODUCT, (ATOM,)),
    "maximum": ("tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", ATOM, (RELATION, RELATION)),
    "minimum": ("tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", ATOM, (RELATION, RELATION)),
    "sqrt": ("tl.sqrt({0})", ATOM, (RELATION,)),
    "rsqrt": ("tl.rsqrt({0})", ATOM, (RELATION,)),
    "exp": ("tl.exp({0})", ATOM, (RELATION,)),
    "log": ("tl.log({0})", ATOM, (RELATION,)),
    "sigmoid": ("tl.sigmoid({0})", ATOM, (RELATION,)),
    "erf": ("tl.math.erf({0})", ATOM, (RELATION,)),
    "sin": ("tl.sin({0})", ATOM, (RELATION,)),
    "cos": ("tl.cos({0})", ATOM, (RELATION,)),
    "relu": ("tl.maximum({0}, 0, propagate_nan=tl.PropagateNan.ALL)", ATOM, (RELATION,)),
    "eq": ("{0} == {1}", RELATION, (SUM, SUM)),
    "ne": ("{0} != {1}", RELATION, (SUM, SUM)),
    "lt": ("{0} < {1}", RELATION, (SUM, SUM)),
    "le": ("{0} <= {1}", RELATION, (SUM, SUM)),
    "gt": ("{0} > {1}", RELATION, (SUM, SUM)),
    "ge": ("{0} >= {1}", RELATION, (SUM, SUM)),
    "and": ("{0} & {1}", RELATION, (ATOM, ATOM)),  # binds less than a sum
    "or": ("{0} | {1}", RELATION, (ATOM, ATOM)),
    "xor": ("{0} ^ {1}", RELATION, (ATOM, ATOM)),
    "where": ("tl.where({0}, {1}, {2})", ATOM, (RELATION, RELATION, RELATION)),
}

# Operations written as a small function before the kernel: name -> (source, functions it calls).
HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tanh": (
        """\
@triton.jit
def tanh(x):
    # exp(-2|x|) cannot overflow; near 0, where 1 - exp(-2|x|) cancels, a Taylor polynomial (error below 1e-7) takes over.
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    x2 = x * x
    near = x * (1.0 + x2 * (-0.3333333333333333 + x2 * (0.13333333333333333 - x2 * 0.05396825396825397)))
    return tl.where(x2 < 0.04, near, tl.where(x < 0, -far, far))
""",
        (),
    ),
    "gelu_erf": (
        """\
@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
""",
        (),
    ),
    "gelu_tanh": (
        """\
@triton.jit
def gelu_tanh(x):
    # 0.5 (1 + tanh y) = sigmoid(2 y), which overflows nowhere.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
""",
        (),
    ),
    "gelu_quick": (
        """\
@triton.jit
def gelu_quick(x):
    return x * tl.sigmoid(1.702 * x)
""",
        (),
    ),
    "silu": (
        """\
@triton.jit
def silu(x):
    return x * tl.sigmoid(x)
""",
        (),
    ),
    "relu_squared": (
        """\
@triton.jit
def relu_squared(x):
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return positive * positive
""",
        (),
    ),
    "power": (
        """\
@triton.jit
def power(x, exponent):
    # |x| ** exponent; the sign of a negative base survives an odd exponent, and a fractional one makes it NaN.
    size = tl.where(exponent == 0, 1.0, tl.exp2(exponent * tl.log2(tl.abs(x))))
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2.0 != exponent)
    return tl.where(x < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
""",
        (),
    ),
    "dot4": (
        """\
@triton.jit
def dot4(one, other, total, DP4A: tl.constexpr):
    # total + the products of four signed bytes of each word. DP4A is off under the interpreter, which knows no assembly.
    if DP4A:
        return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [one, other, total], tl.int32, is_pure=True, pack=1)
    for shift in tl.static_range(0, 32, 8):
        total += ((one << shift) >> 24) * ((other << shift) >> 24)
    return total
""",
        (),
    ),
    "quarters": (
        """\
@triton.jit
def quarters(words):
    # Every fourth word along the last axis, from each of the first four on: a thread that has read four words has one in each.
    if len(words.shape) == 2:
        pairs = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2])
    else:
        pairs = tl.reshape(words, [words.shape[0], words.shape[1], words.shape[2] // 4, 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
""",
        (),
    ),
    "dot16": (
        """\
@triton.jit
def dot16(one, other, total, DP4A: tl.constexpr):
    # total + the products of sixteen signed bytes: total has a quarter of the words' places.
    a, b, c, d = quarters(one)
    e, f, g, h = quarters(other)
    return dot4(d, h, dot4(c, g, dot4(b, f, dot4(a, e, total, DP4A), DP4A), DP4A), DP4A)
""",
        ("dot4", "quarters"),
    ),
    "late": (
        """\
@triton.jit
def late(tile, PACKED: tl.constexpr, PDL: tl.constexpr):
    # The same tile, PACKED elements a register; what is made of it cannot be moved in front of this place.
    if PDL:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=PACKED)
    return tile
""",
        (),
    ),
    "early": (
        """\
@triton.jit
def early(value, PDL: tl.constexpr):
    # The same value. What it is made of stays in front of what follows: a fence, for a NaN that no arithmetic makes, could depend on it.
    if PDL:
        value = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.b32 p, $1, 0x7fedcba9; @p membar.cta; mov.b32 $0, $1; }",
            "=r,r",
            [value],
            dtype=value.dtype,
            is_pure=False,
            pack=1,
        )
    return value
""",
        (),
    ),
}
MOST_AT_ONCE = 14  # sums that one exchange between the threads of a program makes: `add_each_N` adds N and N of them, one by one


def _add_each(count: int) -> str:
    ones, others = ([f"{letter}{number}" for number in range(count)] for letter in "ab")
    sums = ", ".join(f"{one} + {other}" for one, other in zip(ones, others, strict=True))
    return f"@triton.jit\ndef add_each_{count}({', '.join((*ones, *others))}):\n    return {sums}\n"


HELPERS.update({f"add_each_{count}": (_add_each(count), ()) for count in range(2, MOST_AT_ONCE + 1)})


def literal(value: float | int | bool) -> tuple[str, int]:
    """A Python number as Triton source, and its strength."""
    if isinstance(value, bool):
        return str(value), ATOM
    if isinstance(value, int):
        return str(value), ATOM if value >= 0 else SUM
    if value != value:
        return 'float("nan")', ATOM
    if value in (float("inf"), float("-inf")):
        return f'float("{value}")', ATOM
    return repr(value), ATOM if value >= 0 and not repr(value).startswith("-") else SUM


def is_float(dtype: torch.dtype) -> bool:
    """Whether values of the dtype are held in fp32 by a kernel."""
    return dtype.is_floating_point
