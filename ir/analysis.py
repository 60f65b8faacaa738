"""From a region's body to its plan. A region is legal exactly when this succeeds.

plan_region(body)        the plan, or `Refused` with the region rule and a sentence
kernel_spec(name, …)     what code generation is given
region_key(body)         equal keys: the same kernel serves
evaluate_plan(plan, …)   a slow interpreter of plans, the oracle of tests
"""

from __future__ import annotations

from torch import fx

from .evaluate import evaluate_plan
from .kernel_spec import bind_sizes, kernel_spec, region_key, unbound_sizes, within
from .plan_attention import ATTENTION, plan_attention
from .plan_linear import plan_linear
from .plan_row import plan_row
from .pull import fail
from .semantics import LINEARS, aten, dsi
from .tile import Load, Plan, Store

__all__ = ["bind_sizes", "evaluate_plan", "kernel_spec", "kind_of", "plan_region", "region_key"]


def kind_of(body: fx.GraphModule) -> str:
    """The kind of region (ir.region.REGION_KINDS) that a body's operators make it."""
    targets = {n.target for n in body.graph.nodes if n.op == "call_function"}
    if targets & set(LINEARS):
        return "linear"
    if ATTENTION in targets:
        return "attention"
    return "embedding" if targets & {dsi.embedding.default, aten.embedding.default} else "row"


def plan_region(body: fx.GraphModule, kind: str | None = None) -> Plan:
    """The plan of a region's body.

    Placeholders are the region's inputs, with fakes (or SymInts) in `meta["val"]`; members are semantic and ATen operators; the output
    node returns a tuple. `kind`: one of `ir.region.REGION_KINDS`, or None to derive it. Raises `Refused` naming the region rule, the node
    and its source line.
    """
    derived = kind_of(body)
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    if kind is not None and kind != derived and {kind, derived} != {"row", "embedding"}:
        raise fail(output, f"the region holds the operators of kind {derived}, not {kind}")
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is dsi.all_reduce.default:
            raise fail(node, f"{node.name} is an all-reduce, which regions never cross", 10)
        if node.target is ATTENTION and derived == "linear":
            raise fail(node, f"{node.name} is a second contraction beside the region's linears", 7)
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            raise fail(node, f"{node.name} writes in place, which only whole graphs may do")
    try:
        plan: Plan = plan_linear(body) if derived == "linear" else plan_attention(body) if derived == "attention" else plan_row(body)
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        # A case that the planner did not think of: the region is not made, and the report says what went wrong.
        raise fail(output, f"it is not planned: {type(error).__name__}: {error}") from error
    _caches_are_only_written(body, plan)
    missing = unbound_sizes(body, plan)
    if missing:
        names = ", ".join(sorted(map(str, missing)))
        raise fail(output, f"the size {names} can be read off no input of the region: it must be passed as a SymInt")
    return plan


def _caches_are_only_written(body: fx.GraphModule, plan: Plan) -> None:
    """A cache may be written in place, by one program while another still reads: so a region that writes it does not read it."""
    parts = list(within(plan))
    written = {part.base: part for part in parts if isinstance(part, Store) and part.base is not None}
    if written.keys() & {part.input for part in parts if isinstance(part, Load)}:
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        base = next(b for b in written if any(isinstance(p, Load) and p.input == b for p in parts))
        raise fail(inputs[base], f"the cache {inputs[base].name} is both written and read in the region", 9)
    if len([p for p in parts if isinstance(p, Store) and p.base is not None]) > len(written):
        raise fail(next(iter(body.graph.nodes)), "two outputs of the region write into one cache", 9)
