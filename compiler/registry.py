"""Rules that a user has registered for every compilation of this process."""

from __future__ import annotations

import threading

from dsi.ir.errors import DsiError
from dsi.ir.options import Options
from dsi.patterns.rule import Rule, compile_rule

_rules: dict[str, type[Rule]] = {}
_lock = threading.Lock()


def register(rule: type[Rule]) -> type[Rule]:
    """Use `rule` in every compilation from now on; also a class decorator.

    What is compiled already stays as it is, until `torch.compiler.reset()`.
    Raises `DsiError` for a malformed rule, or if another rule of that name is registered.
    """
    name = compile_rule(rule).name
    with _lock:
        if _rules.get(name, rule) is not rule:
            raise DsiError(
                f"another rule is registered as {name!r}: {_rules[name].__module__}.{_rules[name].__qualname__}; give this one another name"
            )
        _rules[name] = rule
    return rule


def unregister(rule: type[Rule]) -> None:
    """Take `rule` back. Raises `DsiError` if it is not registered."""
    with _lock:
        if _rules.get(rule.name()) is not rule:
            raise DsiError(f"{rule.__qualname__} is not registered")
        del _rules[rule.name()]


def with_rules(options: Options) -> Options:
    """`options` with the registered rules before its own. Raises `DsiError` for a malformed rule among them."""
    for rule in options.rules:
        compile_rule(rule)
    with _lock:
        registered = tuple(rule for rule in _rules.values() if rule not in options.rules)
    return options.model_copy(update={"rules": (*registered, *options.rules)}) if registered else options
