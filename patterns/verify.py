"""Whether a rule's replacement computes what its pattern computes.

The pattern itself is the oracle: it is run on tensors, over several sizes, dtypes and every branch of its alternatives, and compared with
the rewrite run on the same tensors through the reference of each operator:

* in float64 both agree to 1e-5 of the largest value, on large inputs too, where the pattern is finite;
* in float32, float16 and bfloat16 the replacement is no further from the pattern in float64 than `FACTOR` times what the pattern itself is,
plus
  `ULPS` units in the last place of the largest value;
* where the rule says `same_rounding`, both round alike: at most `STRAY` of the elements differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.ir.errors import DsiError, Refusal, Refused

from .build import CUT, KEEP, EagerBuilder
from .match import Match, run_check, value_of
from .pattern import Evaluator
from .rule import Compiled, Rule, compile_rule
from .sampling import Sampler, assignments

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDE = 1e-5
FACTOR = 2.0
ULPS = 2.0
STRAY = 0.03
_FLOOR = 0.05  # values all below this are measured against it: cancellation leaves nothing to be relative to
_BRANCHES = 48  # choices of branches, at most, per dtype
_SAMPLES = 24  # at least, per dtype
_EXTRA = 400  # further samples, at most, for branches that none was accepted with
_LITERAL_SAMPLES = 6  # for literals that a graph has and the rule does not list

_proven: set[tuple[Any, ...]] = set()  # rules with literals of graphs that were verified


class VerificationError(DsiError):
    """A rule whose replacement does not compute what its pattern does, with the sample that shows it."""


@dataclass
class Verified:
    """What was compared: samples that the rule accepted, per rule, and samples that it refused."""

    accepted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max((len(n) for n in self.accepted), default=0)
        return "\n".join(f"{n:{width}}  {count:5} samples equal, {self.refused[n]:5} refused" for n, count in self.accepted.items())


def verify(rules: type[Rule] | Iterable[type[Rule]] | None = None, *, seed: int = 0, kernels: bool = False) -> Verified:
    """Verifies a rule, several, or (None) all that dsi comes with. Raises `VerificationError` at the first that is wrong.

    With `kernels`, operators made with `dsi.custom_op` are computed by their kernels instead of their references: on the CUDA device if
    there is one, else on CPU tensors, which a Triton kernel takes under its interpreter (TRITON_INTERPRET=1; without bfloat16, with which
    that cannot compute).
    """
    if rules is None:
        from .rules import RULES

        rules = RULES
    result = Verified()
    for rule in (rules,) if isinstance(rules, type) else rules:
        _verify_one(compile_rule(rule), result, seed, kernels)
    return result


def _verify_one(compiled: Compiled, result: Verified, seed: int, kernels: bool) -> None:
    accepted = refused = 0
    reason = ""
    missing = {(tag, branch) for choice in assignments(compiled, _BRANCHES) for tag, branch in choice.items()}
    dtypes = tuple(d for d in DTYPES if d != torch.bfloat16) if kernels and not torch.cuda.is_available() else DTYPES
    for number, dtype in enumerate(dtypes):
        choices = assignments(compiled, _BRANCHES, seed + number)
        for i, branches in enumerate(choices):
            for round_ in range(-(-_SAMPLES // len(choices))):
                case = Case(compiled, branches, dtype, seed + 1000 * number + 7 * i + round_, kernels)
                if case.compare():
                    accepted += 1
                    missing -= set(case.tags.items())
                else:
                    refused += 1
                    reason = case.refusal
            if number == 0:
                Case(compiled, branches, dtype, seed + 7 * i, far=True).compare()
    everything = assignments(compiled, 8 * _BRANCHES, seed)
    for extra in range(_EXTRA):
        wanted = [choice for choice in everything if missing & set(choice.items())]
        if not wanted:
            break
        case = Case(compiled, wanted[extra % len(wanted)], dtypes[extra % len(dtypes)], seed + 5000 + extra, kernels)
        if case.compare():
            accepted += 1
            missing -= set(case.tags.items())
        else:
            reason = case.refusal
    result.accepted[compiled.name] = result.accepted.get(compiled.name, 0) + accepted
    result.refused[compiled.name] = result.refused.get(compiled.name, 0) + refused
    if not accepted:
        raise VerificationError(
            f"{compiled.place}: rule {compiled.name}: its check refused each of {refused} samples, the last because {reason}"
        )
    if missing:
        tags = ", ".join(sorted(f"{tag} = {branch}" for tag, branch in missing))
        raise VerificationError(
            f"{compiled.place}: rule {compiled.name}: no sample was accepted with {tags}; the last was refused because {reason}"
        )


def verify_literals(compiled: Compiled, match: Match) -> None:
    """Verifies a rule with the literals of a match in a graph, those that `verify` did not have: numbers, bools and strings.

    Raises `VerificationError` where the rule is wrong with them, and `Refused` where its check refuses every sample with a literal of
    `literals`. Others (an index into a tensor, say) hang together with sizes; for them only a difference counts.
    """
    listed = compiled.rule.literals
    new = {
        name: value
        for name, value in match._env.items()
        if isinstance(value, (bool, int, float, str)) and not any(_same_literal(value, known) for known in listed.get(name, ()))
    }
    if not new:
        return
    branches = {tag: branch for tag, (branch, _) in match._tags.items()}
    dtype = next((d for v in match._env.values() if (d := getattr(value_of(v), "dtype", None)) in DTYPES), torch.float32)
    key = (type(compiled.rule), dtype, *sorted((k, type(v).__name__, repr(v)) for k, v in new.items()), *sorted(branches.items()))
    if key in _proven:
        return
    refusal, accepted = "", 0
    Case(compiled, branches, dtype, 0, literals=new, far=True).compare()
    for seed in range(_LITERAL_SAMPLES):
        for kernels in (False, True) if torch.cuda.is_available() else (False,):
            case = Case(compiled, branches, dtype, seed, kernels, new)
            if case.compare():
                accepted += 1
            else:
                refusal = case.refusal
    required = {name: value for name, value in new.items() if name in listed}
    if required and not accepted:
        shown = ", ".join(f"{name} = {value!r}" for name, value in required.items())
        raise Refused(Refusal(f"it cannot be verified with {shown}: each sample was refused, the last because {refusal}"))
    _proven.add(key)


def _same_literal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


class Case:
    """One sample of one rule: a choice of branches, a dtype and a seed; `kernels` as in `verify`; `literals` instead of the rule's own.

    `far`: the sample is large, and compared in float64 alone, since smaller formats overflow in one spelling and not in another;
    an element that is not finite in the pattern counts as equal.
    """

    def __init__(
        self,
        compiled: Compiled,
        branches: dict[str, str],
        dtype: torch.dtype,
        seed: int,
        kernels: bool = False,
        literals: dict[str, Any] | None = None,
        far: bool = False,
    ):
        self.compiled, self.branches, self.dtype, self.seed, self.kernels, self.far = compiled, branches, dtype, seed, kernels, far
        self.literals = literals or {}
        self.tags: dict[str, str] = {}
        self.env: dict[str, Any] = {}
        self.refusal = ""

    def compare(self) -> bool:
        """False if the rule refuses the sample; raises `VerificationError` if pattern and replacement differ on it."""
        compiled = self.compiled
        try:
            self.env = dict(compiled.rule.sample(Sampler(compiled, self.branches, self.dtype, self.seed, self.literals, self.far)))
        except Exception as error:
            raise self._wrong(f"its sample fails: {type(error).__name__}: {error}") from error
        self.env.update({name: value for name, value in self.literals.items() if name not in compiled.rule.literals})
        if self.kernels and torch.cuda.is_available():
            self.env = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in self.env.items()}
        unknown = [v.name for v in compiled.variables if v.name not in self.env]
        if unknown:
            raise VerificationError(
                f"{compiled.place}: rule {compiled.name}: nothing says what to verify {', '.join(unknown)} with; extend `sample`"
            )
        try:
            with torch.no_grad():
                expected, match = self._pattern(self.env, wide=False)
        except Exception as error:
            # Such as operands of two dtypes, where one of two casts is taken.
            self.refusal = f"the pattern cannot be computed: {str(error).splitlines()[0]}"
            return False
        try:
            match.check_declared()
            self._check(match)
            given = {name: value.clone() for name, value in self.env.items() if isinstance(value, torch.Tensor)}
            actual = self._rewrite(match, wide=False)
        except Refused as refused:
            self.refusal = refused.refusal.reason
            return False
        for name, value in given.items():
            if not torch.equal(value, self.env[name]):
                raise self._wrong(f"its rewrite writes to {name}")
        self.tags = {tag: branch for tag, (branch, _) in match._tags.items()}
        exact, wide_match = self._pattern({k: _widened(v) for k, v in self.env.items()}, wide=True)
        wide_match._solver = match._solver
        wide = self._rewrite(wide_match, wide=True)
        for index, (pattern, replacement) in enumerate(zip(expected, actual, strict=True)):
            if replacement is not KEEP and replacement is not CUT:
                self._equal(pattern, replacement, exact[index], wide[index])
        return True

    def _pattern(self, env: dict[str, Any], wide: bool) -> tuple[list[Any], Match]:
        evaluator = Evaluator(env, lambda tag, names: self.branches.get(tag, names[0]), wide)
        outputs = [evaluator(o) for o in self.compiled.outputs]
        used = {name: value for name, value in env.items() if name in evaluator.used}
        return outputs, Match(self.compiled, used, evaluator.tags, evaluator.labels, outputs)

    def _rewrite(self, match: Match, wide: bool) -> list[Any]:
        try:
            with torch.no_grad():
                # A kernel need not take float64: there the reference stands for it.
                result = self.compiled.rule.rewrite(EagerBuilder(wide, self.kernels and not wide), match)
        except Refused:
            raise
        except Exception as error:
            raise self._wrong(f"its rewrite fails: {type(error).__name__}: {error}") from error
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(values) != len(self.compiled.outputs):
            raise self._wrong(f"`rewrite` returned {len(values)} values, `pattern` {len(self.compiled.outputs)}")
        return values

    def _check(self, match: Match) -> None:
        try:
            run_check(self.compiled, match)
        except (Refused, DsiError):
            raise
        except Exception as error:
            raise self._wrong(f"its check fails: {type(error).__name__}: {error}") from error

    def _equal(self, pattern: Any, replacement: Any, exact: Any, wide: Any) -> None:
        if not isinstance(pattern, torch.Tensor):
            return
        if not isinstance(replacement, torch.Tensor) or replacement.shape != pattern.shape or replacement.dtype != pattern.dtype:
            raise self._wrong(f"the pattern gives {_describe(pattern)}, the replacement {_describe(replacement)}")
        if not pattern.is_floating_point():
            if not torch.equal(pattern, replacement):
                raise self._wrong("pattern and replacement give other integers")
            return
        if self.far:
            wide = torch.where(exact.isfinite(), wide, exact)
        top = _largest(exact)
        difference = _distance(wide, exact)
        if not difference <= WIDE * top:
            raise self._wrong(f"in float64 pattern and replacement differ by {difference:.3g} of {top:.3g}")
        if self.far:
            return
        own, other = _distance(pattern, exact), _distance(replacement, exact)
        if not other <= FACTOR * own + ULPS * torch.finfo(pattern.dtype).eps * max(top, _FLOOR):
            raise self._wrong(f"the replacement is {other:.3g} from the exact result, the pattern {own:.3g}, of {top:.3g}")
        if self.compiled.rule.same_rounding:
            # The order of a sum shows in float32 only.
            loose = 1e-5 if pattern.dtype == torch.float32 else 0.0
            stray = int((~torch.isclose(pattern, replacement, rtol=loose, atol=loose * top, equal_nan=True)).sum())
            if stray > max(1, STRAY * pattern.numel()):
                raise self._wrong(f"the replacement rounds elsewhere: {stray} of {pattern.numel()} elements differ")

    def _wrong(self, reason: str) -> VerificationError:
        shown = ", ".join(f"{k} {_describe(v)}" for k, v in self.env.items())
        branches = ", ".join(f"{tag} = {branch}" for tag, branch in self.branches.items() if "#" not in tag)
        sample = f"branches: {branches or 'none'}; {shown}; {'far ' if self.far else ''}seed {self.seed}"
        return VerificationError(f"{self.compiled.place}: rule {self.compiled.name} is wrong: {reason} ({sample})")


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _largest(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is finite and the other is not, or one is NaN."""
    a, b = a.double(), b.double()
    if a.shape != b.shape:
        return math.inf
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    difference = torch.where(same, 0.0, (a - b).abs())
    difference = torch.nan_to_num(difference, nan=math.inf, posinf=math.inf)
    return float(difference.max()) if difference.numel() else 0.0


def _describe(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
