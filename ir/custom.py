"""Users' own operators: a reference that defines one, and a kernel that computes it on a CUDA device.

`custom_op` registers a torch operator out of the two. A rule puts it into the graph (`dsi.call(op, ...)`); there it is one node that no
region takes in. On a CUDA device the kernel runs; everywhere else the reference does, and on the CPU it is compiled with what is around it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import DsiError

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class CustomOp:
    """One operator of a user's: `reference` is its meaning, `kernel` (None: there is none) computes the same on CUDA tensors.

    Calling it calls the torch operator `overload`, as a model's code may do too.
    """

    name: str
    overload: torch._ops.OpOverload
    reference: Function
    kernel: Function | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def __str__(self) -> str:
        return self.name

    def sources(self) -> list[tuple[str, str]]:
        """(title, text) of the reference and the kernel, with the Triton functions that the kernel's module-level names lead to."""
        found = [("reference", _source(self.reference))]
        if self.kernel is not None:
            parts = [_source(self.kernel)]
            code = getattr(self.kernel, "__code__", None)
            for name in code.co_names if code is not None else ():
                inner = getattr(self.kernel.__globals__.get(name), "fn", None)  # a function under @triton.jit
                if callable(inner):
                    parts.insert(0, _source(inner))
            found.append(("kernel", "\n\n".join(parts)))
        return found


CUSTOM: dict[str, CustomOp] = {}
"""Every operator that `custom_op` has made, by the name that a graph's nodes have: "mine.soft_norm"."""

_libraries: list[torch.library.Library] = []
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")


def custom_op(name: str, reference: Function, *, kernel: Function | None = None, fake: Function | None = None) -> CustomOp:
    """Registers the operator `name` ("mine::soft_norm") and returns it.

    `reference`: a function of tensors and literals in plain torch, its parameters annotated (the schema is read off them), which changes no
    argument and draws no random numbers. It is the operator's definition: whatever it computes is right. `kernel`: a function with the same
    parameters that launches a kernel of yours and returns new contiguous tensors; called for CUDA tensors. `fake`: shapes and dtypes of the
    results without computing (`torch.library.register_fake`); without it the reference says them.

    Results are tensors, contiguous, each in memory of its own. Raises `DsiError` for a name that is taken or malformed, for parameters
    without annotations, for results that are no tensors, and for a kernel whose parameters are not the reference's; tracing a call (with
    `fake`, the first one) raises it for a reference that writes to an argument.
    """
    for what, function in (("reference", reference), ("kernel", kernel), ("fake", fake)):
        if function is not None and not callable(function):
            raise DsiError(f"custom_op: {name}: the {what} is {function!r}, which is no function")
    if not _NAME.fullmatch(name):
        raise DsiError(f"custom_op: {name!r} is no name of an operator; it must have the form 'namespace::name'")
    namespace, short = name.split("::")
    spelled = f"{namespace}.{short}"
    if namespace in ("aten", "prims", "dsi") or hasattr(getattr(torch.ops, namespace), short):
        raise DsiError(f"custom_op: the name {name!r} is taken; choose another one")
    try:
        schema = torch.library.infer_schema(reference, mutates_args=())
    except ValueError as error:
        raise DsiError(f"custom_op: {name}: the reference's parameters and result must be annotated: {error}") from None
    results = torch._C.parse_schema(f"{name}{schema}").returns
    if not results or any(str(result.type) not in ("Tensor", "List[Tensor]", "Tensor[]") for result in results):
        raise DsiError(
            f"custom_op: {name}: the reference returns {[str(r.type) for r in results] or None}; an operator's results are tensors"
        )
    if kernel is not None and list(inspect.signature(kernel).parameters) != list(inspect.signature(reference).parameters):
        raise DsiError(
            f"custom_op: {name}: the kernel's parameters {list(inspect.signature(kernel).parameters)} are not the reference's "
            f"{list(inspect.signature(reference).parameters)}"
        )
    plain = _own_memory(reference)
    unwritten = _unwritten(name, plain)
    if fake is not None:  # else it is found out when the reference says the shapes
        plain = _at_first(unwritten, plain)
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)  # it unregisters the operator when it is collected
    library.define(f"{short}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(short, plain, "CompositeExplicitAutograd")
    if kernel is not None:
        library.impl(short, _own_memory(kernel), "CUDA")
    torch.library.register_fake(name, _own_memory(fake) if fake is not None else unwritten, lib=library)
    operator = CustomOp(name, getattr(getattr(torch.ops, namespace), short).default, plain, kernel)
    CUSTOM[spelled] = operator
    return operator


def custom_of(target: object) -> CustomOp | None:
    """The operator whose overload a node's target is; None if it is no user's."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found = CUSTOM.get(str(target).rsplit(".", 1)[0])
    return found if found is not None and found.overload is target else None


def _own_memory(function: Function) -> Function:
    """`function`, its results contiguous and each in memory of its own."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not isinstance(result, (tuple, list)):
            return _owned(result, others)
        owned = []
        for value in result:
            owned.append(_owned(value, others))
            others.append(owned[-1])
        return type(result)(owned)

    computed.__wrapped__ = function  # type: ignore[attr-defined]
    computed.__name__ = getattr(function, "__name__", "reference")
    return computed


def _owned(result: Any, others: list[Tensor]) -> Any:
    if not isinstance(result, Tensor):
        return result
    if any(result.untyped_storage()._cdata == value.untyped_storage()._cdata for value in others):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


class _Unwritten(TorchDispatchMode):
    """Within: an operator that writes to memory of `given` is a `DsiError`."""

    def __init__(self, name: str, given: list[Tensor]):
        super().__init__()
        self._name, self._given = name, {value.untyped_storage()._cdata for value in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                values = tree_leaves(args[position] if position < len(args) else named.get(parameter.name))
                if any(isinstance(v, Tensor) and v.untyped_storage()._cdata in self._given for v in values):
                    raise DsiError(f"custom_op: {self._name}: the reference writes to an argument ({func}); it must compute on a copy")
        return func(*args, **named)


def _unwritten(name: str, function: Function) -> Function:
    """`function`, which may write to no argument: graphs hold operators that do not, and order them freely."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        with _Unwritten(name, [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]):
            return function(*args, **kwargs)

    return computed


def _at_first(checked: Function, function: Function) -> Function:
    """`function`, whose calls are `checked` until one ends: each operator in it costs more there."""
    done = False

    def computed(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = (function if done else checked)(*args, **kwargs)
        done = True
        return result

    computed.__wrapped__ = function  # type: ignore[attr-defined]
    return computed


def _source(function: Any) -> str:
    function = inspect.unwrap(function)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return f"# the source of {getattr(function, '__qualname__', function)} is not known\n"
