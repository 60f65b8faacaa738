"""Errors and refusals. Both are sentences: they name the key, node, file or shape concerned, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


class DsiError(Exception):
    """A mistake in how dsi was called, found before anything was changed."""


class DsiInternalError(AssertionError):
    """dsi broke one of its own invariants (a stage produced a graph outside its specification). Always a bug in dsi or in a user's rule."""


@dataclass(frozen=True)
class Refusal:
    """Why something was left as it was. A value, not an exception: matching and fusing collect these and the report shows them.

    `reason` is a sentence; `node` names the FX node it concerns, `where` the model's source line ("file.py:12"), `rule` the rule or region
    rule.
    """

    reason: str
    node: str = ""
    where: str = ""
    rule: str = ""

    def __str__(self) -> str:
        place = " at ".join(p for p in (self.node, self.where) if p)
        return f"{self.rule + ': ' if self.rule else ''}{self.reason}{f' ({place})' if place else ''}"


class Refused(Exception):
    """Carries a `Refusal` out of a builder that cannot go on. Caught inside the compiler; users see the refusal in the report."""

    def __init__(self, refusal: Refusal):
        super().__init__(str(refusal))
        self.refusal = refusal


def refuse(reason: str, *, node: str = "", where: str = "", rule: str = "") -> Refused:
    """A `Refused` to raise, from its parts."""
    return Refused(Refusal(reason, node, where, rule))
