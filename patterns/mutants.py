"""Wrong copies of a rule, which `verify` must find out: if it does not, its samples prove nothing about the rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dsi.ir.ops import ACTIVATIONS, EPS_PLACES, RMS_CASTS, ROPE_STYLES

from .build import CUT, KEEP, Builder
from .match import Match
from .rule import Rule, compile_rule
from .sampling import assignments
from .verify import DTYPES, Case
from .vocabulary import Target

_WORDS = (tuple(ACTIVATIONS), EPS_PLACES, RMS_CASTS, ROPE_STYLES)


@dataclass(frozen=True)
class Mutant:
    """One wrong copy: what is wrong with it, and the rule."""

    fault: str
    rule: type[Rule]


@dataclass(frozen=True)
class _Site:
    operator: str
    call: int  # which call of this operator in the rewrite
    argument: int | str


def mutants(rule: type[Rule]) -> list[Mutant]:
    """Copies of `rule` with one fault each.

    One literal changed in what the rewrite builds; the result off by a twentieth; where the rewrite builds nothing, nothing checked.
    """
    sites, builds = _sites(rule)
    found = [_mutant(rule, f"{site.operator}: argument {site.argument} changed", _changing(site)) for site in sites]
    if not builds and rule.check is not Rule.check:
        found.append(Mutant("check removed", type(f"{rule.__name__}Unchecked", (rule,), {"check": lambda self, m: None})))
    found.append(Mutant("result off by a twentieth", type(f"{rule.__name__}Off", (rule,), {"rewrite": _off(rule)})))
    return found


def changed(value: Any) -> Any:
    """Another literal of the same kind; None where there is no telling what another one would be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + math.copysign(0.25, value) if value == 0 or abs(value) >= 0.01 else value * 10
    if isinstance(value, str):
        return next((words[(words.index(value) + 1) % len(words)] for words in _WORDS if value in words), None)
    if isinstance(value, torch.dtype):
        return torch.float16 if value != torch.float16 else torch.bfloat16
    if isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(v, int) for v in value):
        return [*value[1:], value[0]] if len(set(value)) > 1 else None
    return None


class _Changing(Builder):
    """Builds what another builder does, with the literal at one site changed; notes the sites there are."""

    def __init__(self, inner: Builder, site: _Site | None = None):
        self._inner, self._site = inner, site
        self._calls: Counter[str] = Counter()
        self.sites: list[_Site] = []

    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Target | None = None) -> Any:
        name = str(target)
        number = self._calls[name]
        self._calls[name] += 1
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for key, value in given.items():
            if changed(value) is None:
                continue
            site = _Site(name, number, key)
            self.sites.append(site)
            if site == self._site:
                given[key] = changed(value)
        args = tuple(given[i] for i in range(len(args)))
        return self._inner._emit(target, args, {k: given[k] for k in kwargs}, compute)

    def value(self, x: Any) -> Any:
        return self._inner.value(x)

    def size(self, x: Any, dim: int) -> Any:
        return self._inner.size(x, dim)


def _sites(rule: type[Rule]) -> tuple[list[_Site], bool]:
    """The literals in what the rewrite builds, over the branches that the rule accepts, and whether it builds anything."""
    found: dict[_Site, None] = {}
    built = [False]

    def rewrite(self: Rule, dsi: Builder, m: Match) -> Any:
        noting = _Changing(dsi)
        result = rule.rewrite(self, noting, m)
        found.update(dict.fromkeys(noting.sites))
        built[0] |= bool(noting._calls)
        return result

    compiled = compile_rule(type(rule.__name__, (rule,), {"rewrite": rewrite}))
    choices = assignments(compiled, 64)
    for seed in range(max(8, 64 // len(choices))):
        for i, branches in enumerate(choices if seed < 1 or len(choices) < 16 else []):
            Case(compiled, branches, DTYPES[(i + seed) % len(DTYPES)], 100 * i + seed).compare()
    return list(found), built[0]


def _changing(site: _Site) -> Callable[[Builder], Builder]:
    return lambda dsi: _Changing(dsi, site)


def _mutant(rule: type[Rule], fault: str, wrap: Callable[[Builder], Builder]) -> Mutant:
    def rewrite(self: Rule, dsi: Builder, m: Match) -> Any:
        return rule.rewrite(self, wrap(dsi), m)

    return Mutant(fault, type(f"{rule.__name__}Mutant", (rule,), {"rewrite": rewrite}))


def _off(rule: type[Rule]) -> Callable[[Rule, Builder, Match], Any]:
    def move(value: Any) -> Any:
        if value is KEEP or value is CUT:
            return value
        return value * 1.05 if value.is_floating_point() else value + 1

    def rewrite(self: Rule, dsi: Builder, m: Match) -> Any:
        result = rule.rewrite(self, dsi, m)
        return tuple(move(v) for v in result) if isinstance(result, (tuple, list)) else move(result)

    return rewrite
