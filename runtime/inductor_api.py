"""The private parts of torch that the CPU executor stands on, in one place.

Everything here may move between torch versions (2.11 to 2.14 are supported); nothing outside this file imports `torch._inductor`. Where a
name or a parameter differs between versions, its presence is asked for, not the version number.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .packs import PACKED
from .results import keep_apart, memory_of, several_of_one_memory, told_apart


@functools.cache
def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles. make_fx, Inductor's pattern tables and its configuration are process-wide, so whoever
    comes without Dynamo must hold it too."""
    from torch._dynamo import convert_frame

    return getattr(convert_frame, "compile_lock", None) or threading.RLock()


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call, None if there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        return None


def decompositions() -> dict[Any, Callable]:
    """The table of ATen decompositions that Inductor's own front end traces with, except where that changes numbers: a term of `addmm` with
    a factor of 0 is left out, whatever it holds; written out, it would be 0 times that. Products of integers by a row or a column, and
    `ldexp`, are written out, since what Inductor makes of them has other dtypes.
    """
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    addmm = table.get(torch.ops.aten.addmm.default)

    def with_both_terms(*args: Any, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> Any:
        assert addmm is not None
        return NotImplemented if beta == 0 or alpha == 0 else addmm(*args, beta=beta, alpha=alpha, **kwargs)

    if addmm is not None:
        table[torch.ops.aten.addmm.default] = with_both_terms
    bmm = table.get(torch.ops.aten.bmm.default)

    def of_their_dtype(a: Any, b: Any, **kwargs: Any) -> Any:
        if a.dtype.is_floating_point or a.dtype.is_complex or (a.shape[1] != 1 and b.shape[2] != 1):
            return NotImplemented if bmm is None else bmm(a, b, **kwargs)
        return (a.unsqueeze(-1) * b.unsqueeze(1)).sum(2, dtype=a.dtype)

    table[torch.ops.aten.bmm.default] = of_their_dtype
    table[torch.ops.aten.ldexp.Tensor] = _ldexp
    return table


def _ldexp(x: Any, exponent: Any) -> Any:
    dtype = torch.result_type(x, exponent)
    return (x * torch.pow(2.0, exponent)).to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def static_input_indices() -> tuple[int, ...]:
    """Numbers of the inputs of the graph being compiled that keep their address between calls (parameters, buffers), as AOTAutograd found
    them.
    """
    tracing = torch._guards.TracingContext.try_get()
    metadata = tracing.fw_metadata if tracing is not None else None
    return tuple(metadata.static_input_indices or ()) if metadata is not None else ()


def static_inputs(gm: fx.GraphModule) -> list[int]:
    """Numbers of the placeholders of `gm`, a graph of the compilation under way, that keep their address between calls: those that
    AOTAutograd found, and packs of weights."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    found = {number for number in static_input_indices() if number < len(placeholders)}
    return sorted(found | {number for number, node in enumerate(placeholders) if PACKED in node.meta})


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The fake mode that `inputs` belong to, or that of the compilation under way, or None."""
    found = torch._guards.detect_fake_mode(list(inputs))
    if found is not None:
        return found
    tracing = torch._guards.TracingContext.try_get()
    return tracing.fake_mode if tracing is not None else None


@contextlib.contextmanager
def tracing_under(fake_mode: Any) -> Iterator[None]:
    """Within: operators are traced on fakes of `fake_mode`, with shape-polymorphic decompositions, without gradients and without
    autocast.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with fake_mode, enable_python_dispatcher(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def trace(function: Callable, inputs: Sequence[Any], fake_mode: Any) -> fx.GraphModule:
    """`function` of flat `inputs` (fakes and SymInts of `fake_mode`) as a flat graph of decomposed ATen operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with compile_lock(), tracing_under(fake_mode):
        return make_fx(function, decomposition_table=decompositions(), tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


def current_graph() -> fx.Graph:
    """The graph that `trace` is writing to."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None, "no trace is under way"
    return mode.tracer.graph


def mode_patches(mode: str) -> dict[str, Any]:
    """What torch.compile's `mode` changes in Inductor's configuration, as far as it concerns the CPU."""
    options = torch._inductor.list_mode_options(mode)
    return {name: value for name, value in options.items() if not name.startswith("triton.")}


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], written: Sequence[int] = ()
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a flat, decomposed inference graph by Inductor: joint-graph passes, post-grad passes, C++. Returns a boxed callable.

    The last results are what is to be written to the inputs numbered `written`; no one sees their strides.

    This is what `compile_fx_forward` does with an inference graph, except that the static inputs are those that AOTAutograd names:
    parameters and buffers are inputs here, wherever they stand among the others.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    _drop_unread_parts(gm)
    static = static_inputs(gm)
    with compile_lock(), V.set_fake_mode(fake_mode_of(inputs)), config.patch({**_as_written(), **patches}), _indices_as_they_are():
        memory, several = memory_of(gm), several_of_one_memory(gm)
        gm = _joint_graph_passes(compile_fx, gm, inputs)
        keep_apart(gm, memory, written)
        output = next(iter(reversed(gm.graph.nodes)))
        results = output.args[0][: len(output.args[0]) - len(written)]
        output.meta["user_visible_output_idxs"] = (
            [number for number, value in enumerate(results) if isinstance(value, fx.Node)] if config.keep_output_stride else []
        )
        compiled = compile_fx.compile_fx_inner(gm, inputs, static_input_idxs=static, is_inference=True)
    return told_apart(boxed(compiled), several)


def _drop_unread_parts(gm: fx.GraphModule) -> None:
    """Erase parts of a tuple that nothing reads: Inductor makes fewer than the operator has (flex attention's, on a CPU)."""
    for node in reversed(gm.graph.find_nodes(op="call_function", target=operator.getitem)):
        if not node.users:
            gm.graph.erase_node(node)


def _as_written() -> dict[str, Any]:
    """What has Inductor compile the graph that it is given. Its pattern tables take any literal, and an argument that they do not name, for
    the one that they were made with: a softmax over the wrong dimension becomes fused attention, a `cumsum` loses its dtype. What they look
    for has been recognised before, exactly. Its folding of uniform values takes `x * 0` for 0 where x may be infinite or no number. A cast
    to half precision that is cast back rounds, which is what it is there for.
    """
    from torch._inductor import config

    wanted = {"pattern_matcher": False, "joint_graph_constant_folding": False, "emulate_precision_casts": True}
    return {name: value for name, value in wanted.items() if hasattr(config, name)}


@contextlib.contextmanager
def _indices_as_they_are() -> Iterator[None]:
    """Within: a vector of consecutive indices is computed in 64 bits. A step that is printed as a plain literal overflows from 2**31 on
    when it is multiplied by the number of a lane: `torch.arange(16) * 10**9` had wrong numbers. In half precision the first index would
    be rounded before the others are counted from it; those are converted from integers instead. The caller holds the lock.
    """
    try:
        from torch._inductor.codegen.cpp import CppVecKernel, CppVecOverrides
        from torch._inductor.virtualized import ops
    except ImportError:
        yield
        return
    arange, index_expr = CppVecKernel.arange, CppVecOverrides.index_expr

    def in_64_bits(self: Any, index: Any, stride: Any) -> Any:
        return arange(self, index, f"{int(stride)}LL" if getattr(stride, "is_Integer", False) or isinstance(stride, int) else stride)

    def from_integers(expr: Any, dtype: torch.dtype) -> Any:
        if dtype not in (torch.float16, torch.bfloat16):
            return index_expr(expr, dtype)
        return ops.to_dtype(index_expr(expr, torch.int64), dtype)

    CppVecKernel.arange = in_64_bits  # type: ignore[method-assign]
    CppVecOverrides.index_expr = staticmethod(from_integers)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppVecKernel.arange = arange  # type: ignore[method-assign]
        CppVecOverrides.index_expr = staticmethod(index_expr)  # type: ignore[method-assign]


def _joint_graph_passes(compile_fx: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    passes = compile_fx._recursive_joint_graph_passes
    output = next(iter(reversed(gm.graph.nodes)))
    output.meta["output_stack_traces"] = [value.meta.get("stack_trace") if isinstance(value, fx.Node) else None for value in output.args[0]]
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    if "input_device" in inspect.signature(passes).parameters:
        return passes(gm, input_device=devices[0] if devices else torch.device("cpu"))
    return passes(gm)


def boxed(function: Callable) -> Callable[[list[Any]], Sequence[Any]]:
    """`function` as a callable of one list of inputs, which it may empty, marked for AOTAutograd."""
    if getattr(function, "_boxed_call", False):
        return function

    def call(inputs: list[Any]) -> Sequence[Any]:
        return function(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def cache_hits() -> tuple[int, int]:
    """(hits, misses) of Inductor's graph cache in this process so far."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
