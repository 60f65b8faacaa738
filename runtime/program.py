"""Linear programs: the lowered graph as a list of steps over slots.

A step reads slots, writes slots, and frees those that no later step reads. A region is one step where a kernel runs it; otherwise its
members are steps of their own, run by their references. `print(program)` shows every step in order. What runs is one function, whose local
variables are the slots.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsi.ir.context import Context
from dsi.ir.errors import DsiInternalError
from dsi.ir.region import STORED, Region
from torch import fx
from torch.fx.node import map_arg

from .expand import attribute_of, expansion, in_place_writes, region_of, write_in_place
from .region_step import RegionKernel, never_empty, region_step
from .sizes import Environment, Sizes
from .views import Views, as_strided

CODE = "v{}"  # how a slot is written in a step's code
# (region, fakes and SymInts of its inputs in the outer graph, sizes of the outer graph, whether it may start before the kernel before it
# has ended) -> what runs it; None: its members, by references.
Kernels = Callable[[Region, Sequence[Any], Sizes, bool], RegionKernel | None]


@dataclass
class Step:
    """One step: its code, a line each, its text, the slots that it reads and writes, those that are free after it, and how much it launches
    at most: one for an operator that is not ours; None where nobody says."""

    code: Sequence[str]
    text: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    launches: int | None = 1


@dataclass(eq=False)
class Program:
    """Steps over slots. Slots 0 .. inputs-1 are the inputs; `constants` are preset. Boxed: call it with a list of inputs, which it
    empties.
    """

    inputs: int
    sizes: Sizes
    steps: list[Step] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    slots: int = 0
    results: list[Any] = field(default_factory=list)  # slot numbers, or (value,) for a literal
    regions: list[tuple[Region, RegionKernel]] = field(default_factory=list)  # those that are one step, with what runs them, in order
    scope: dict[str, Any] = field(default_factory=dict)  # what the code of the steps has names for
    _boxed_call: bool = True

    def name(self, value: Any) -> str:
        """A name for `value` in the code of steps."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def finish(self) -> Program:
        """Computes what each step frees, and the code of the program's functions. To be called once, after the last step was added."""
        kept = {result for result in self.results if isinstance(result, int)} | set(self.constants)
        last = {slot: number for number, step in enumerate(self.steps) for slot in (*step.reads, *step.writes)}
        for number, step in enumerate(self.steps):
            step.frees = tuple(sorted(slot for slot in {*step.reads, *step.writes} if last[slot] == number and slot not in kept))
        given = [f"sizes = {self.name(self.sizes.bind)}(inputs)" if self.sizes.names else "sizes = ()"]
        given += [f"{''.join(f'{CODE.format(slot)}, ' for slot in range(self.inputs))} = inputs"] if self.inputs else []
        lines = [f"{CODE.format(slot)} = {self.name(value)}" for slot, value in self.constants.items()]
        for step in self.steps:
            lines += step.code
            # What the last step would free goes with all slots when the call returns.
            lines += [f"{' = '.join(map(CODE.format, step.frees))} = None"] if step.frees and step is not self.steps[-1] else []
        results = [CODE.format(result) if isinstance(result, int) else self.name(result[0]) for result in self.results]
        self._given, self._body = given, [*lines, f"return [{', '.join(results)}]"]
        return self

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], list[Any]]:
        """The program as a function of a list of its inputs, made when it is first asked for: a model's has thousands of lines."""
        return self._function("inputs", [*self._given, "inputs.clear()", *self._body])

    def unboxed(self, otherwise: Callable[..., Any], written: Sequence[int], unless: Sequence[str] = ()) -> Callable[..., Any]:
        """The program as a function of its inputs, as Dynamo calls it, which counts the writes to those numbered `written`. Where gradients
        are on, or one of the conditions `unless` holds, which are code, `otherwise` is called instead. All in one function, since each one
        on the way to a kernel costs a call more than reading an address does."""
        conditions = " or ".join([f"{self.name(torch.is_grad_enabled)}()", *unless])
        lines = [f"if {conditions}:", f"    return {self.name(otherwise)}(*inputs)"]
        if written:
            numbers = ", ".join(f"inputs[{number}]" for number in written)
            lines.append(f"{self.name(torch.autograd.graph.increment_version)}([{numbers}])")
        return self._function("*inputs", [*lines, *self._given, *self._body])

    def _function(self, parameters: str, lines: Sequence[str]) -> Callable[..., list[Any]]:
        exec(f"def run({parameters}):\n" + "".join(f"    {line}\n" for line in lines), self.scope)
        function: Callable[..., list[Any]] = self.scope["run"]
        return function

    @property
    def needed(self) -> set[int]:
        """The inputs on which anything depends. Dynamo also hands in numbers that nothing asks for, such as where in its storage a slice
        of token ids begins."""
        read = {slot for step in self.steps for slot in step.reads} | {result for result in self.results if isinstance(result, int)}
        return {slot for slot in read if slot < self.inputs} | {self.sizes.sources[name] for name in self.sizes.used}

    @property
    def launches(self) -> list[int | None]:
        """What each step launches at most; None where nobody says."""
        return [step.launches for step in self.steps]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self.run(inputs)

    def __str__(self) -> str:
        width = len(str(len(self.steps)))
        sizes = ", ".join(self.sizes.names)
        head = f"program of {len(self.steps)} steps over {self.slots} slots; inputs %0 .. %{self.inputs - 1}; sizes ({sizes})"
        lines = [
            f"{number:>{width}}  {step.text}" + (f"    # frees {', '.join(f'%{s}' for s in step.frees)}" if step.frees else "")
            for number, step in enumerate(self.steps)
        ]
        results = ", ".join(f"%{r}" if isinstance(r, int) else repr(r[0]) for r in self.results)
        return "\n".join([head, *lines, f"{'':>{width}}  return {results}"])


def no_kernels(region: Region, values: Sequence[Any], sizes: Sizes, overlaps: bool = False) -> RegionKernel | None:
    """Kernels for no region: everything runs by references."""
    return None


def reference_kernels(region: Region, values: Sequence[Any], sizes: Sizes, overlaps: bool = False) -> RegionKernel | None:
    """A kernel for every region that computes its body by references and stores the results where a real kernel would."""
    return ReferenceKernel(region)


def build(
    gm: fx.GraphModule, example_inputs: Sequence[Any], kernels: Kernels, table: Mapping[str, Callable[..., Any]] | None = None
) -> Program:
    """The lowered graph as a program. `kernels` says what runs a region (None: its members, by references); `table` holds other forms of
    semantic operators (see runtime/expand.py)."""
    return _Builder(Sizes(example_inputs), kernels, table or {}).build(gm)


def interpret(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context) -> Program:
    """The lowered graph as a program that runs every operator by its reference, KV writes in place where lowering allows them."""
    return build(gm, example_inputs, no_kernels)


class _Builder:
    def __init__(self, sizes: Sizes, kernels: Kernels, table: Mapping[str, Callable[..., Any]]):
        self.program = Program(0, sizes)
        self.kernels = kernels
        self.table = table
        self.copies: list[tuple[int, int]] = []  # the slots (to, from) of the last step, if it copies results to inputs
        self.copied: tuple[Any, ...] = ()  # the dtype and device of these
        self.views = Views()
        self.begun = False  # whether a kernel of a region is launched before what comes next, whatever the sizes are

    def build(self, gm: fx.GraphModule) -> Program:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.program.inputs = len(placeholders)
        slots: dict[fx.Node, Any] = {node: self.slot() for node in placeholders}
        returned = self.lower(gm, slots)
        values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        self.program.results = [slots[value] if isinstance(value, fx.Node) else (value,) for value in values]
        return self.program.finish()

    def slot(self) -> int:
        self.program.slots += 1
        return self.program.slots - 1

    def lower(self, gm: fx.GraphModule, slots: dict[fx.Node, Any], region: Region | None = None) -> Any:
        """Adds the steps of one graph (the outer one, or a region's body). `slots` maps nodes to slots (a region call: to a list of
        slots).
        """
        writes = in_place_writes(region) if region is not None else {}
        for node in gm.graph.nodes:
            if node.op == "output":
                return node.args[0]
            if node.op == "get_attr":
                slots[node] = self.slot()
                self.program.constants[slots[node]] = attribute_of(gm, node.target)
            elif node.op == "call_module":
                arguments = [slots[arg] if isinstance(arg, fx.Node) else (arg,) for arg in node.args]
                slots[node] = self.region(region_of(node), arguments, node, _stored(node, slots))
            elif node.op == "call_function":
                self.call(node, slots, write_in_place if node in writes else None, region)
        raise DsiInternalError("a graph without an output node")

    def call(self, node: fx.Node, slots: dict[fx.Node, Any], function: Callable[..., Any] | None, region: Region | None) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(slots[node.args[0]], list):
            slots[node] = slots[node.args[0]][node.args[1]]
            return
        if node.meta.get(STORED):
            into, source = map_arg(node.args[:2], slots.__getitem__)
            if into == source:  # the kernel has stored it there
                slots[node] = into
                return
        if node.target is torch.ops.aten.copy_.default and region is None and self.copied_at_once(node):
            self.copy(node, slots)
            return
        if region is None and (found := self.views.of(node)) is not None:
            self.view(node, slots, *found)
            return
        self.copies = []
        function = function or expansion(node.target, self.table)
        reads: list[int] = []

        def written(value: Any, slot: str) -> str:
            """`value` as source text, a slot's number put into the format `slot`."""
            if isinstance(value, fx.Node):
                reads.append(slots[value])
                return slot.format(slots[value])
            if isinstance(value, (list, tuple)):
                items = ", ".join(written(item, slot) for item in value)
                return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
            if isinstance(value, dict):
                return "{" + "".join(f"{key!r}: {written(item, slot)}, " for key, item in value.items()) + "}"
            if isinstance(value, slice):
                return f"slice({', '.join(written(part, slot) for part in (value.start, value.stop, value.step))})"
            if value is None or type(value) in (bool, int, str):
                return repr(value)
            return self.program.name(value) if slot == CODE else str(value)

        def call(slot: str) -> str:
            return ", ".join(
                [*(written(arg, slot) for arg in node.args), *(f"{key}={written(arg, slot)}" for key, arg in node.kwargs.items())]
            )

        slots[node] = self.slot()
        code = f"{CODE.format(slots[node])} = {self.program.name(function)}({call(CODE)})"
        inside = f"[{region.name}] " if region is not None else ""
        text = f"{inside}%{slots[node]} = {'dsi.kv_write_' if function is write_in_place else _name(node.target)}({call('%{}')})"
        self.program.steps.append(Step([code], text, tuple(reads), (slots[node],)))

    def view(self, node: fx.Node, slots: dict[fx.Node, Any], output: fx.Node, view: torch.Tensor) -> None:
        """Adds a view of a kernel's output, made of that whatever views lie between; nothing where these are all that read it."""
        if self.views.only_seen_through(node):
            return
        self.copies = []
        slots[node], base = self.slot(), slots[output]
        numbers = f"{tuple(view.shape)}, {view.stride()}, {view.storage_offset()}"
        code = f"{CODE.format(slots[node])} = {self.program.name(as_strided)}({CODE.format(base)}, {numbers})"
        text = f"%{slots[node]} = as_strided(%{base}, {numbers})"
        self.program.steps.append(Step([code], text, (base,), (slots[node],), launches=0))

    def copied_at_once(self, node: fx.Node) -> bool:
        """Whether a copy may be made together with others: of a kernel's result, which shares no memory with what any of them writes."""
        into, source = node.args[:2]
        if (
            len(node.args) != 2
            or node.kwargs
            or not isinstance(source, fx.Node)
            or not isinstance(into, fx.Node)
            or into.op != "placeholder"
        ):
            return False
        call = source.args[0] if source.target is operator.getitem else None
        if not isinstance(call, fx.Node) or call.op != "call_module" or source.args[1] in region_of(call).in_place:
            return False
        one, other = into.meta["val"], source.meta["val"]
        return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)

    def copy(self, node: fx.Node, slots: dict[fx.Node, Any]) -> None:
        """Adds a copy to the last step, if that copies, too: the lengths of a cache's layers are one launch, not one each."""
        written, source = node.args[:2]
        assert isinstance(written, fx.Node) and isinstance(source, fx.Node)
        into, kind = slots[written], (written.meta["val"].dtype, written.meta["val"].device)
        if self.copies and self.copied == kind and into not in {other for other, _ in self.copies}:
            self.program.steps.pop()
        else:
            self.copies, self.copied = [], kind
        self.copies.append((into, slots[source]))
        sides = [[pair[side] for pair in self.copies] for side in (0, 1)]

        def lists(slot: str) -> str:
            return ", ".join(f"[{', '.join(map(slot.format, side))}]" for side in sides)

        code = f"{self.program.name(torch._foreach_copy_)}({lists(CODE)})"
        self.program.steps.append(Step([code], f"copy {lists('%{}')}", (*sides[0], *sides[1])))
        slots[node] = into

    def region(self, region: Region, arguments: list[Any], node: fx.Node, stored: Mapping[int, int]) -> list[Any]:
        """Adds the step of a region; gives the slots of its outputs. A kernel stores those in `stored` (output number -> slot) there."""
        self.copies = []
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
        kernel = self.kernels(region, values, self.program.sizes, self.begun and _constants_are_inputs(region, node))
        if kernel is None:
            inner: dict[fx.Node, Any] = {}
            for placeholder, argument in zip(region.inputs, arguments, strict=True):
                inner[placeholder] = argument if isinstance(argument, int) else self.constant(argument[0])
            return [inner[output] for output in self.lower(region.body, inner, region)]
        # A number that the body never looks at is not waited for: a kernel has it from `sizes`, if at all.
        idle = [not isinstance(node.meta["val"], torch.Tensor) and not node.users for node in region.inputs]
        reads = [
            self.constant(None if unused else argument[0]) if unused or not isinstance(argument, int) else argument
            for unused, argument in zip(idle, arguments, strict=True)
        ]
        self.views.kernels.add(node)
        writes = [stored[number] if number in stored else self.slot() for number in range(len(region.outputs))]
        foreign = {number for number, arg in enumerate(node.args) if isinstance(arg, fx.Node) and not self.ours(arg)}
        variables = [[CODE.format(slot) for slot in some] for some in (reads, writes)]
        sizes, name = self.program.sizes, self.program.name
        code = region_step(region, kernel, ReferenceKernel(region), variables[0], variables[1], sizes, foreign, name, set(stored))
        self.program.regions.append((region, kernel))
        tensors = [*values, *(output.meta["val"] for output in region.outputs)]
        self.begun |= not isinstance(kernel, ReferenceKernel) and all(map(never_empty, tensors))
        called = ", ".join(f"%{slot}" for slot in reads)
        text = f"{', '.join(f'%{slot}' for slot in writes)} = {region.name}({called})    # {kernel.describe()}"
        self.program.steps.append(Step(code, text, tuple(reads), tuple(writes), launches=getattr(kernel, "launches", None)))
        return list(writes)

    def ours(self, node: fx.Node) -> bool:
        """Whether a value is an input of the program, whose layout is guarded, a constant, or a kernel's output."""
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return node.args[0] in self.views.kernels
        return node.op in ("placeholder", "get_attr")

    def constant(self, value: Any) -> int:
        slot = self.slot()
        self.program.constants[slot] = value
        return slot


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _stored(call: fx.Node, slots: Mapping[fx.Node, Any]) -> dict[int, int]:
    """The outputs of a region's call that its kernel may store in an input of the program: output number -> the input's slot."""
    parts: list[Any] = list(call.users)
    copies: list[tuple[int, Any]] = [(part.args[1], copy) for part in parts for copy in part.users if copy.meta.get(STORED)]
    return {number: slots[copy.args[0]] for number, copy in copies}


def _constants_are_inputs(region: Region, node: fx.Node) -> bool:
    """Whether what a region's kernel may read before the kernels before it have ended was there before the program began.

    Nothing in the graph writes the constants of a specification, but an operator that is not ours may have made one.
    """
    for number in region.spec.constants if region.spec is not None else ():
        base: Any = node.args[number]
        while isinstance(base, fx.Node) and isinstance(base.target, torch._ops.OpOverload) and base.target.is_view:
            base = base.args[0]
        if isinstance(base, fx.Node) and base.op not in ("placeholder", "get_attr"):
            return False
    return True


class ReferenceKernel:
    """Runs a region's body by references and stores the results in the outputs given, as a generated kernel would."""

    def __init__(self, region: Region):
        self.region = region
        self._body: Program | None = None

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], sizes: Environment) -> None:
        if self._body is None:
            self._body = _body_program(self.region)
        for output, result in zip(outputs, self._body(list(inputs)), strict=True):
            if output is not result:
                output.copy_(result)

    def describe(self) -> str:
        return f"reference of {self.region.label or self.region.kind}"


def _body_program(region: Region) -> Program:
    builder = _Builder(Sizes(()), no_kernels, {})
    inner: dict[fx.Node, Any] = {node: builder.slot() for node in region.inputs}
    builder.program.inputs = len(inner)
    builder.program.results = [inner[output] for output in builder.lower(region.body, inner, region)]
    return builder.program.finish()
