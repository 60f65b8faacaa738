"""Patterns as data: what a rule's `pattern` returns when it is run with a `Recorder`."""

from __future__ import annotations

import difflib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.ir.custom import CustomOp
from dsi.ir.errors import DsiError

from .vocabulary import OPS, SEMANTIC, Op, Target, parameters

CAST = "cast"
PLAIN = "none"


@dataclass(eq=False)
class Value:
    """A value of the pattern. Arithmetic on it records the vocabulary's operators, as arithmetic on a tensor would compute them."""

    place: str = field(default="", kw_only=True)  # "file.py:12", the rule's own source line
    label: str = field(default="", kw_only=True)

    def named(self, label: str) -> Value:
        """Names this value, so that `m.shape(label)` and the like are about it. Returns the value itself."""
        self.label = label
        return self

    def __add__(self, other: Any) -> Value:
        return _record(OPS["add"], self, other)

    def __mul__(self, other: Any) -> Value:
        return _record(OPS["mul"], self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Value:
        return _record(OPS["sub"], self, other)

    def __rsub__(self, other: Any) -> Value:
        return _record(OPS["rsub"], self, other)

    def __truediv__(self, other: Any) -> Value:
        return _record(OPS["div"], self, other)

    def __neg__(self) -> Value:
        return _record(OPS["neg"], self)

    def __getitem__(self, index: int) -> Value:
        return _record(OPS["item"], self, index)

    def __iter__(self) -> Iterator[Value]:
        raise DsiError(f"{self.place}: a pattern value cannot be iterated over; take an output of an operator with value[i]")

    def __bool__(self) -> bool:
        raise DsiError(f"{self.place}: a pattern value has no truth value; a pattern is written without `if`: use op.either")


@dataclass(eq=False)
class Var(Value):
    """A parameter of `pattern`: a tensor or a literal of the graph. Twice the same parameter is twice the same node or an equal literal."""

    name: str


@dataclass(eq=False)
class Call(Value):
    """An operator with its arguments in schema order and by name."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Either(Value):
    """One of several spellings. Which one was found is recorded under `tag` (an internal tag where the rule does not care)."""

    tag: str
    branches: dict[str, Any]


class SemanticRecorder:
    """`op.dsi`: the semantic operators of `dsi.ir.ops`, for rules about what other rules found."""

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name not in SEMANTIC:
            raise _unknown(f"op.dsi.{name}", name, SEMANTIC)
        return lambda *args, **kwargs: _record(SEMANTIC[name], *args, **kwargs)


class Recorder:
    """The `op` that a pattern is written with: `op.<name>(...)` for a word of the vocabulary, and the combinators below."""

    dsi = SemanticRecorder()

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name not in OPS:
            raise _unknown(f"op.{name}", name, OPS)
        return lambda *args, **kwargs: _record(OPS[name], *args, **kwargs)

    def call(self, overload: Target | CustomOp, *args: Any, **kwargs: Any) -> Value:
        """A call of an overload that the vocabulary lacks, or of an operator made with `dsi.custom_op`, arguments in schema order."""
        if isinstance(overload, CustomOp):
            overload = overload.overload
        return _record(Op(str(overload), (overload,)), *args, **kwargs)

    def either(self, tag: str, **branches: Callable[[], Any]) -> Value:
        """One of the named spellings, tried in order; `m.tag(tag)` is the name of the one found. At least two."""
        place = _place()
        if len(branches) < 2:
            raise DsiError(f"{place}: op.either({tag!r}) needs at least two named alternatives")
        return Either(tag, {name: branch() for name, branch in branches.items()}, place=place)

    def maybe_cast(self, x: Any, dtype: Any, *, tag: str) -> Value:
        """`x`, cast to `dtype` (a torch.dtype or a parameter) or not; `m.cast(tag)` is the dtype that it was cast to, or None."""
        place = _place()
        return Either(tag, {CAST: _record(OPS["cast"], x, dtype), PLAIN: x}, place=place)

    def maybe_contiguous(self, x: Any, *, tag: str = "") -> Value:
        """`x`, copied to be contiguous or not: the same values. `m.tag(tag)` is "contiguous", "copy" or "plain"."""
        copies = {
            "contiguous": _record(OPS["clone"], x, memory_format=torch.contiguous_format),
            "copy": _record(OPS["clone"], x),
            "plain": x,
        }
        return Either(tag or _own_tag("copy"), copies, place=_place())

    def square(self, x: Value) -> Value:
        """x², spelled pow(x, 2) or x * x."""
        place = _place()
        return Either(_own_tag("square"), {"pow": _record(OPS["pow"], x, 2), "product": _record(OPS["mul"], x, x)}, place=place)

    def cube(self, x: Value) -> Value:
        """x³, spelled pow(x, 3) or as products."""
        place = _place()
        return Either(
            _own_tag("cube"), {"pow": _record(OPS["pow"], x, 3), "product": _record(OPS["mul"], _record(OPS["mul"], x, x), x)}, place=place
        )

    def reciprocal_root(self, x: Value) -> Value:
        """1/√x, spelled rsqrt(x), pow(x, -0.5) or reciprocal(sqrt(x))."""
        place = _place()
        spellings = {
            "rsqrt": _record(OPS["rsqrt"], x),
            "pow": _record(OPS["pow"], x, -0.5),
            "reciprocal": _record(OPS["reciprocal"], _record(OPS["sqrt"], x)),
        }
        return Either(_own_tag("reciprocal root"), spellings, place=place)


_counter = itertools.count()


def _own_tag(what: str) -> str:
    """A tag for a choice that the rule does not ask about: every one is chosen apart."""
    return f"{what} #{next(_counter)}"


def _unknown(what: str, name: str, known: dict[str, Op]) -> DsiError:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DsiError(f"{_place()}: {what} is not in the vocabulary; {hint}op.call(overload, ...) takes any overload")


def _record(op: Op, *args: Any, **kwargs: Any) -> Call:
    place = _place()
    for target in op.overloads[:1]:
        params = parameters(target)
        if len(args) > len(params):
            raise DsiError(f"{place}: {op.name} takes at most {len(params)} arguments, {len(args)} given")
        names = [p.name for p in params]
        for key in kwargs:
            if key not in names[len(args) :]:
                raise DsiError(f"{place}: {op.name} has no further argument {key!r} (its arguments: {', '.join(names)})")
        for p in params[len(args) :]:
            if p.required and p.name not in kwargs and p.name not in op.fixed:
                raise DsiError(f"{place}: {op.name} needs the argument {p.name!r}")
    return Call(op, args, kwargs, place=place)


_HERE = (__file__, __file__.replace("pattern.py", "rule.py"))


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _HERE:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def walk(value: Any) -> Iterator[Value]:
    """Every value below `value` and itself, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, Value) and id(item) not in seen:
            seen.add(id(item))
            yield item
            if isinstance(item, Call):
                stack.extend(item.args)
                stack.extend(item.kwargs.values())
            elif isinstance(item, Either):
                stack.extend(item.branches.values())


def roots(value: Any) -> frozenset[Target]:
    """The overloads that a node computing `value` can have."""
    if isinstance(value, Call):
        return frozenset(value.op.overloads)
    if isinstance(value, Either):
        return frozenset().union(*(roots(branch) for branch in value.branches.values()))
    return frozenset()


class Evaluator:
    """Computes a pattern on tensors: the pattern as its own oracle.

    `env` gives the parameters; `choose(tag, names)` picks a branch. With `wide`, floats are float64 and casts between floats do nothing.
    Afterwards `tags` holds the branch and value per tag, `labels` the named values, `used` the parameters that were read.
    """

    def __init__(self, env: dict[str, Any], choose: Callable[[str, tuple[str, ...]], str], wide: bool = False):
        self.env, self.choose, self.wide = env, choose, wide
        self.tags: dict[str, tuple[str, Any]] = {}
        self.labels: dict[str, Any] = {}
        self.used: set[str] = set()
        self._memo: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The tensor (or literal) that a pattern value stands for."""
        if isinstance(value, (list, tuple)):
            return [self(v) for v in value]
        if not isinstance(value, Value):
            return value
        if id(value) not in self._memo:
            self._memo[id(value)] = self._compute(value)
            if value.label:
                self.labels[value.label] = self._memo[id(value)]
        return self._memo[id(value)]

    def _compute(self, value: Value) -> Any:
        if isinstance(value, Var):
            self.used.add(value.name)
            return self.env[value.name]
        if isinstance(value, Either):
            branch = self.tags[value.tag][0] if value.tag in self.tags else self.choose(value.tag, tuple(value.branches))
            if branch not in value.branches:
                branch = self.choose(value.tag, tuple(value.branches))
            self.tags[value.tag] = (branch, None)
            result = self(value.branches[branch])
            self.tags[value.tag] = (branch, result)
            return result
        assert isinstance(value, Call)
        args = tuple(self(a) for a in value.args)
        kwargs = {k: self(v) for k, v in value.kwargs.items()}
        if self.wide:
            args = tuple(widened(a) for a in args)
            kwargs = {k: widened(v) for k, v in kwargs.items()}
        return value.op.eager(*args, **kwargs)


def widened(value: Any) -> Any:
    """float64 for a floating dtype; anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
