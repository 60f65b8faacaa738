"""The rule class: what a rewrite is, written as `pattern`, `check` and `rewrite`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dsi.ir.errors import DsiError

from .dims import DimSpec
from .pattern import Call, Either, Recorder, Value, Var, roots, walk
from .vocabulary import Target

if TYPE_CHECKING:
    from .build import Builder
    from .match import Match
    from .sampling import Sampler


class Rule:
    """A rewrite of a graph: what to look for, when not to, and what to put there.

        class ScaledTanh(Rule):
            \"\"\"scale * tanh(x / scale)   ->   one operator\"\"\"
            dims = {"x": "... D"}
            literals = {"scale": (2.0, 30.0)}

            def pattern(self, op, x, scale):
                return op.tanh(x / scale) * scale

            def check(self, m):
                m.require(m.scale > 0, "the scale must be positive")

            def rewrite(self, dsi, m):
                return dsi.call(torch.ops.mine.soft_cap.default, m.x, m.scale)

    `pattern` is run once, with a recorder: it may not branch on values; alternatives are written with `op.either`. It returns one value or
    a tuple: only those may be read outside the match. Its parameters, after `op`, are tensors or literals of the graph. `check` refuses,
    with `m.require`; `rewrite` returns as many values as `pattern`, built with `dsi`, or values of the match, or `dsi.keep`. A rule holds
    no state.

    Class attributes:

    * `dims`: named dimensions of the tensor parameters (`patterns.dims`); checked on a match, sampled by `verify`;
    * `literals`: values to verify with, per literal parameter; a parameter listed here matches literals only;
    * `dtypes`: dtype per tensor parameter that does not follow the dtype under test; a string names the parameter whose dtype it has;
    * `stage`: "normalise" or "recognise", where `options={"rules": [...]}` puts it;
    * `same_rounding`: the replacement rounds exactly where the pattern does; `verify` then compares bit by bit, up to sums' order.
    """

    dims: ClassVar[Mapping[str, str]] = {}
    literals: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    dtypes: ClassVar[Mapping[str, Any]] = {}
    stage: ClassVar[str] = "recognise"
    same_rounding: ClassVar[bool] = False

    def pattern(self, op: Recorder, *parameters: Any) -> Any:
        """The computation to look for, written with `op` on the parameters. Subclasses name their parameters."""
        raise NotImplementedError

    def check(self, m: Match) -> None:
        """Refuses a match that the pattern alone cannot rule out, through `m.require(condition, sentence)`."""

    def rewrite(self, dsi: Builder, m: Match) -> Any:
        """Builds what takes the match's place."""
        raise NotImplementedError

    def sample(self, s: Sampler) -> dict[str, Any]:
        """Values for the parameters, for `verify`. The default draws them from `dims`, `dtypes` and `literals`; extend it for other
        parameters.
        """
        return s.defaults()

    @classmethod
    def name(cls) -> str:
        """The rule's name in reports: the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True)
class Compiled:
    """A rule with its recorded pattern."""

    rule: Rule
    name: str
    place: str  # "file.py:12"
    variables: tuple[Var, ...]
    outputs: tuple[Value, ...]
    single: bool  # pattern returned one value, not a tuple
    roots: frozenset[Target]  # overloads of a node that outputs[0] can match
    dims: dict[str, DimSpec]
    effects: bool  # the pattern itself has a mutation or an all-reduce
    labels: frozenset[str]
    tags: frozenset[str]


_COMPILED: dict[type[Rule], Compiled] = {}


def compile_rule(cls: type[Rule] | Compiled) -> Compiled:
    """Records a rule's pattern, once per class. Raises `DsiError`, naming the rule's file and line, for a malformed rule."""
    if isinstance(cls, Compiled):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, Rule)):
        raise DsiError(f"{cls!r} is not a rule: a rule is a subclass of dsi.Rule (the class, not an instance)")
    if cls not in _COMPILED:
        _COMPILED[cls] = _compile(cls)
    return _COMPILED[cls]


def _compile(cls: type[Rule]) -> Compiled:
    from .effects import has_effect
    from .match import RESERVED

    place = _place_of(cls)

    def error(reason: str) -> DsiError:
        return DsiError(f"{place}: rule {cls.__name__}: {reason}")

    for method in ("pattern", "rewrite"):
        if getattr(cls, method) is getattr(Rule, method):
            raise error(f"it has no method {method!r}")
    if cls.stage not in ("normalise", "recognise"):
        raise error(f"stage {cls.stage!r} is not 'normalise' or 'recognise'")
    parameters = list(inspect.signature(cls.pattern).parameters.values())[2:]
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        raise error("the parameters of `pattern` must be plain names, one a tensor or literal")
    names = [p.name for p in parameters]
    for name in names:
        if name in RESERVED:
            raise error(f"a parameter may not be called {name!r}: that is a method of the match")
    for what, given in (("dims", cls.dims), ("literals", cls.literals), ("dtypes", cls.dtypes)):
        for name in given:
            if name not in names:
                raise error(f"{what} names {name!r}, which is not a parameter of `pattern` ({', '.join(names)})")
    dims = {name: DimSpec.parse(text, error) for name, text in cls.dims.items()}
    rule = cls()
    variables = tuple(Var(name, place=place) for name in names)
    try:
        result = rule.pattern(Recorder(), *variables)
    except DsiError:
        raise
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
        raise error(f"`pattern` failed, which is written with `op` on values that are no tensors: {reason}") from failure
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    for value in outputs:
        if not isinstance(value, Value):
            raise error(f"`pattern` returned {value!r}, which is not a pattern value (a result of an `op` call)")
    everything = [v for output in outputs for v in walk(output)]
    targets = roots(outputs[0])
    if not targets or any(not roots(branch) for output in outputs for branch in _leaves(output)):
        raise error("`pattern` returned a bare parameter: what it returns must be computed by an operator")
    for variable in variables:
        if variable not in everything:
            raise error(f"the parameter {variable.name!r} is not used by `pattern`")
    effects = any(has_effect(t) for v in everything if isinstance(v, Call) for t in v.op.overloads)
    labels = frozenset(v.label for v in everything if v.label)
    tags = frozenset(v.tag for v in everything if isinstance(v, Either))
    for label in labels & set(names):
        raise error(f"the name {label!r} is both a parameter and a named value")
    return Compiled(
        rule, cls.name(), place, variables, outputs, not isinstance(result, (tuple, list)), targets, dims, effects, labels, tags
    )


def _leaves(value: Value) -> list[Any]:
    if isinstance(value, Either):
        return [leaf for branch in value.branches.values() for leaf in (_leaves(branch) if isinstance(branch, Value) else [branch])]
    return [value]


def _place_of(cls: type[Rule]) -> str:
    code = getattr(cls.pattern, "__code__", None)
    if code is None:
        return cls.__qualname__
    line = code.co_firstlineno
    return f"{os.path.basename(code.co_filename)}:{line}"
