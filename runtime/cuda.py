"""The CUDA executor: the lowered graph as a linear program whose region steps launch generated Triton kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dsi.codegen.devices import Device, find_device
from dsi.codegen.few_launches import host_bound, note
from dsi.ir.context import Context
from dsi.ir.errors import Refusal
from dsi.ir.region import Region
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .ahead import Made, compile_ahead, sizes_now
from .cache import DiskCache
from .expand import region_of
from .fallback import FallingBack
from .graphs import CudaRecorder, GraphedProgram, launching_costs, replay_costs, written_inputs
from .inductor_api import static_inputs
from .kernels import KernelSet, device_name, kernels_for, renew
from .launch import GeneratedKernel
from .program import Kernels, Program, RegionKernel, build
from .sizes import Sizes, expression
from .timing import timed
from .trial import DeviceTrials
from .tune import tune, unusable

Boxed = Callable[[list[Any]], Sequence[Any]]

# The modes in which torch.compile's users expect one launch a call.
GRAPHED_MODES = ("reduce-overhead", "max-autotune")


def compile_cuda(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context) -> Boxed:
    """A boxed callable that computes the lowered graph `gm` on the device of its inputs, on the current stream.

    A region for which no kernel can be generated runs member by member, by references; the report says why.
    """
    index = next((value.device.index for value in example_inputs if _is_tensor(value) and value.device.type == "cuda"), None)
    index = torch.cuda.current_device() if index is None else index
    if context.options.mode.startswith("max-autotune"):
        with timed(context, "tuning"):
            tune_kernels(context, torch.device("cuda", index))
    device, mode = torch.device("cuda", index), context.options.mode

    def built(few: bool) -> tuple[Program, list[Made]]:
        made: list[Made] = []
        with timed(context, "kernels"), torch.cuda.device(index):
            return build(gm, example_inputs, generated_kernels(context, device, made, few)), made

    few = waits_for_the_host(gm, find_device(torch.cuda.get_device_name(index)))
    program, made = built(few)
    graphed = False
    if mode in GRAPHED_MODES:
        static, written = static_inputs(gm), written_inputs(gm)
        reason = why_not_graphed(gm, example_inputs) if context.options.cuda_graphs else "cuda_graphs=False"
        reason = reason or why_not_worth_it(program, replay_costs(example_inputs, static, written, program.results))
        if reason:
            context.report.notes.append(f"mode {mode!r}: every kernel is launched by itself: {reason}")
        graphed = not reason
    if graphed and few:  # one launch of the host's for all of them
        program, made = built(False)
    elif spared := launches_spared(program):
        context.report.notes.append(note(spared))
    sizes = sizes_now(program.sizes, example_inputs)
    if made and sizes is not None:
        with timed(context, "triton"):
            compile_ahead(made, sizes, device)
    graphs = GraphedProgram(program, example_inputs, static, written, context, CudaRecorder(device), program.needed) if graphed else None
    run: Boxed = program if graphs is None else graphs

    # torch's own, without asking each time whether CUDA is there: the inputs of a call are.
    current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def call(inputs: list[Any]) -> Sequence[Any]:
        if current() == index:
            return run(inputs)
        with torch.cuda.device(index):
            return run(inputs)

    if graphs is None:
        elsewhere = f"{program.name(current)}() != {index}"
        call.unboxed = functools.partial(program.unboxed, unless=(elsewhere,))  # type: ignore[attr-defined]
    call._boxed_call = True  # type: ignore[attr-defined]
    call.program = program  # type: ignore[attr-defined]
    call.graphs = graphs  # type: ignore[attr-defined]
    return call


def tune_kernels(context: Context, device: torch.device) -> None:
    """Has the kernels of a graph's regions be those that are fastest on the device, as far as the seconds for it go."""
    reason = unusable(device) or ("tuning=0" if not context.options.tuning else "")
    if reason:
        context.report.notes.append(f"mode {context.options.mode!r}: no kernel is tuned: {reason}")
        return
    with unset_fake_temporarily(), torch.cuda.device(device):
        name = device_name(context)
        figures = find_device(name)
        if tune(context.report.regions, context, DeviceTrials(device, figures), name, figures):
            renew(context.report.regions, name)
        torch.cuda.empty_cache()  # of the data that kernels were tried on


def compile_interpreted(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context) -> Program:
    """The same program on CPU tensors, its kernels run by Triton's interpreter. For tests, in a process that was started with
    TRITON_INTERPRET=1.
    """
    return build(gm, example_inputs, generated_kernels(context, "cpu"))


def why_not_graphed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Why a CUDA graph of `gm` would go on using what it saw when it was recorded; "" where it would not."""
    tensors = [(n.name, v.device) for n, v in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True) if _is_tensor(v)]
    for name, device in tensors:
        if device.type != "cuda":
            return f"a CUDA graph keeps the value that {name}, which is on the {device.type}, has when it is recorded"
    if len({device for _, device in tensors}) > 1:
        return "a CUDA graph records one device, and its inputs are on several"
    node = next((node for node in gm.graph.nodes if node.op == "call_function" and free_unbacked_symbols(node.meta.get("val"))), None)
    if node is not None:
        return f"a CUDA graph has fixed sizes, and one that {node.name} has depends on values"
    return ""


def why_not_worth_it(program: Program, replayed: float) -> str:
    """Why a recorded graph, which costs the host `replayed` microseconds a call, would save nothing; "" where it would, or nobody knows."""
    launched = launching_costs(program.launches)
    if launched is None or launched > replayed:
        return ""
    return f"a call takes the host about {launched:.0f} us, and would take {replayed:.0f} with a graph and the copies of inputs and results"


def waits_for_the_host(gm: fx.GraphModule, figures: Device) -> bool:
    """Whether a device with these figures should need less for a call of `gm` than the host. Operators that are not ours take nobody
    knows how long."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and _is_tensor(node.meta.get("val"))]
    if any(node.target is not operator.getitem and not getattr(node.target, "is_view", False) for node in calls):
        return False
    return host_bound([region_of(node).spec for node in gm.graph.find_nodes(op="call_module")], figures)


def launches_spared(program: Program) -> int:
    """How many launches of a call are spared by kernels that were chosen for that."""
    return sum(kernel.kernel.found.spared for _, kernel in program.regions if isinstance(kernel, FallingBack))


def generated_kernels(context: Context, device: torch.device | str, made: list[Made] | None = None, few: bool = False) -> Kernels:
    """What runs a region on tensors of `device`: its generated kernels, or None, with a refusal in the report, where it must run by
    references. Each is added to `made`, with its region. `few`: those of one launch, where they are near the fastest.
    """
    disk = DiskCache(device_name(context), context.options.cache)
    here = torch.device(device)

    def kernels(region: Region, values: Sequence[Any], sizes: Sizes, overlaps: bool = False) -> RegionKernel | None:
        found: Any = kernels_for(region, context, few)
        tensors = [*zip(region.inputs, values, strict=True), *((node, node.meta["val"]) for node in region.outputs)]
        elsewhere = [f"{node} on {value.device}" for node, value in tensors if _is_tensor(value) and _place(value.device) != _place(here)]
        if not isinstance(found, Refusal) and elsewhere:
            found = Refusal(f"runs by references: {', '.join(elsewhere)} cannot be read by a kernel on {here}", node=region.name)
        unknown = sorted({symbol for _, value in tensors for symbol in _symbols(value)} - set(sizes.names))
        if not isinstance(found, Refusal) and unknown:
            reason = f"runs by references: {', '.join(unknown)} is a size that depends on values and no input of the graph has"
            found = Refusal(reason, node=region.name)
        if isinstance(found, Refusal):
            if found not in context.report.unfused:
                context.report.unfused.append(found)
            return None

        def remade(found: KernelSet) -> GeneratedKernel:
            return GeneratedKernel(found, values, sizes, disk, here, overlaps)

        kernel = remade(found)
        if made is not None:
            made.append((region, kernel))
        return FallingBack(kernel, region, context, remade)

    return kernels


def _symbols(value: Any) -> set[str]:
    """The names of the symbols in the shape and strides of a fake, or in a SymInt."""
    sizes = [*value.shape, *value.stride()] if _is_tensor(value) else [value]
    return {symbol.name for size in sizes if isinstance(size, torch.SymInt) for symbol in expression(size).free_symbols}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0
