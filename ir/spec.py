"""The specification of graphs between stages, as checks that run.

`check_graph` raises `DsiInternalError` with a sentence that names the node. What it states holds for every graph from AOTAutograd to the
executor:

1. the graph is well formed, and every node is of a kind that its level allows;
2. it is functional, except for the epilogue that writes mutated inputs back and, after lowering, `dsi.kv_write_`;
3. every `meta["val"]` is what the operator makes of the values of its inputs: shape, dtype, device, strides;
4. an output aliases no input that it did not alias before;
5. a region call carries its `Region`, whose body is such a graph itself, over the same values.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from . import ops
from .errors import DsiInternalError
from .region import Region

Level = Literal["aten", "regions", "lowered", "body"]
Aliases = tuple[frozenset[str], ...]

_aten = torch.ops.aten
# What AOTAutograd writes mutated inputs back with.
_EPILOGUE = {_aten.copy_.default, _aten.set_.source_Tensor, _aten.set_.source_Storage_storage_offset}
_FROM_INPUT = ("alias_of_input", "is_input")
_UNREPEATABLE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}


def check_graph(gm: fx.GraphModule, level: Level, fake_mode: Any = None, aliases: Aliases | None = None) -> None:
    """Check `gm` against the specification of `level`; raise `DsiInternalError` where it fails.

    "aten": functional ATen and semantic operators; "regions": also region calls; "lowered": also `kv_write_` and regions that write in
    place; "body": the inside of a region. `fake_mode` is the tracing mode (None: taken from the values); `aliases` is what
    `output_aliases` said of the graph before the stages, None to allow any.
    """
    _Check(gm, level, fake_mode or _mode_of(gm), aliases).run()


def output_aliases(gm: fx.GraphModule) -> Aliases:
    """For each returned value the names of the placeholders that it may share memory with.

    That is as the graph has it, and, while AOTAutograd compiles, as AOTAutograd has listed it and will make it.
    """
    roots: dict[fx.Node, frozenset[str]] = {}
    for node in gm.graph.nodes:
        roots[node] = _roots(node, roots)
    returned = _returned(gm)
    listed = _listed_aliases(gm, len(returned))
    return tuple((roots[v] if isinstance(v, fx.Node) else frozenset()) | also for v, also in zip(returned, listed, strict=True))


def _listed_aliases(gm: fx.GraphModule, returned: int) -> Aliases:
    """The placeholder that AOTAutograd makes each returned value from, whatever the graph returns there; empty sets where it makes none."""
    nothing: Aliases = (frozenset(),) * returned
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    placeholders = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if metadata is None or len(metadata.input_info) != len(placeholders) or metadata.num_intermediate_bases or metadata.tokens:
        return nothing
    # Mutated inputs that are not written back inside the graph are returned before the outputs.
    first = returned - len(metadata.output_info)
    if first < 0:
        return nothing
    made = [frozenset((placeholders[o.base_idx],)) if o.output_type.name in _FROM_INPUT else frozenset() for o in metadata.output_info]
    return (*nothing[:first], *made)


def _roots(node: fx.Node, roots: dict[fx.Node, frozenset[str]]) -> frozenset[str]:
    if node.op == "placeholder":
        return frozenset((node.name,))
    if node.op == "call_function" and node.target is operator.getitem:
        return roots[node.all_input_nodes[0]]
    if node.op == "call_module" and isinstance(region := node.meta.get("region"), Region):
        written = (node.args[i] for i in region.in_place.values())
        return frozenset().union(*(roots[a] for a in written if isinstance(a, fx.Node)))
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        found: frozenset[str] = frozenset()
        for argument, value in _bound(node, node.target):
            # An alias annotation says that a result is a view of this argument, or the argument itself.
            if argument.alias_info is not None and isinstance(value, fx.Node):
                found |= roots[value]
        return found
    return frozenset()


def _bound(node: fx.Node, target: torch._ops.OpOverload) -> Iterator[tuple[torch._C.Argument, Any]]:
    """Schema arguments of an operator node beside what is passed for them."""
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _returned(gm: fx.GraphModule) -> list[Any]:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _mode_of(gm: fx.GraphModule) -> Any:
    values = [v for n in gm.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    return torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])


class _Check:
    def __init__(self, gm: fx.GraphModule, level: Level, fake_mode: Any, aliases: Aliases | None):
        self.gm, self.level, self.fake_mode, self.aliases = gm, level, fake_mode, aliases
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}

    def run(self) -> None:
        try:
            self.gm.graph.lint()
        except Exception as error:
            raise DsiInternalError(f"IR specification ({self.level}): the graph is not well formed: {error}") from error
        with self._faking():
            for node in self.gm.graph.nodes:
                self._kind(node)
                self._mutation(node)
                if node.op != "output":
                    self._value(node)
        if self.aliases is not None:
            self._aliasing()

    def _fail(self, node: fx.Node, sentence: str) -> DsiInternalError:
        return DsiInternalError(f"IR specification ({self.level}): {node.name} = {node.target}: {sentence}")

    @contextlib.contextmanager
    def _faking(self) -> Iterator[None]:
        """Values are recomputed without leaving guards or symbols behind."""
        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(self.fake_mode)
                if self.fake_mode.shape_env is not None:
                    stack.enter_context(self.fake_mode.shape_env.suppress_guards())
                    stack.enter_context(self.fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            yield

    # ------------------------------------------------------------------------------------------------------------------ kinds

    def _kind(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "output"):
            return
        if node.op == "get_attr":
            if self.level == "body":
                raise self._fail(node, "a region's body holds no attribute; what it needs is an input")
            return
        if node.op == "call_module":
            self._region(node)
            return
        if node.op != "call_function":
            raise self._fail(node, f"an ATen-level graph has no {node.op}")
        target = node.target
        if not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) and not _is_scalar_call(node):
            raise self._fail(node, "the target is neither an operator overload nor scalar arithmetic")
        if self.level == "body" and isinstance(target, torch._ops.HigherOrderOperator):
            raise self._fail(node, "a higher-order operator inside a region")

    def _region(self, node: fx.Node) -> None:
        region = node.meta.get("region")
        if self.level not in ("regions", "lowered"):
            raise self._fail(node, "a module is called before regions are made")
        if not isinstance(region, Region):
            raise self._fail(node, 'a module is called that carries no meta["region"]')
        if self.gm.get_submodule(str(node.target)) is not region.body:
            raise self._fail(node, "the module called is not the region's body")
        inputs = region.inputs
        if node.kwargs or len(inputs) != len(node.args):
            raise self._fail(node, f"{len(node.args)} arguments for a body with {len(inputs)} inputs")
        for inner, outer in zip(inputs, node.args, strict=True):
            what = outer.meta.get("val") if isinstance(outer, fx.Node) else outer
            if difference := _difference(inner.meta.get("val"), what):
                raise self._fail(node, f"input {inner.name} of the body differs from the value passed: {difference}")
        if region.in_place and self.level != "lowered":
            raise self._fail(node, "a region writes in place before lowering")
        for written in region.in_place.values():
            if written >= len(inputs):
                raise self._fail(node, f"the region writes to input {written} and has {len(inputs)}")
        check_graph(region.body, "body", self.fake_mode)

    # --------------------------------------------------------------------------------------------------------------- mutation

    def _mutation(self, node: fx.Node) -> None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return
        allowed = node.target in _EPILOGUE if self.level != "body" else False
        allowed |= self.level == "lowered" and node.target is ops.kv_write_
        if not allowed:
            raise self._fail(node, "it writes to an argument; before lowering only the epilogue does")
        written = node.args[0]
        if not isinstance(written, fx.Node) or written.op != "placeholder":
            raise self._fail(node, f"it writes to {written}, which is no input of the graph")
        if node.target in _EPILOGUE:
            late = [u for u in written.users if self.order[u] > self.order[node] and u.op != "output" and u.target not in _EPILOGUE]
            if late:
                raise self._fail(node, f"{late[0].name} reads {written.name} after the epilogue has written to it")

    def _aliasing(self) -> None:
        now = output_aliases(self.gm)
        if self.aliases is None or len(now) != len(self.aliases):
            raise DsiInternalError(
                f"IR specification ({self.level}): the graph returns {len(now)} values where it returned {len(self.aliases or ())}"
            )
        for i, (before, after) in enumerate(zip(self.aliases, now, strict=True)):
            if extra := after - before:
                raise DsiInternalError(f"IR specification ({self.level}): output {i} now aliases the input {', '.join(sorted(extra))}")

    # ----------------------------------------------------------------------------------------------------------------- values

    def _value(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            return
        if "val" not in node.meta:
            if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
                return  # an assertion, which is there for its effect
            raise self._fail(node, 'it has no meta["val"]')
        stated = node.meta["val"]
        if node.op == "call_module":
            outputs = tuple(v.meta.get("val") if isinstance(v, fx.Node) else v for v in node.meta["region"].outputs)
            if not isinstance(stated, (tuple, list)):
                raise self._fail(node, "the value of a region is a tuple")
            if difference := _difference(tuple(stated), outputs):
                raise self._fail(node, f"its value differs from what the region's body returns: {difference}")
            return
        if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
            return
        if isinstance(node.target, torch._ops.OpOverload) and (_UNREPEATABLE & set(node.target.tags) or node.target._schema.is_mutable):
            return
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: n.meta.get("val", self.gm if n.op != "get_attr" else self._attribute(n))
        )
        if any(isinstance(leaf, fx.GraphModule) for leaf in pytree.tree_leaves((args, kwargs))):
            return
        target: Any = node.target
        try:
            computed = target(*args, **kwargs)
        except Exception as error:
            raise self._fail(node, f"it cannot be computed from its inputs' values: {error}") from error
        if difference := _difference(stated, computed):
            raise self._fail(node, f'its meta["val"] is not what it computes: {difference}')

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor) and self.fake_mode is not None:
            return self.fake_mode.from_tensor(value)
        return value


def _is_scalar_call(node: fx.Node) -> bool:
    """Whether `node` takes a tuple apart or computes with sizes."""
    if node.target is operator.getitem:
        return True
    module, name = getattr(node.target, "__module__", "") or "", getattr(node.target, "__name__", "")
    known = module in ("_operator", "math", "builtins") or name.startswith(("sym_", "_sym_"))
    return known and not isinstance(node.meta.get("val"), torch.Tensor)


def _difference(stated: Any, computed: Any) -> str:
    """How two values differ in what a consumer can rely on, "" if in nothing."""
    if isinstance(stated, (tuple, list)) or isinstance(computed, (tuple, list)):
        if not isinstance(stated, (tuple, list)) or not isinstance(computed, (tuple, list)) or len(stated) != len(computed):
            return f"{stated} against {computed}"
        return next((d for a, b in zip(stated, computed, strict=True) if (d := _difference(a, b))), "")
    if isinstance(stated, torch.Tensor) and isinstance(computed, torch.Tensor):
        return _tensor_difference(stated, computed)
    if isinstance(stated, torch.Tensor) or isinstance(computed, torch.Tensor):
        return f"{type(stated).__name__} against {type(computed).__name__}"
    if isinstance(stated, float) and isinstance(computed, float) and math.isnan(stated) and math.isnan(computed):
        return ""
    return "" if stated is computed or _same(stated, computed) else f"{stated} against {computed}"


def _tensor_difference(stated: torch.Tensor, computed: torch.Tensor) -> str:
    for name in ("dtype", "device"):
        if (a := getattr(stated, name)) != (b := getattr(computed, name)):
            return f"{name} {a} against {b}"
    if len(stated.shape) != len(computed.shape) or not all(map(_same, stated.shape, computed.shape)):
        return f"shape {tuple(stated.shape)} against {tuple(computed.shape)}"
    if any(_same(size, 0) for size in stated.shape):
        return ""
    for i, size in enumerate(stated.shape):
        # The stride of a dimension of size 1 means nothing.
        if not _same(size, 1) and not _same(stated.stride(i), computed.stride(i)):
            return f"strides {tuple(stated.stride())} against {tuple(computed.stride())}"
    return ""


def _same(a: Any, b: Any) -> bool:
    try:
        return statically_known_true(a == b)
    except Exception:
        return bool(a == b)
