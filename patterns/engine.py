"""Applies rules to a graph: candidates by target, the semantics of `patterns/__init__.py`, hits and nearest misses into the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from dsi.ir.context import Context
from dsi.ir.errors import DsiError, DsiInternalError, Refusal, Refused
from dsi.ir.region import REGION_CUT
from dsi.ir.source import source_line
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .arguments import Arguments
from .effects import has_effect, is_dead, is_size_query
from .match import Match, run_check
from .matcher import Matcher, State
from .rewriter import Rewriter
from .rule import Compiled, Rule, compile_rule
from .verify import verify_literals
from .vocabulary import Target

_MAX_ROUNDS = 100  # of a fixpoint; a list of rules that needs more undoes its own work
_MAX_HITS = 50  # of a fixpoint, for each node that it began with (and 1000 for none): rules that need more feed on what they make


def apply_rules(gm: fx.GraphModule, rules: Sequence[type[Rule]], context: Context, *, fixpoint: bool = False) -> Counter[str]:
    """Applies `rules` in order, each wherever it matches, from the graph's end to its start; with `fixpoint` until none matches any more.

    Hits go to `context.report.hits`, the nearest miss of every rule that never fired to `context.report.misses`. Returns the hits of this
    call. Raises `DsiError` for a malformed rule, before anything is changed.
    """
    compiled = [compile_rule(rule) for rule in rules]
    run = _Run(gm, context)
    total: Counter[str] = Counter()
    allowed = 1000 + _MAX_HITS * len(gm.graph.nodes)
    for _ in range(_MAX_ROUNDS):
        hits = Counter({rule.name: n for rule in compiled if (n := run.sweep(rule))})
        total += hits
        if not fixpoint or not hits or run.rewriter.out_of_fuel:
            break
        if total.total() > allowed:
            (name, number), *_ = total.most_common(1)
            raise DsiInternalError(
                f"rules have fired {total.total()} times and do not end; {name} alone {number} times, on what it has made"
            )
    else:
        raise DsiInternalError(f"rules still fire after {_MAX_ROUNDS} rounds: {', '.join(sorted(hits))} undo each other's work")
    context.report.hits.update(total)
    for rule in compiled:
        if context.report.hits[rule.name]:
            context.report.misses.pop(rule.name, None)
        elif rule.name in run.misses:
            context.report.misses[rule.name] = run.misses[rule.name]
    gm.graph.lint()
    gm.recompile()
    return total


def find(gm: fx.GraphModule, rule: type[Rule]) -> tuple[list[Match], Refusal | None]:
    """The matches of one rule, found and not rewritten, and its nearest miss. Matches may overlap."""
    compiled = compile_rule(rule)
    run = _Run(gm, Context(options=None))
    matches = []
    for node in run.candidates(compiled):
        found = run.match_at(compiled, node)
        if found is not None:
            matches.append(found[0])
    return matches, run.misses.get(compiled.name)


class _Run:
    """One application of rules to one graph."""

    def __init__(self, gm: fx.GraphModule, context: Context):
        self.graph = gm.graph
        self.rewriter = Rewriter(gm, context)
        self.arguments = Arguments()
        self._own = frozenset(getattr(context.options, "rules", ()))  # the user's rules, verified with what the graph has, too
        self.misses: dict[str, Refusal] = {}
        self._depths: dict[str, int] = {}
        self._index: dict[Target, list[fx.Node]] = defaultdict(list)
        self._barriers = [n for n in gm.graph.nodes if n.op == "call_function" and has_effect(n.target)]
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self._index[node.target].append(node)

    def candidates(self, compiled: Compiled) -> list[fx.Node]:
        """The nodes that the first output can be, last first."""
        nodes = [n for target in compiled.roots for n in self._index.get(target, ()) if n not in self.rewriter.erased]
        return sorted(nodes, reverse=True)

    def sweep(self, compiled: Compiled) -> int:
        """Rewrites every match of a rule; how many there were."""
        hits = 0
        candidates = self.candidates(compiled)
        if not candidates:
            names = sorted(str(t) for t in compiled.roots)
            self._miss(compiled, -1, None, f"the graph has no {' or '.join(names[:4])}")
        for node in candidates:
            if self.rewriter.out_of_fuel:
                break
            if node in self.rewriter.erased:
                continue
            found = self.match_at(compiled, node)
            if found is None:
                continue
            match, outputs, nodes = found
            try:
                hits += self.rewriter.replace(compiled, match, outputs, nodes)
            except Refused as refused:
                self._miss(compiled, len(nodes) + 1, node, refused.refusal.reason)
            for new in self.rewriter.created:
                self._index[new.target].append(new)  # type: ignore[index]
            self.rewriter.created.clear()
        return hits

    def match_at(self, compiled: Compiled, node: fx.Node) -> tuple[Match, list[fx.Node], list[fx.Node]] | None:
        """The first reading of the pattern at `node` that every check accepts: the match, its output nodes and all its nodes."""
        matcher = Matcher(compiled, self.arguments)
        for state in matcher.at(node):
            nodes = list(dict.fromkeys(state.nodes))
            try:
                outputs = self._outputs(compiled, node, state)
                match = Match(compiled, dict(state.env), dict(state.tags), dict(state.labels), outputs, nodes)
                self._check_escapes(outputs, nodes)
                self._check_effects(compiled, nodes)
                match.check_declared()
                self._check(compiled, match, node)
                self._check_convex(outputs, nodes, state)
                self.rewriter.insertion_point(match, outputs, set(nodes))
                if type(compiled.rule) in self._own:
                    with unset_fake_temporarily(), torch.device("cpu"):  # samples are real
                        verify_literals(compiled, match)
            except Refused as refused:
                matcher.failure.note(len(nodes), node, refused.refusal.reason)
                continue
            return match, outputs, nodes
        failure = matcher.failure
        if failure.depth > 0:
            self._miss(compiled, failure.depth, failure.node or node, failure.reason)
        return None

    def _check(self, compiled: Compiled, match: Match, node: fx.Node) -> None:
        try:
            run_check(compiled, match)
        except (Refused, DsiError):
            raise
        except Exception as error:
            raise DsiError(
                f"{compiled.place}: rule {compiled.name}: `check` failed at {node.name}: {type(error).__name__}: {error}"
            ) from error

    def _outputs(self, compiled: Compiled, node: fx.Node, state: State) -> list[fx.Node]:
        outputs = [node]
        for value in compiled.outputs[1:]:
            outputs.append(state.calls.get(id(value)) or state.tags[value.tag][1])  # type: ignore[attr-defined]
        return outputs

    def _check_escapes(self, outputs: list[fx.Node], nodes: list[fx.Node]) -> None:
        inside, open_ = set(nodes), set(outputs)
        for node in nodes:
            if node in open_:
                continue
            if REGION_CUT in node.meta:
                raise Refused(Refusal(f"a region is to end at the intermediate value {node.name}, by a hint of {node.meta[REGION_CUT]}"))
            for user in node.users:
                if user not in inside and not is_size_query(user.target) and not is_dead(user):
                    raise Refused(Refusal(f"the intermediate value {node.name} is also read by {user.name}, outside the match"))

    def _check_effects(self, compiled: Compiled, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        if not self._barriers or len(nodes) == 1:
            return
        first, last = min(nodes), max(nodes)
        for barrier in self._barriers:
            if barrier not in inside and barrier not in self.rewriter.erased and first < barrier < last:
                raise Refused(
                    Refusal(f"{barrier.name} ({barrier.target}), a mutation or collective, stands between {first.name} and {last.name}")
                )

    def _check_convex(self, outputs: list[fx.Node], nodes: list[fx.Node], state: State) -> None:
        if len(nodes) == 1:
            return
        inside, first = set(nodes), min(outputs)
        seen: set[fx.Node] = set()
        stack = [a for n in nodes for a in n.all_input_nodes if a not in inside]
        while stack:
            node = stack.pop()
            if node in seen or node < first:
                continue
            seen.add(node)
            for argument in node.all_input_nodes:
                if argument in inside:
                    raise Refused(
                        Refusal(f"{node.name} reads {argument.name} of the match and is read by it again: the match would not be convex")
                    )
                stack.append(argument)

    def _miss(self, compiled: Compiled, depth: int, node: fx.Node | None, reason: str) -> None:
        if depth <= self._depths.get(compiled.name, -2):
            return
        self._depths[compiled.name] = depth
        self.misses[compiled.name] = Refusal(
            reason,
            node.name if node is not None else "",
            source_line(node) if node is not None else "",
            f"{compiled.name} ({compiled.place})",
        )
