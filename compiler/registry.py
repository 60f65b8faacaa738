"""Users' rules: registered for every compilation of this process, or given for one. Each is verified once, before it is first used."""

from __future__ import annotations

import threading

import torch
from dsi.ir.errors import DsiError
from dsi.ir.options import Options
from dsi.passes import normalise, recognise
from dsi.patterns.rule import Rule, compile_rule
from dsi.patterns.verify import verify
from torch._subclasses.fake_tensor import unset_fake_temporarily

_rules: dict[str, type[Rule]] = {}
_verified: set[type[Rule]] = set()
_lock = threading.Lock()


def register(rule: type[Rule]) -> type[Rule]:
    """Use `rule` in every compilation from now on; also a class decorator.

    What is compiled already stays as it is, until `torch.compiler.reset()`. Raises `VerificationError` if the replacement does not compute
    what the pattern does, with the numbers that show it; `DsiError` for a malformed rule, or if another rule of that name is registered.
    """
    name = compile_rule(rule).name
    with _lock:
        _name_is_free(name, rule)
    check(rule)
    with _lock:
        _name_is_free(name, rule)
        _rules[name] = rule
    return rule


def _name_is_free(name: str, rule: type[Rule]) -> None:
    _not_of_dsi(name, rule)
    other = _rules.get(name, rule)
    if other is not rule:
        raise DsiError(f"another rule is registered as {name!r}: {other.__module__}.{other.__qualname__}; give this one another name")


def _not_of_dsi(name: str, rule: type[Rule]) -> None:
    if any(name == own.name() and rule is not own for own in (*normalise.RULES, *recognise.RULES, *recognise.TIDY)):
        raise DsiError(
            f"{rule.__qualname__}: a rule of dsi's own is called {name!r}, and a report counts rules by name; give this another one"
        )


def unregister(rule: type[Rule]) -> None:
    """Take `rule` back. Raises `DsiError` if it is not registered."""
    with _lock:
        if _rules.get(rule.name()) is not rule:
            raise DsiError(f"{rule.__qualname__} is not registered")
        del _rules[rule.name()]


def check(rule: type[Rule]) -> None:
    """Verifies `rule` by the references of its operators, and by the kernels of users' own where a CUDA device is there; once a process.

    Raises `DsiError` for a malformed rule and `VerificationError` for a wrong one.
    """
    compile_rule(rule)
    if rule in _verified:
        return
    # Whatever mode the caller is in, samples are real tensors made on the CPU.
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        verify(rule)
        if torch.cuda.is_available():
            verify(rule, kernels=True)
    _verified.add(rule)


def with_rules(options: Options) -> Options:
    """`options` with the registered rules before its own. Raises `DsiError` for a rule among them that is malformed or wrong."""
    names: dict[str, type[Rule]] = {}
    with _lock:
        registered = tuple(rule for rule in _rules.values() if rule not in options.rules)
    for rule in (*registered, *options.rules):
        name = compile_rule(rule).name
        _not_of_dsi(name, rule)
        if names.setdefault(name, rule) is not rule:
            raise DsiError(
                f"two rules are called {name!r}, {names[name].__module__}.{names[name].__qualname__} and {rule.__module__}."
                f"{rule.__qualname__}; a report counts rules by name: give one another name"
            )
        check(rule)
    return options.model_copy(update={"rules": (*registered, *options.rules)}) if registered else options
